"""The LM head for selected rows: logits that are computed when they are read.

With a large vocabulary and a small model, the head is a good part of a pass: for Qwen 2.5 with half a billion
parameters a third for one token, and more than half for four (`python -m bench.engine.lm_head`). llama.cpp computes it
for every drafted token, in vain after a rejected token.

Here a pass over drafted tokens stops before the head, which is then computed for the first rows, and for further rows
only while the drafts before them are accepted.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np

from edgellm.engine import cores, native
from edgellm.engine.gguf.header import TensorInfo
from edgellm.engine.graph_hooks import NodeCallback
from edgellm.engine.library import InitParams
from edgellm.engine.model import Model
from edgellm.engine.native import ggml, lib
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import EngineFailed

_GROUPS = 1_024


@dataclass(frozen=True, slots=True)
class Top2:
    """The most probable token, its probability, and that of the runner-up."""

    id: int
    p1: float
    p2: float


def top2(logits: Floats) -> Top2:
    """Return argmax and the two largest softmax probabilities over the full vocabulary; on a tie the lowest id wins.

    `logits` has shape (n_vocab,) or (1, n_vocab). Raises EngineFailed: the largest logit is not a number or not finite.
    """
    row = logits.reshape(-1)
    first = int(row.argmax())
    peak = row[first]
    _check(peak)
    shifted = row - peak
    total = float(np.add.reduce(np.exp(shifted, out=shifted)))
    below, above = row[:first], row[first + 1 :]
    # The arrays' methods instead of the bare reductions would double the cost on a small vocabulary.
    second = max(np.maximum.reduce(below, initial=-np.inf), np.maximum.reduce(above, initial=-np.inf))
    return Top2(first, 1.0 / total, math.exp(second - peak) / total)


def top_k(logits: Floats, k: int) -> Ids:
    """Return the `k` most probable ids (min(k, n_vocab),), most probable first; on a tie the lowest id. Raises
    EngineFailed: the largest logit is not a number or not finite."""
    row = logits.reshape(-1)
    n = len(row)
    k = max(0, min(k, n))
    floor = np.float32(-np.inf)
    if 0 < k <= _GROUPS <= n:
        # k groups have a maximum of at least the k-th largest maximum, so nothing below it is among the k largest.
        maxima = row[: n - n % _GROUPS].reshape(-1, _GROUPS).max(axis=0)
        floor = np.partition(maxima, _GROUPS - k)[_GROUPS - k]
    candidates = np.flatnonzero(row >= floor)
    ids = candidates[np.argsort(-row[candidates], kind="stable")[:k]].astype(np.int32)
    _check(row[ids[0]] if len(ids) else row.max())
    return ids


def _check(peak: float | np.float32) -> None:
    if not math.isfinite(peak):
        raise EngineFailed(f"The model's largest logit is {peak}.", "Its file may be damaged: download it again.")


ROWS = 64
"""The most rows whose heads can be computed without a decode of their own."""
_BESIDE = ("output.bias", "output.scale")  # tensors that a head may have besides its matrix
_AT_ONCE = 8  # least rows for which one product takes less time than a product for each row
_BLOCK = 4 << 20  # bytes of weights that stay in the processor's cache for one row after another
_ALIGNED = 64  # bytes


def head_of(model: Model) -> TensorInfo | None:
    """Return the matrix that alone turns the last norm's output into logits; None where the head is more than a matrix.

    Some heads do more without a tensor for it: the first pass finds that out, see `Model.head_is_plain`.
    """
    head = model.header.tensor("output.weight", "token_embd.weight")
    if head is None or model.head_is_plain is False:
        return None
    fits = head.shape == (model.n_embd, model.n_vocab)
    return head if fits and model.header.tensor(*_BESIDE) is None else None


def head_pays(model: Model) -> bool:
    """Return whether the head is so large a part of a pass that computing it late pays; see `why_lazy`."""
    return why_lazy(model)[0]


def why_lazy(model: Model) -> tuple[bool, str]:
    """Return whether heads are computed only for the rows that are read, and why.

    They are not on a graphics card, where rows are cheap, nor in a small model, where a pass is too short.
    """
    head = head_of(model)
    if head is None:
        return False, "heads are computed for all rows: this model's head is more than one matrix product"
    if model.offloaded and not 0 < (model.hardware.gpu_layers or 0) <= model.n_layer:
        return False, "heads are computed for all rows: they are cheap on a graphics card"
    share = head.nbytes / model.size_bytes
    if native.is_small(model.n_params):
        return False, f"heads are computed for all rows: {share:.0%} of {model.size_bytes / 1e6:.0f} MB is little"
    return True, f"heads are computed for what is looked at: they are {share:.0%} of the model"


class LMHead:
    """The head of one model, for one thread at a time: it makes `logits` of `states`, the last norm's output rows."""

    def __init__(self, model: Model, head: TensorInfo, threads: int) -> None:
        """Set up the head. Raises OSError: the file cannot be mapped."""
        # The map shares llama.cpp's own pages, and takes no more memory.
        file = np.memmap(model.file.paths[head.part], dtype=np.uint8, mode="r")
        self._kind, row = head.kind, head.nbytes // head.shape[1]
        self._guard = native.NativeGuard()
        self._threads = self._share = threads
        self.states = _aligned(ROWS, model.n_embd)
        self.logits = _aligned(ROWS, model.n_vocab)
        with self._guard:
            self._backend = native.Owned(ggml.ggml_backend_cpu_init(), ggml.ggml_backend_free)
            ggml.ggml_backend_cpu_set_n_threads(self._backend.pointer, threads)
            self._weights = _Buffer.over(file, model.n_embd, row, head.offset)
            self._states = _Buffer.over(self.states, model.n_embd, 4 * model.n_embd)
            self._logits = _Buffer.over(self.logits, model.n_embd, 0)
        self._graphs: dict[tuple[int, int], _Graph] = {}

    @classmethod
    def open(cls, model: Model, threads: int) -> "LMHead | None":
        """Return the model's head; None where it is more than a matrix, or its file is gone."""
        head = head_of(model)
        with suppress(OSError):
            return None if head is None else cls(model, head, threads)
        return None

    def compute(self, first: int, end: int) -> None:
        """Compute the logits of the states from row `first` up to before `end`. Raises EngineFailed: llama.cpp could
        not, for want of memory above all."""
        if (first, end) not in self._graphs:
            self._graphs[first, end] = self._build(first, end)
        with self._guard, cores.computation(self._threads) as share:
            if share != self._share:
                ggml.ggml_backend_cpu_set_n_threads(self._backend.pointer, share)
                self._share = share
            status = ggml.ggml_backend_graph_compute(self._backend.pointer, self._graphs[first, end].pointer)
        if status != 0:
            raise EngineFailed(f"llama.cpp cannot compute a head (status {status}).", "Close other programs.")

    def _build(self, first: int, end: int) -> "_Graph":
        """Build the graph for these rows: a few go one by one over weights still in the processor's cache, as that is
        faster."""
        n, rows = end - first, self.logits.shape[1]
        step = n if n >= _AT_ONCE else 1
        block = max(1, _BLOCK // self._weights.row) if 1 < n < _AT_ONCE else rows
        blocks, parts = range(0, rows, block), range(first, end, step)
        graph = _Graph(len(blocks) * (1 + len(parts)) + len(parts))
        states = [graph.rows(lib.GGML_TYPE_F32, step, self._states, at) for at in parts]
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
    def over(cls, data: Any, width: int, row: int, start: int = 0) -> "_Buffer":
        buffer = ggml.ggml_backend_cpu_buffer_from_ptr(data.ctypes.data, data.nbytes)
        return cls(native.Owned(buffer, ggml.ggml_backend_buffer_free), data, width, row, start)


class _Graph:
    """Products of matrices, on memory that is there already."""

    def __init__(self, tensors: int) -> None:
        size = tensors * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(tensors, False)
        self._owned = native.Owned(ggml.ggml_init(InitParams(size, None, True)), ggml.ggml_free)
        self.pointer = ggml.ggml_new_graph_custom(self._owned.pointer, tensors, False)

    def rows(self, kind: int, n: int, buffer: _Buffer, row: int) -> int:
        """Return a tensor of `n` rows of a buffer, from `row` on."""
        tensor = ggml.ggml_new_tensor_2d(self._owned.pointer, kind, buffer.width, n)
        return self._place(tensor, buffer, row * buffer.row)

    def product(self, weights: int, states: int, buffer: _Buffer, at: int) -> None:
        """Add the product of two tensors to the graph, written to a buffer of floats from element `at` on."""
        tensor = ggml.ggml_mul_mat(self._owned.pointer, weights, states)
        ggml.ggml_build_forward_expand(self.pointer, self._place(tensor, buffer, 4 * at))

    def _place(self, tensor: int, buffer: _Buffer, offset: int) -> int:
        ggml.ggml_backend_tensor_alloc(buffer.owned.pointer, tensor, buffer.data.ctypes.data + buffer.start + offset)
        return tensor


def _aligned(rows: int, width: int) -> Floats:
    """Return zeros that begin at an address that ggml accepts for a buffer; pages are taken when they are written."""
    spare = _ALIGNED // 4
    zeros = np.zeros(rows * width + spare, dtype=np.float32)
    first = -zeros.ctypes.data % _ALIGNED // 4
    return zeros[first : first + rows * width].reshape(rows, width)


HEADS = (1, 2, 3, 4, 8, 16, 32, 64)
"""Numbers of rows whose heads are computed together; the last block of a pass may have fewer."""
_USUAL = (1.0, 1.7, 2.0, 2.9, 4.0, 4.8, 9.0, 18.0)  # relative times of `HEADS` without a measurement
_NORM = b"result_norm"
_SAME = 1e-3  # share of the largest logit by which the order of rounding may move a logit


class LazyHead:
    """The late head of one context: while watched, its graph stops before the head, and the head's input is kept."""

    def __init__(self, head: LMHead) -> None:
        self.head = head
        self.seconds: Sequence[float] = _USUAL
        """Seconds of heads of `HEADS` rows together, or numbers in proportion to them."""
        self.kept = 0
        """Rows kept of the last pass; 0 if it had an unexpected number of rows."""
        self._expected = 0  # rows; 0: not watching
        self._stops = True
        self.nodes = NodeCallback(self._wants, self._see)

    def take(self, seconds: Sequence[float]) -> None:
        """Set the seconds that heads of `HEADS` rows take together."""
        self.seconds = seconds

    def close(self) -> None:
        """Release the model's file; called when the context is closed."""
        self.nodes.close()

    @contextmanager
    def watching(self, rows: int, stops: bool) -> Iterator[None]:
        """Keep `rows` rows of the pass within, which ends before the head if it `stops`."""
        self._expected, self._stops, self.kept = rows, stops, 0
        try:
            yield
        finally:
            self._expected = 0
        if not self.kept:  # this graph had another tensor at a known address
            self.nodes.forget()

    def __enter__(self) -> Self:
        """Begin a llama.cpp batch."""
        self.nodes.begin(self._expected > 0)
        return self

    def __exit__(self, *_raised: object) -> None:
        """End the batch; raise any error that occurred while looking at it, such as an interrupt."""
        self.nodes.end()

    def _wants(self, tensor: int) -> bool:
        return self._expected > 0 and ggml.ggml_get_name(tensor) == _NORM

    def _see(self, tensor: int) -> bool:
        size, states = ggml.ggml_nbytes(tensor), self.head.states
        if size != self._expected * states.strides[0]:
            return True
        ggml.ggml_backend_tensor_get(tensor, states.ctypes.data, 0, size)
        self.kept = self._expected
        return not self._stops

    def agrees(self, logits: Floats) -> bool:
        """Return whether the heads of the kept rows give llama.cpp's own `logits`, (n, n_vocab)."""
        self.head.compute(0, len(logits))
        apart = float(np.abs(self.head.logits[: len(logits)] - logits).max())
        return apart <= _SAME * float(np.abs(logits).max())  # False for NaN


class LazyLogits:
    """Logits (n, n_vocab) of a context's last pass, computed from the first on as needed. Valid until the next pass."""

    def __init__(self, lazy_head: LazyHead, n: int, reached: Sequence[float]) -> None:
        """Plan the blocks of `n` rows; `reached[i]` is the chance that row i + 1 is looked at."""
        self._head = lazy_head.head
        self._ends = iter(block_ends([1.0, *reached][:n], lazy_head.seconds))
        self._n = n
        self.known = 0
        """Rows that have been computed."""

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, row: int) -> Floats:
        """Return the logits of a row, (n_vocab,)."""
        found: Floats = self.upto(row + 1)[row]
        return found

    def upto(self, n: int) -> Floats:
        """Return the first `n` rows, (n, n_vocab)."""
        while self.known < n:
            end = next(self._ends, self._n)
            self._head.compute(self.known, end)
            self.known = end
        return self._head.logits[:n]

    def __iter__(self) -> Iterator[Floats]:
        """Iterate over the rows, (n_vocab,) each."""
        return (self[row] for row in range(self._n))

    def blocks(self) -> Iterator[Floats]:
        """Yield all rows in the blocks in which they are computed, (k, n_vocab) each."""
        start = 0
        while start < self._n:
            self.upto(start + 1)
            yield self._head.logits[start : self.known]
            start = self.known


