"""Calls into llama.cpp: load a model, open a context, fill a batch over numpy's arrays, decode it, see the logits."""

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm import system
from edgellm.engine import cores, native
from edgellm.engine.hardware import CACHE_TYPES, DEFAULT_CACHE, Hardware, apply
from edgellm.engine.kv.row_padding import Padding
from edgellm.engine.native import Stop, abort_if_set, lib, no_abort
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import ContextFull, EngineFailed, ModelUnsupported, Stopped

NO_OBSERVER: AbstractContextManager[object] = nullcontext()


class LlamaBatch:
    """Room for `n` rows. `tokens` is its native form; `embeddings` makes a native form with float rows.

    Models of images and text give rows a position in each of several `planes`; llama.cpp sets those of tokens itself.
    `flag_all`: all rows ask for logits, whatever is said of them.
    """

    def __init__(self, n: int, n_ctx: int, planes: int = 1, flag_all: bool = False) -> None:
        self.flag_all = flag_all
        self._ids, self._positions = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int32)
        self._seqs, self._flags = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int8)
        self._ones = np.ones(n, dtype=np.int32)
        self._seq_pointers = (self._seqs.ctypes.data + 4 * np.arange(n)).astype(np.uint64)
        self._count_up = np.arange(n_ctx, dtype=np.int32)
        self._planes = np.zeros(planes * n if planes > 1 else 0, dtype=np.int32)
        self.tokens = self._native(self._ids, None)

    def put(self, at: int, seq: int, start: int, ids: Ids, outputs: int) -> int:
        """Write `ids` for the positions from `start` on into the rows from `at` on; return the row after them."""
        n = len(ids)
        end = at + n
        self._ids[at:end] = ids
        self._positions[at:end] = self._count_up[start : start + n]
        self._seqs[at:end] = seq
        self._flags[at:end] = self.flag_all
        self._flags[end - outputs : end] = 1
        return end

    def fill(self, at: int, rows: int, start: int) -> int:
        """Fill the rows from `at` up to `rows` with copies of the row before `at`, for the positions from `start` on.
        Return `rows`."""
        self._ids[at:rows], self._seqs[at:rows] = self._ids[at - 1], self._seqs[at - 1]
        self._positions[at:rows] = self._count_up[start : start + rows - at]
        self._flags[at:rows] = self.flag_all
        return rows

    def show(self, first: int, end: int) -> None:
        """Ask for logits of the rows from `first` up to before `end`."""
        self._flags[first:end] = 1

    def embeddings(self, rows: Floats) -> Any:
        """Return a batch of contiguous `rows`, which must outlive its decoding. Flags are shared, and positions, which
        must have been put."""
        if not len(self._planes):
            return self._native(None, rows)
        n = len(rows)
        self._planes[: 3 * n] = np.tile(self._positions[:n], 3)  # a token's time, height and width are equal,
        self._planes[3 * n : 4 * n] = 0  # and the fourth plane is unused
        return self._native(None, rows, self._planes)

    def with_states(self, rows: Floats) -> Any:
        """Return the native form of tokens that come each with one of the contiguous `rows`, which must outlive it."""
        return self._native(self._ids, rows)

    def _native(self, ids: Ids | None, rows: Floats | None, positions: Ids | None = None) -> Any:
        return lib.llama_batch(
            0,
            _pointer(ids, ctypes.c_int32),
            _pointer(rows, ctypes.c_float),
            _pointer(self._positions if positions is None else positions, ctypes.c_int32),
            _pointer(self._ones, ctypes.c_int32),
            _pointer(self._seq_pointers, ctypes.POINTER(ctypes.c_int32)),
            _pointer(self._flags, ctypes.c_int8),
        )


def _pointer(array: npt.NDArray[np.generic] | None, kind: Any) -> Any:
    address: Any = None if array is None else array.ctypes.data
    return ctypes.cast(address, ctypes.POINTER(kind))


