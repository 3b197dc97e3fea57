"""A model over RPC servers as a verifier: the verifier's engine, with the context in another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgellm.mesh.ggml_rpc.model import RpcModel
from edgellm.spec.constraint import GrammarState
from edgellm.spec.protocols import Capabilities
from edgellm.verifier.in_process import ColocatedVerifier, VerifierWorker
from edgellm.verifier.scheduler import SchedulerLimits


class _Worker(VerifierWorker):
    """The engine's thread, which has nothing to decode with while the model is being loaded again."""

    def __init__(self, model: RpcModel, is_eog: Callable[[int], bool]) -> None:
        sizes, default = model.work.sizes, SchedulerLimits()
        # Each batch crosses the network, so a prompt goes in few batches.
        limits = replace(default, rows=sizes.n_batch, chunk=min(default.chunk, sizes.n_batch), solo_chunk=sizes.n_batch)
        super().__init__(model, sizes.n_seq, is_eog, limits)
        self._model = model

    def ready(self) -> bool:
        return self._model.ready


class RpcVerifier(ColocatedVerifier):
    """A verifier over `model`, which is closed with it."""

    def __init__(
        self, model: RpcModel, is_eog: Callable[[int], bool], grammar: Callable[[str], GrammarState] | None
    ) -> None:
        """Answer from `model`, which is open. `grammar` returns the grammar of a JSON schema."""
        self.model = model
        self._worker = _Worker(model, is_eog)
        capabilities = Capabilities(
            model.work.file.name, model.work.sizes.n_ctx, logprobs=True, penalties=True, grammars=grammar is not None
        )
        super().__init__(self._worker, capabilities, grammar)
        self._worker.start()

    def close(self) -> None:
        """Close it, and give up a decode."""
        self.model.stop()
        self._worker.close()