Rows: TypeAlias = Floats | LazyLogits
"""Logits (n, n_vocab), all computed or not."""


def in_blocks(rows: Rows) -> Iterator[Floats]:
    """Return an iterator over the rows in blocks (k, n_vocab), each computed when it is its turn."""
    return rows.blocks() if isinstance(rows, LazyLogits) else iter((rows,))


def known(rows: Rows, n: int) -> Floats:
    """Return the first `n` rows, (n, n_vocab)."""
    return rows.upto(n) if isinstance(rows, LazyLogits) else rows[:n]


def block_ends(reached: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """Return where to end the blocks of rows that are computed together, so that the expected time is least.

    `reached[i]` is the chance that row i is needed, `seconds` the times of heads of `HEADS` rows together.
    """
    n = len(reached)
    price = np.interp(np.arange(ROWS + 1), (0, *HEADS), (0.0, *seconds)).tolist()
    least, ends = [0.0] * (n + 1), [n] * n
    for start in range(n - 1, -1, -1):
        best = float("inf")
        for width in HEADS:
            end = min(n, start + width)
            expected = reached[start] * price[end - start] + least[end]
            if expected < best:
                best, ends[start] = expected, end
            if end == n:
                break
        least[start] = best
    found, at = [], 0
    while at < n:
        at = ends[at]
        found.append(at)
    return found
