"""The last product of a model, the head, for some rows only.

Where the vocabulary is large and the model small, the head is a good part of a pass: for Qwen 2.5 with half a billion
parameters a third for one token, and more than half for four (`python -m bench.heads`). llama.cpp computes it for every
drafted token, and in vain for all tokens after a rejected one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.engine import native
from edgellm.engine.cores import sharing
from edgellm.engine.gguf.reader import TensorInfo
from edgellm.engine.model import Model
from edgellm.engine.native import lib
from edgellm.engine.types import Floats
from edgellm.errors import EngineFailed

ROWS = 64
"""The most rows whose heads can be computed without a decode of their own."""
_BESIDE = ("output.bias", "output.scale")  # tensors that a head may have besides its matrix
_AT_ONCE = 8  # from this number of rows on, one product takes less time than a product for each row
_BLOCK = 4 << 20  # bytes of weights that stay in the processor's cache for one row after another
_WORTH = 0.05  # share of a model's bytes
_ALIGNED = 64  # bytes
_F32 = 0


def head_of(model: Model) -> TensorInfo | None:
    """Return the matrix that alone turns the last norm's output into logits; None where there is more to the head, or
    the file is split.

    Some architectures do more without a tensor for it: the first pass finds that out, see `Model.head_is_plain`.
    """
    head = model.header.tensor("output.weight", "token_embd.weight")
    if head is None or model.head_is_plain is False or model.size_bytes != model.header.file_size:
        return None
    fits = head.shape == (model.n_embd, model.n_vocab)
    return head if fits and model.header.tensor(*_BESIDE) is None else None


def head_pays(model: Model) -> bool:
    """Return whether the head is so large a part of a pass that computing it late pays; see `why_late`."""
    return why_late(model)[0]


def why_late(model: Model) -> tuple[bool, str]:
    """Return whether heads are computed only for rows that are looked at, and why.

    They are not on a graphics card, where rows are cheap, nor in a small model, where a pass is too short.
    """
    head = head_of(model)
    if head is None:
        return False, "heads are computed for all rows: they are more than a product"
    if lib.llama_supports_gpu_offload():
        return False, "heads are computed for all rows: on a graphics card they are cheap"
    share = head.nbytes / model.size_bytes
    if native.is_small(model.n_params) or share < _WORTH:
        return False, f"heads are computed for all rows: {share:.0%} of {model.size_bytes / 1e6:.0f} MB is little"
    return True, f"heads are computed for what is looked at: they are {share:.0%} of the model"


class LMHead:
    """The head of one model, for one thread at a time: it makes `logits` of `states`, the last norm's output rows."""

    def __init__(self, model: Model, head: TensorInfo, threads: int) -> None:
        """Set up the head. Raises EngineFailed where this llama.cpp lacks a function for it, or memory is short."""
        try:
            self._ggml = _ggml()
            file = np.memmap(model.path, dtype=np.uint8, mode="r")  # llama.cpp's own pages, which take no more memory
        except (AttributeError, OSError) as error:
            raise EngineFailed("This llama.cpp computes no head alone.", "Take edgellm's own version.") from error
        self._kind, row = head.kind, head.nbytes // head.shape[1]
        self._guard = native.NativeGuard()
        self._threads = self._share = threads
        self.states = _aligned(ROWS, model.n_embd)
        self.logits = _aligned(ROWS, model.n_vocab)
        with self._guard:
            self._backend = native.Owned(self._ggml.cpu_init(), self._ggml.backend_free)
            self._ggml.set_threads(self._backend.pointer, threads)
            self._weights = _Buffer.over(self._ggml, file, model.n_embd, row, head.offset)
            self._states = _Buffer.over(self._ggml, self.states, model.n_embd, 4 * model.n_embd)
            self._logits = _Buffer.over(self._ggml, self.logits, model.n_embd, 0)
        self._graphs: dict[tuple[int, int], _Graph] = {}

    @classmethod
    def open(cls, model: Model, threads: int) -> LMHead | None:
        """Return the model's head; None where it is more than a matrix, or this llama.cpp cannot compute it alone."""
        head = head_of(model)
        try:
            return None if head is None else cls(model, head, threads)
        except EngineFailed:
            return None

    def compute(self, first: int, end: int) -> None:
        """Compute the logits of the states from row `first` up to before `end`.

        Raises:
            EngineFailed: llama.cpp could not, for want of memory above all.
        """
        if (first, end) not in self._graphs:
            self._graphs[first, end] = self._build(first, end)
        with self._guard, sharing.computing(self._threads) as share:
            if share != self._share:
                self._ggml.set_threads(self._backend.pointer, share)
                self._share = share
            status = self._ggml.compute(self._backend.pointer, self._graphs[first, end].pointer)
        if status != 0:
            raise EngineFailed(f"llama.cpp cannot compute a head (status {status}).", "Close other programs.")

    def _build(self, first: int, end: int) -> _Graph:
        """Build the graph for these rows: a few go one by one over weights still in the processor's cache, as that is
        faster."""
        n, rows = end - first, self.logits.shape[1]
        step = n if n >= _AT_ONCE else 1
        block = max(1, _BLOCK // self._weights.row) if 1 < n < _AT_ONCE else rows
        blocks, parts = range(0, rows, block), range(first, end, step)
        graph = _Graph(self._ggml, len(blocks) * (1 + len(parts)) + len(parts))
        states = [graph.rows(_F32, step, self._states, at) for at in parts]
        for start in blocks:
            weights = graph.rows(self._kind, min(block, rows - start), self._weights, start)
            for at, state in zip(parts, states, strict=True):
                graph.product(weights, state, self._logits, at * rows + start)
        return graph


@dataclass(frozen=True, slots=True)
class _Buffer:
    """An array as ggml sees it, with `width` elements in a row of `row` bytes, from byte `start` on."""

    owned: native.Owned
    data: Any
    width: int
    row: int
    start: int

    @classmethod
    def over(cls, ggml: _Ggml, data: Any, width: int, row: int, start: int = 0) -> _Buffer:
        return cls(native.Owned(ggml.buffer(data.ctypes.data, data.nbytes), ggml.buffer_free), data, width, row, start)


class _Graph:
    """Products of matrices, on memory that is there already."""

    def __init__(self, ggml: _Ggml, tensors: int) -> None:
        self._ggml = ggml
        size = tensors * ggml.tensor_overhead() + ggml.graph_overhead(tensors, False)
        self._owned = native.Owned(ggml.init(_Init(size, None, True)), ggml.free)
        self.pointer = ggml.new_graph(self._owned.pointer, tensors, False)

    def rows(self, kind: int, n: int, buffer: _Buffer, row: int) -> int:
        """Return a tensor of `n` rows of a buffer, from `row` on."""
        tensor = self._ggml.new_tensor(self._owned.pointer, kind, buffer.width, n)
        return self._place(tensor, buffer, row * buffer.row)

    def product(self, weights: int, states: int, buffer: _Buffer, at: int) -> None:
        """Add the product of two tensors to the graph, written to a buffer of floats from element `at` on."""
        tensor = self._ggml.product(self._owned.pointer, weights, states)
        self._ggml.expand(self.pointer, self._place(tensor, buffer, 4 * at))

    def _place(self, tensor: int, buffer: _Buffer, offset: int) -> int:
        self._ggml.place(buffer.owned.pointer, tensor, buffer.data.ctypes.data + buffer.start + offset)
        return tensor


class _Init(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@dataclass(frozen=True, slots=True)
class _Ggml:
    """The functions of the library below llama.cpp that a head needs."""

    init: Callable[[_Init], int]
    free: Callable[[int], None]
    tensor_overhead: Callable[[], int]
    graph_overhead: Callable[[int, bool], int]
    new_tensor: Callable[[int, int, int, int], int]
    new_graph: Callable[[int, int, bool], int]
    product: Callable[[int, int, int], int]
    expand: Callable[[int, int], None]
    buffer: Callable[[int, int], int]
    buffer_free: Callable[[int], None]
    place: Callable[[int, int, int], int]
    backend_free: Callable[[int], None]
    compute: Callable[[int, int], int]
    cpu_init: Callable[[], int]
    set_threads: Callable[[int, int], None]


@functools.cache
def _ggml() -> _Ggml:
    base, cpu = native.ggml(), native.ggml("ggml-cpu")
    pointer, size, flag, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, ctypes.c_int
    quick = native.at_once
    return _Ggml(
        init=quick(base.ggml_init, pointer, _Init),
        free=quick(base.ggml_free, None, pointer),
        tensor_overhead=quick(base.ggml_tensor_overhead, size),
        graph_overhead=quick(base.ggml_graph_overhead_custom, size, size, flag),
        new_tensor=quick(base.ggml_new_tensor_2d, pointer, pointer, number, ctypes.c_int64, ctypes.c_int64),
        new_graph=quick(base.ggml_new_graph_custom, pointer, pointer, size, flag),
        product=quick(base.ggml_mul_mat, pointer, pointer, pointer, pointer),
        expand=quick(base.ggml_build_forward_expand, None, pointer, pointer),
        buffer=quick(base.ggml_backend_cpu_buffer_from_ptr, pointer, pointer, size),
        buffer_free=quick(base.ggml_backend_buffer_free, None, pointer),
        place=quick(base.ggml_backend_tensor_alloc, number, pointer, pointer, pointer),
        backend_free=quick(base.ggml_backend_free, None, pointer),
        compute=native.bind(base.ggml_backend_graph_compute, number, pointer, pointer),
        cpu_init=quick(cpu.ggml_backend_cpu_init, pointer),
        set_threads=quick(cpu.ggml_backend_cpu_set_n_threads, None, pointer, number),
    )


def _aligned(rows: int, width: int) -> Floats:
    """Return zeros that begin at an address that ggml accepts for a buffer; pages are taken when they are written."""
    spare = _ALIGNED // 4
    zeros = np.zeros(rows * width + spare, dtype=np.float32)
    first = -zeros.ctypes.data % _ALIGNED // 4
    return zeros[first : first + rows * width].reshape(rows, width)
