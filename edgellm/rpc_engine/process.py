"""A model over RPC servers, in a process of its own.

llama.cpp ends the process whose RPC server goes away, so the child does nothing but load and decode.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engine.context import Context
from edgellm.engine.gguf.reader import ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.engine.kv.sequences import SeqRows, Sequences
from edgellm.engine.memory_fit import reckon
from edgellm.engine.model import ContextSpec, LoadSpec, Model
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import DeviceLost, EngineFailed
from edgellm.isolation.child import Answer, Child, ChildFailed, ChildKilled, ChildKind, ChildSilent, Limits
from edgellm.isolation.serving import Functions, Report
from edgellm.rpc_engine import backend
from edgellm.system import be_killed_first, limit

_KIND = ChildKind("edgellm.rpc_engine.process", "holds the model over RPC", keeps_words=True)


class ProcessSilent(DeviceLost):
    """A process was ended after `seconds` without a sign of life."""

    def __init__(self, what: str, next_step: str, seconds: float = 0.0) -> None:
        super().__init__(what, next_step)
        self.seconds = seconds


class ModelProcess(Child):
    """A process that loads one model and decodes. For one thread at a time, but any thread may `kill` it.

    Its context has the methods of `edgellm.engine.Context` that a verifier's engine needs. When the process has ended,
    all methods raise DeviceLost.
    """

    def __init__(self, model: Path, n_vocab: int, context: ContextSpec, hardware: Hardware) -> None:
        """Start the process, without waiting for it. `hardware` says how it computes: its threads, cache and attention.
        Raises EngineFailed: no process can be started."""
        self._n_vocab = n_vocab
        self._sequences = Sequences(context.n_seq, context.n_ctx)
        how = {name: getattr(hardware, name) for name in ("threads", "cache_type", "flash_attn")}
        self._described = {"path": str(model), "context": asdict(context), "hardware": how}
        self._silence = inf
        self._signs: Callable[[], object] = lambda: None
        super().__init__(_KIND, environment={**os.environ, "GGML_NO_BACKTRACE": "1"})
        self.start()

    def expect(self, silence: float, signs: Callable[[], object] | None = None) -> None:
        """From now on, end the process during an order, which then raises ProcessSilent, after `silence` seconds
        without a report or a change of `signs`' result."""
        self._silence, self._signs = silence, signs or self._signs

    def beside_weights(self) -> tuple[int, int]:
        """Return the bytes of the whole model's caches, and of its buffers; nothing is loaded. Raises ModelUnsupported,
        EngineFailed: llama.cpp cannot use it; DeviceLost: the model ends the process."""
        caches, compute = self._ask("reckon", described=self._described).value
        return int(caches), int(compute)

    def load(
        self, served: Sequence[tuple[int, int]], cards: Sequence[str] = (), on_cards: int = 0,
        progress: Callable[[float], None] | None = None,
    ) -> None:  # fmt: skip
        """Load the model: its last layers on `cards` of this machine; the layers before on the servers at ports of this
        machine, so many each, in order; and the rest on the processor. `progress` is called with the share of the
        weights that is loaded, in 0..1. Raises ModelUnsupported, EngineFailed: llama.cpp cannot use it; DeviceLost: a
        server is gone, or the model ends the process."""
        self._ask(
            "load", progress=progress, described=self._described, served=list(served),
            cards=list(cards), on_cards=on_cards,
        )  # fmt: skip

    def decode_rows(self, rows: list[SeqRows]) -> list[Floats]:
        """Decode as `Context.decode_rows` does; the logits are copies."""
        for one in rows:
            self._sequences.check_fits(one.seq, len(one.ids))
        listed = [(one.seq, len(one.ids), one.outputs) for one in rows]
        ids = np.concatenate([one.ids for one in rows]).astype(np.int32)
        ends = np.cumsum([one.outputs for one in rows])
        found = self._ask("decode", ids.tobytes(), int(ends[-1]) * self._n_vocab * 4, rows=listed)
        for one in rows:
            self._sequences.note(one.seq, one.ids)
            self._sequences.lengths[one.seq] += len(one.ids)
        logits = np.frombuffer(found.data, np.float32) if len(found.data) else np.empty(0, np.float32)
        return np.split(logits.reshape(-1, self._n_vocab), ends[:-1])

    def cached(self, seq: int = 0) -> Ids:
        return self._sequences.view(seq)

    def sync(self, ids: Ids, seq: int = 0) -> int:
        length = int(self._ask("sync", ids.astype(np.int32).tobytes(), seq=seq).value)
        if not 0 <= length <= min(len(ids), self._sequences.lengths[seq]):
            raise self._ended()
        self._sequences.lengths[seq] = length
        return length

    def rollback(self, length: int, seq: int = 0) -> None:
        if length != self._sequences.lengths[seq]:
            self._ask("rollback", length=length, seq=seq)
            self._sequences.lengths[seq] = length

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        self._ask("copy_prefix", src=src, dst=dst, length=length)
        self._sequences.copy(src, dst)
        self._sequences.lengths[dst] = length

    def clear(self, seq: int = 0) -> None:
        self._sequences.lengths[seq] = 0
        self._ask("clear", seq=seq)

    def _ask(
        self, name: str, data: bytes = b"", size: int = 0, progress: Callable[[float], None] | None = None,
        **fields: object,
    ) -> Answer:  # fmt: skip
        """Return the answer to an order, with `size` bytes. Raise the error that the child reports, or DeviceLost if
        the process has ended or answers wrongly: a server's data may have taken it over."""
        try:
            call = self.submit(name, Limits(size, silence=self._silence), data, **fields)
            found = call.result(progress=progress, signs=self._signs)
        except ChildSilent as error:
            raise ProcessSilent(
                f"The process that holds the model over RPC is silent: {error}.", "Ask again.", error.seconds
            ) from None
        except (BrokenPipeError, ChildFailed, ChildKilled):
            raise self._ended() from None
        if len(found.data) != size:
            raise self._ended()
        return found

    def _ended(self) -> DeviceLost:
        words = self.last_words()
        self.close()
        return DeviceLost(
            f"The process that holds the model over RPC has ended: {words or 'without a word'}.", "Ask again."
        )


