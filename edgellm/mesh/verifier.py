"""A mesh as a verifier: a draft passes all stages in one micro-batch, so one traversal yields several tokens.

The last stage judges it, so that a verdict travels and no logits. Penalties, grammars and log-probabilities are
computed here, from logits that the last stage sends.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from edgellm.engine import common_prefix
from edgellm.errors import ContextFull, DeviceLost, EdgeError, MeshBroken, PlanImpossible, Stopped, VerifierBusy
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.messages import MAX_BYTES, MAX_ROWS, StageAnswer
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, VerifyRequest, wait_for_result
from edgellm.spec.sampling import GrammarState
from edgellm.spec.types import GREEDY, NO_IDS, Chunk, Floats, Verdict
from edgellm.spec.verification import Judgement


class MeshVerifier(Verifier):
    """A verifier over `mesh`, which is closed with it."""

    def __init__(
        self, mesh: Mesh, is_eog: Callable[[int], bool], rows: int = MAX_ROWS,
        grammar: Callable[[str], GrammarState] | None = None,
    ) -> None:  # fmt: skip
        """Send prompts through the stages in micro-batches of `rows` rows. `grammar` returns the grammar of a JSON
        schema; without it, replies have no constraint."""
        self.mesh, self.rows, self.is_eog = mesh, rows, is_eog
        self._grammar = grammar
        self._capabilities = Capabilities(
            mesh.work.name, mesh.work.context, logprobs=True, penalties=True, grammars=grammar is not None
        )

    def open(self, state: GenerationState) -> Session:
        """Open a session; the stages begin to load now, if they have not. Raises PlanImpossible."""
        self.mesh.pipeline()
        sequence = _Sequence(self)
        return Session(state, sequence.send, grammar=self._grammar, ready=sequence.ready, close=sequence.close)

    def close(self) -> None:
        self.mesh.close()


class _Sequence:
    """The text of one reply in the cache of every stage."""

    def __init__(self, verifier: MeshVerifier) -> None:
        self._mesh, self._verifier = verifier.mesh, verifier
        self._slot: int | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "mesh-reply")

    def ready(self) -> bool:
        """Return whether the session has a sequence in the stages, or a sequence is free for it."""
        return self._slot is not None or self._mesh.free()

    def send(self, request: VerifyRequest) -> Future[Verdict]:
        """Return the verdict: over a new pipeline if the present is lost, which fails with MeshBroken where the
        remaining devices do not hold the model, and with VerifierBusy while as many replies as they hold are open."""
        if self._closed:
            raise MeshBroken("This session is closed.", "Open another session.")
        if self._slot is None:
            self._slot = self._mesh.slot(request.prefix)
        asked = replace(request, prefix=request.prefix.copy(), draft=self._sent(request))
        return self._thread.submit(self._verdict, asked)

    def close(self) -> None:
        """Give the sequence back. Micro-batches that were sent cross the stages all the same."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        if self._slot is not None:
            self._mesh.release(self._slot)
            self._slot = None

    def _sent(self, request: VerifyRequest) -> Chunk:
        """Return the part of a draft to send to the stages: all of it, or as much as there is room for logits."""
        if not _judged_here(request):
            return request.draft
        return request.draft.part(0, max(0, MAX_BYTES // (4 * self._mesh.work.n_vocab) - 1))

    def _verdict(self, request: VerifyRequest) -> Verdict:
        """Return the verdict on the draft; ask again as long as another pipeline can give it, and once after any
        other error."""
        refused = 0
        while True:
            try:
                answer = wait_for_result(self._ask(request), lambda: self._closed)
                found = (
                    answer.verdict
                    if answer.logits is None
                    else self._from_logits(request, answer.logits, answer.verdict.seconds)
                )
                self._mesh.confirm()
                return replace(found, cached=request.computed)
            except DeviceLost:
                pass  # ask a pipeline over the remaining devices, which hold nothing of this session
            except (Stopped, VerifierBusy, MeshBroken):
                raise
            except EdgeError:
                # The stages' caches are unknown now: the next micro-batches start from the beginning.
                if self._slot is not None and (pipeline := self._mesh.current()) is not None:
                    pipeline.forget(self._slot)
                refused += 1
                if refused > 1:
                    raise

    def _ask(self, request: VerifyRequest) -> Future[StageAnswer]:
        """Send the part of the text that the stages lack, and the draft. Raises MeshBroken, ContextFull or
        VerifierBusy."""
        mesh, prefix, draft = self._mesh, request.prefix, request.draft
        if self._slot is None:
            n = mesh.work.sessions
            raise VerifierBusy(f"The devices hold at most {n} replies at a time, and {n} are open.", "Try again soon.")
        if len(prefix) + len(draft) > (most := mesh.work.context):
            raise ContextFull(
                f"{len(prefix)} tokens and {len(draft)} drafted ones do not fit the {most} positions of a session.",
                "Shorten the prompt, or open the mesh with a longer context.",
            )
        mesh.token_ended(self._slot, prefix, self._verifier.rows)
        try:
            pipeline = mesh.pipeline()
        except (PlanImpossible, DeviceLost) as error:
            raise MeshBroken(error.what, error.next_step) from None
        # A session's micro-batches stay in order: the stages have the earlier ones, even without their verdicts.
        request.computed = start = common_prefix(pipeline.held(self._slot), prefix[:-1])
        ids = np.concatenate((prefix, draft.ids)).astype(np.int32)
        here = _judged_here(request)
        sampling = GREEDY if here else request.sampling
        asked = VerifyRequest(self._slot, sampling, len(prefix), NO_IDS, draft, logits=here)
        return pipeline.ask(self._slot, start, ids[start:], asked, self._verifier.rows)

    def _from_logits(self, request: VerifyRequest, logits: Floats, seconds: float) -> Verdict:
        """Return this device's verdict from the last stage's logits. Raises EngineFailed."""
        judgement = Judgement(request, request.prefix, seconds=seconds)
        judgement.judge(logits, len(request.draft), self._verifier.is_eog)
        return judgement.verdict()


def _judged_here(request: VerifyRequest) -> bool:
    """Return whether a verdict needs more than the last stage knows."""
    return request.sampling.ruled or request.logprobs is not None