_decode = native.bind(lib.llama_decode, ctypes.c_int32, ctypes.c_void_p, lib.llama_batch)
_encode = native.bind(lib.llama_encode, ctypes.c_int32, ctypes.c_void_p, lib.llama_batch)
_set_threads = native.bind_nonblocking(lib.llama_set_n_threads, None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
_logits = native.bind(lib.llama_get_logits, ctypes.c_void_p, ctypes.c_void_p)


def load_model(
    path: Path, hardware: Hardware, text_only: bool = False, progress: Callable[[float], None] | None = None, *,
    dry: bool = False, mtp: bool = False,
) -> native.Owned:  # fmt: skip
    """Have llama.cpp load a file. `progress`, `text_only` and `dry` as for `Model.load` and `LoadSpec`; with `mtp`,
    also its MTP layer. Raises ModelUnsupported: llama.cpp cannot load it."""
    params = lib.llama_model_default_params()
    _kept = apply(hardware, params)  # arrays that llama.cpp reads
    params.vocab_only, params.load_mtp = text_only, mtp
    if dry:
        params.no_alloc, params.load_mode = True, lib.LLAMA_LOAD_MODE_NONE
    # Many builds with AMX end the process at the first decode, so weights stay as the file lays them out for others.
    params.use_extra_bufts = text_only or "AMX_INT8" not in native.features().instructions
    raised: list[BaseException] = []

    def report(share: float, _user: int | None) -> bool:
        try:
            if progress is not None:
                progress(share)
        except BaseException as error:  # noqa: BLE001  nothing may be raised through C
            raised.append(error)
        return not (raised or interrupted() or native.process_exit.in_other_thread)

    params.progress_callback = lib.llama_progress_callback(report)
    mark = native.log.count
    with native.deferred_interrupt() as interrupted, native.NativeGuard():
        pointer = lib.llama_model_load_from_file(os.fsencode(path), params)
        owned = native.Owned(pointer, lib.llama_model_free) if pointer else None
    native.process_exit.block_if_exiting()
    if raised:
        raise raised[0]
    if owned is None:
        raise ModelUnsupported(
            f"llama.cpp cannot load {path}: {native.log.since(mark) or 'it gives no reason'}.",
            "Use another file of this model, or update llama-cpp-python.",
        )
    if not (dry or text_only):  # weights laid out anew are not read in the file again
        system.release_mapped(path)
    return owned


@dataclass(frozen=True, slots=True)
class NativeSpec:
    """A native context of `positions` in all `sequences`, `n_ctx` each at most, that decodes up to `rows` rows at once.
    Passes have the `padding`.

    `snapshots` of a recurrent state are kept of a sequence. `whole_window`: cells outside a sliding window are kept.
    `outputs`: the most rows of logits of a batch, beyond which llama.cpp ends the process; 0: all rows. `mtp`: a
    context of the model's MTP layer, without which llama.cpp ends the process. `embeddings`: states are pooled as the
    model says.
    """

    positions: int
    sequences: int
    rows: int
    threads: int
    unified: bool
    cache_type: str = DEFAULT_CACHE
    flash: bool = True
    snapshots: int = 0
    whole_window: bool = False
    outputs: int = 0
    mtp: bool = False
    embeddings: bool = False
    n_ctx: int = 0
    padding: Padding | None = None


def open_context(
    model: native.Owned, spec: NativeSpec, *, callback: Any = None, beside: native.Owned | None = None
) -> native.Owned:
    """Return a native context, whose graphs' nodes are shown to `callback`. It uses weights of the model of the context
    `beside`, which must outlive its last computation. Raises EngineFailed: llama.cpp cannot reserve it, for want of
    memory above all."""
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = spec.positions, spec.sequences
    params.n_batch = params.n_ubatch = spec.rows
    params.n_threads = params.n_threads_batch = spec.threads
    params.kv_unified = spec.unified
    # Cells outside the window are never freed while branches share them.
    params.swa_full = spec.whole_window or (spec.unified and spec.sequences > 1)
    params.n_rs_seq, params.n_outputs_max = spec.snapshots, spec.outputs
    params.no_perf, params.embeddings = True, spec.embeddings
    if spec.mtp:
        params.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
    if beside is not None:
        params.ctx_other = beside.pointer
    if callback is not None:
        params.cb_eval = callback
    params.type_k = params.type_v = CACHE_TYPES[spec.cache_type]
    if not spec.flash:
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    mark = native.log.count
    with native.deferred_interrupt(), native.NativeGuard():
        pointer = lib.llama_init_from_model(model.pointer, params)
        owned = native.Owned(pointer, lib.llama_free, parent=model) if pointer else None
    if owned is None:
        raise EngineFailed(
            f"llama.cpp cannot open a context of {spec.positions} positions: {native.log.since(mark)}.",
            "Ask for a shorter context, or close other programs.",
        )
    return owned


class NativeContext:
    """A native context that is used by one thread until it is closed. A decode uses its share of the cores while other
    threads compute."""

    def __init__(self, owned: native.Owned, threads: int, n_vocab: int) -> None:
        """Take over `owned`, which computes with `threads` threads where it is alone."""
        self._owned: native.Owned | None = owned
        self.threads = self.threads_used = threads
        """Threads of a decode alone, and of the last decode: fewer if other threads computed at the same time."""
        self.shared = 0
        """Decodes that had fewer threads than a decode that is alone."""
        self.n_vocab, self._address = n_vocab, 0
        self._view = self.no_rows = np.empty((0, n_vocab), dtype=np.float32)
        """A view over the logits, kept between decodes: the buffer seldom moves, and never shrinks. Empty logits."""
        self._should_stop: Callable[[], bool] | None = None

    @property
    def owned(self) -> native.Owned:
        """The native context. Raises EngineFailed if it is closed."""
        if self._owned is None:
            raise EngineFailed("The context is closed.", "Open another.")
        native.process_exit.block_if_exiting()
        return self._owned

    def check_open(self) -> None:
        """Raise EngineFailed if it is closed."""
        _ = self.owned

    @property
    def closed(self) -> bool:
        """Return whether it is closed."""
        return self._owned is None

    def set_cancel(self, should_stop: Callable[[], bool] | None) -> None:
        """Have decodes ask `should_stop` before they begin, and a `Stop` also while they compute. The latter works on a
        processor only: a GPU computes to the end."""
        self._should_stop = should_stop
        if self._owned is not None:
            flag = should_stop if isinstance(should_stop, Stop) else None
            callback = (no_abort, None) if flag is None else (abort_if_set, flag.address)
            lib.llama_set_abort_callback(self._owned.pointer, *callback)

    def decode(self, batch: Any, n: int, observer: AbstractContextManager[object] = NO_OBSERVER) -> None:
        """Decode the first `n` rows of a batch while the `observer` watches. Raises ContextFull: the cache, where
        sequences share it, has no cells left for the rows; Stopped: `set_cancel`'s function said so; EngineFailed:
        llama.cpp refuses the rows; the message has its reason."""
        self._compute(_decode, batch, n, observer)

    def encode(self, batch: Any, n: int) -> None:
        """Have the model's encoder compute the first `n` rows of a batch, all of which are flagged."""
        self._compute(_encode, batch, n, NO_OBSERVER)

    def _compute(self, function: Any, batch: Any, n: int, observer: AbstractContextManager[object]) -> None:
        if self._should_stop is not None and self._should_stop():
            raise Stopped
        owned, batch.n_tokens = self.owned, n
        with observer, cores.computation(self.threads) as share:
            if share != self.threads_used:
                _set_threads(owned.pointer, share, share)
                self.threads_used = share
            self.shared += share < self.threads
            mark = native.log.count
            with owned.guard:
                status = function(owned.pointer, batch)
        if status == 1:
            raise ContextFull(f"The cache has no cells left for {n} more rows.", "Clear a branch, or open spare cells.")
        if status == 2:  # aborted
            raise Stopped
        if status != 0:
            raise EngineFailed(
                f"llama.cpp cannot decode {n} rows (status {status}): {native.log.since(mark)}.",
                "Check that the ids are in the model's vocabulary.",
            )

    def rows(self, n: int) -> Floats:
        """Return the first `n` rows of logits of the last decode, (n, n_vocab), read-only: views that keep the memory
        behind them alive."""
        owned = self.owned
        address = _logits(owned.pointer) if n else 0
        if not address:
            return self.no_rows
        if address != self._address or n > len(self._view):
            buffer: Any = (ctypes.c_float * (n * self.n_vocab)).from_address(address)
            buffer.context = owned
            self._view = np.frombuffer(buffer, dtype=np.float32).reshape(n, self.n_vocab)
            self._view.flags.writeable = False
            self._address = address
        return self._view[:n]

    def close(self) -> None:
        """Close the context; its memory is freed once no view of the logits is left."""
        self._owned, self._view, self._address = None, self.no_rows, 0