class _Held:
    """The model and the context of the child."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._model: Model | None = None
        self._opened: Context | None = None

    @property
    def context(self) -> Context:
        if self._opened is None:
            raise EngineFailed("No model is loaded.", "Load one first.")
        return self._opened

    def reckon(self, _data: memoryview, described: dict[str, Any]) -> list[int]:
        """Return the bytes that the model takes as a whole beside its weights."""
        on_processor = Hardware(gpu_layers=0, **described["hardware"])
        file = ModelFile.open(Path(described["path"]))
        context = ContextSpec(**described["context"])
        found = reckon(file, on_processor, lambda model: [Context(model, context)], reserved=True)
        return [found.caches.total(), found.compute.total()]

    def load(
        self, _data: memoryview, described: dict[str, Any], served: Sequence[tuple[int, int]], cards: Sequence[str],
        on_cards: int,
    ) -> None:  # fmt: skip
        """Load the model over the servers at some ports of this machine."""
        file = ModelFile.open(Path(described["path"]))
        devices: list[str] = []
        shares: list[float] = []
        for port, layers in served:
            names = backend.add_server(port)
            devices += names
            shares += [layers / len(names)] * len(names)
        devices += cards
        shares += [on_cards / max(1, len(cards))] * len(cards)
        if shares:  # llama.cpp counts the head as a layer, and an MTP layer that is not loaded, too
            shares[-1] += 1 + file.header.mtp_layers
        chosen = Hardware(
            gpu_layers=round(sum(shares)), devices=tuple(devices), tensor_split=tuple(shares), **described["hardware"]
        )  # fmt: skip
        self._model = Model.load(file, LoadSpec(chosen), faults=(), progress=self._report)
        self._opened = Context(self._model, ContextSpec(**described["context"]))

    def decode(self, data: memoryview, rows: Sequence[tuple[int, int, int]]) -> bytes:
        """Return the logits of some rows (sequence, ids, outputs), whose ids are the data."""
        ids, at, entries = np.frombuffer(data, np.int32), 0, []
        for seq, n, outputs in rows:
            entries.append(SeqRows(seq, ids[at : at + n], outputs))
            at += n
        return b"".join(one.tobytes() for one in self.context.decode_rows(entries))


def functions(report: Report) -> Functions:
    """Return the child's functions over the model that it holds."""
    limit("RLIMIT_CORE", 0)
    be_killed_first()
    held = _Held(report)
    return {
        "reckon": held.reckon,
        "load": held.load,
        "decode": held.decode,
        "sync": lambda data, **at: held.context.sync(np.frombuffer(data, np.int32), **at),
        "rollback": lambda _data, **at: held.context.rollback(**at),
        "copy_prefix": lambda _data, **at: held.context.copy_prefix(**at),
        "clear": lambda _data, **at: held.context.clear(**at),
    }
