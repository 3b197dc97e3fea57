"""A model over RPC servers, in a process of its own, which llama.cpp may end at any time: see `ModelProcess`."""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from edgellm.engine.ggml_rpc.messages import pack, raise_error, unpack
from edgellm.engine.hardware import Hardware
from edgellm.engine.kv.sequences import SeqRows, Sequences
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import DeviceLost
from edgellm.isolation.child_process import last_lines, start_child
from edgellm.isolation.serving import LENGTH

_FIELDS = 2**16  # bytes of an answer beside its array


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """The context of a model: `n_seq` sequences of `n_ctx` positions each, and batches of at most `n_batch` rows."""

    n_ctx: int
    n_seq: int = 1
    n_batch: int = 512


@dataclass(frozen=True, slots=True)
class ServedLayers:
    """The next `layers` of a model, on the devices of the RPC server at a `port` of this machine."""

    port: int
    layers: int


class ModelProcess:
    """A process that loads one model and decodes. For one thread at a time, but any thread may `kill` it.

    Its context has what a verifier's engine asks of one (see `edgellm.engine.Context`, whose documentation holds). When
    the process has ended, whatever is asked of it raises DeviceLost.
    """

    def __init__(self, model: Path, n_vocab: int, sizes: ContextSizes, hardware: Hardware) -> None:
        """Start the process, without waiting for it. `hardware` says how it computes: its threads, cache and attention.

        Raises:
            EngineFailed: no process can be started.
        """
        self._model, self._n_vocab, self._sizes, self._hardware = model, n_vocab, sizes, hardware
        self._sequences = Sequences(sizes.n_seq, sizes.n_ctx)
        self._talking = threading.Lock()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = start_child(
            "edgellm.engine.ggml_rpc.model_child", environment={**os.environ, "GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, start_new_session=True,
        )  # fmt: skip
        self._pipes = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._end = weakref.finalize(self, _end, self._process, self._output)

    @property
    def pid(self) -> int:
        return self._process.pid

    def beside_weights(self) -> tuple[int, int]:
        """Return the bytes of the whole model's caches, and those in which it computes; nothing is loaded.

        Raises:
            ModelUnsupported, EngineFailed: llama.cpp cannot use it.
            DeviceLost: the model ends the process.
        """
        found, _ = self._ask({"do": "reckon", **self._described()})
        return int(found["caches"]), int(found["compute"])

    def load(
        self, served: Sequence[ServedLayers], cards: Sequence[str] = (), on_cards: int = 0,
        faults: Sequence[str] | None = None, progress: Callable[[float], None] | None = None,
    ) -> tuple[str, ...]:  # fmt: skip
        """Load the model: its last layers on `cards` of this machine, those before on RPC servers, in order, and what
        is left on the processor. Return what llama.cpp gets wrong of it (see `Model.faults`), which is tried if
        `faults` are not given. `progress` is called with the share of the weights that is loaded, in 0..1.

        Raises:
            ModelUnsupported, EngineFailed: llama.cpp cannot use it.
            DeviceLost: a server is gone, or the model ends the process.
        """
        found, _ = self._ask({
            "do": "load", **self._described(), "ports": [one.port for one in served],
            "layers": [one.layers for one in served], "cards": list(cards), "on_cards": on_cards,
            "faults": None if faults is None else list(faults),
        }, progress=progress)  # fmt: skip
        return tuple(map(str, found["faults"]))

    def decode_rows(self, rows: list[SeqRows]) -> list[Floats]:
        """See `Context.decode_rows`; the logits are copies."""
        for one in rows:
            self._sequences.check_fits(one.seq, len(one.ids))
        listed = [(one.seq, len(one.ids), one.outputs) for one in rows]
        ids = np.concatenate([one.ids for one in rows]).astype(np.int32)
        ends = np.cumsum([one.outputs for one in rows])
        _found, rest = self._ask({"do": "decode", "rows": listed}, ids.tobytes(), int(ends[-1]) * self._n_vocab * 4)
        for one in rows:
            self._sequences.note(one.seq, one.ids)
            self._sequences.lengths[one.seq] += len(one.ids)
        logits = np.frombuffer(rest, np.float32) if len(rest) else np.empty(0, np.float32)
        return np.split(logits.reshape(-1, self._n_vocab), ends[:-1])

    def cached(self, seq: int = 0) -> Ids:
        """See `Context.cached`."""
        return self._sequences.view(seq)

    def sync(self, ids: Ids, seq: int = 0) -> int:
        """See `Context.sync`."""
        found, _ = self._ask({"do": "sync", "seq": seq}, ids.astype(np.int32).tobytes())
        length = int(found["length"])
        if not 0 <= length <= min(len(ids), self._sequences.lengths[seq]):
            raise self._ended()
        self._sequences.lengths[seq] = length
        return length

    def rollback(self, length: int, seq: int = 0) -> None:
        """See `Context.rollback`."""
        if length != self._sequences.lengths[seq]:
            self._ask({"do": "rollback", "seq": seq, "length": length})
            self._sequences.lengths[seq] = length

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        """See `Context.copy_prefix`."""
        self._ask({"do": "copy", "from": src, "to": dst, "length": length})
        self._sequences.copy(src, dst)
        self._sequences.lengths[dst] = length

    def clear(self, seq: int = 0) -> None:
        """See `Context.clear`."""
        self._sequences.lengths[seq] = 0
        self._ask({"do": "clear", "seq": seq})

    def kill(self) -> None:
        """End the process at once, even if it computes; whoever waits for it gets DeviceLost."""
        self._process.kill()

    def close(self) -> None:
        """End the process, and release what it needed."""
        self._end()

    def _described(self) -> dict[str, Any]:
        sizes, hardware = self._sizes, self._hardware
        return {
            "model": str(self._model), "n_ctx": sizes.n_ctx, "n_seq": sizes.n_seq, "n_batch": sizes.n_batch,
            "hardware": {
                "threads": hardware.threads, "cache_type": hardware.cache_type, "flash_attn": hardware.flash_attn,
            },
        }  # fmt: skip

    def _ask(
        self, fields: dict[str, Any], array: bytes = b"", size: int = 0,
        progress: Callable[[float], None] | None = None,
    ) -> tuple[dict[str, Any], memoryview]:  # fmt: skip
        """Return the answer to an order, with an array of `size` bytes. Raise the error that it tells of, or DeviceLost
        if the process has ended, or does not answer as it should: what servers send may have taken it over."""
        requests, answers = self._pipes
        message = pack(fields, array)
        try:
            with self._talking:
                requests.write(LENGTH.pack(len(message)) + message)
                requests.flush()
                while True:
                    (length,) = LENGTH.unpack(_read(answers, LENGTH.size))
                    if length > size + _FIELDS:
                        raise EOFError
                    found, rest = unpack(_read(answers, length))
                    if "progress" not in found:
                        break
                    if progress is not None:
                        progress(float(found["progress"]))
        except (OSError, ValueError, EOFError, struct.error):
            raise self._ended() from None
        raise_error(found)
        if len(rest) != size:
            raise self._ended()
        return found, rest

    def _ended(self) -> DeviceLost:
        self._process.kill()
        self._process.wait()
        words = ""
        with suppress(OSError, ValueError):
            words = last_lines(self._output)
        return DeviceLost(
            f"The process that holds the model over RPC has ended: {words or 'without a word'}.", "Ask again."
        )


def _read(answers: IO[bytes], size: int) -> bytes:
    data = answers.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _end(process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, output):
        if pipe is not None:
            with suppress(OSError):  # some data was still to be written
                pipe.close()
