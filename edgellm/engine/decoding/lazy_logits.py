"""Logits that are computed when they are looked at.

A pass over drafted tokens stops before the head, which is then computed for the first rows, and for more of them only
as long as the drafts before them stand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeAlias

import numpy as np

from edgellm.engine import native
from edgellm.engine.decoding.lm_head import ROWS, LMHead
from edgellm.engine.native import lib
from edgellm.engine.types import Floats

HEADS = (1, 2, 3, 4, 8, 16, 32, 64)
"""Rows whose heads are computed together, or fewer."""
_USUAL = (1.0, 1.7, 2.0, 2.9, 4.0, 4.8, 9.0, 18.0)  # how long they take, where that was not measured
_NORM = b"result_norm"
_SAME = 1e-3  # of the largest logit: products of other shapes are rounded in another order


class Late:
    """Of one context: while it is watched, its graph stops before the head, and the rows that it would get are kept."""

    def __init__(self, head: LMHead) -> None:
        self.head = head
        self._seconds: Sequence[float] = _USUAL
        """Of heads of `HEADS` rows together, or what is in proportion to them."""
        self.kept = 0
        """Rows of the last pass, from the first on; 0 where there were not as many as were expected."""
        self.error: BaseException | None = None
        self._expected = 0  # 0: it does not watch
        self._stops = True
        self._names: dict[int, bool] = {}  # whether the tensor at an address is the one
        library = native.ggml()
        self._name = native.at_once(library.ggml_get_name, ctypes.c_char_p, ctypes.c_void_p)
        self._bytes = native.at_once(library.ggml_nbytes, ctypes.c_size_t, ctypes.c_void_p)
        self._get = library.ggml_backend_tensor_get
        self.callback: Any = lib.ggml_backend_sched_eval_callback(self._see)

    @property
    def seconds(self) -> Sequence[float]:
        """What heads of `HEADS` rows take together."""
        return self._seconds

    def take(self, seconds: Sequence[float]) -> None:
        """From now on heads of `HEADS` rows are taken to take so long."""
        self._seconds = seconds

    def close(self) -> None:
        """For when the context is closed: nothing holds on to the model's file any more."""
        self.callback = None

    @contextmanager
    def watching(self, rows: int, stops: bool) -> Iterator[None]:
        """The pass within keeps `rows` rows, and ends there where it `stops`."""
        self._expected, self._stops, self.kept = rows, stops, 0
        try:
            yield
        finally:
            self._expected = 0
        if not self.kept:  # addresses are used again: this graph had another tensor there
            self._names.clear()

    def __enter__(self) -> Self:
        """A llama.cpp batch begins."""
        self.error = None
        return self

    def __exit__(self, *_raised: object) -> None:
        """It is over: what went wrong while looking at it, an interrupt above all, is raised."""
        if self.error is not None:
            raise self.error

    def _see(self, tensor: int, asking: bool, _user: int | None) -> bool:
        # Asked about a node: is it wanted? Shown it: go on? Every node of every pass is asked about, and nothing may be
        # raised through C.
        try:
            if not self._expected:
                return not asking
            wanted = self._names.get(tensor)
            if wanted is None or not asking:
                wanted = self._names[tensor] = self._name(tensor) == _NORM
            if asking or not wanted:
                return wanted or not asking
            size, states = self._bytes(tensor), self.head.states
            if size != self._expected * states.strides[0]:
                return True
            self._get(tensor, states.ctypes.data, 0, size)
            self.kept = self._expected
            return not self._stops
        except BaseException as error:  # noqa: BLE001  raised again once C has returned
            self.error = error
            return False

    def agrees(self, logits: Floats) -> bool:
        """Whether the heads of the rows that are kept are these `logits` (n, n_vocab) of llama.cpp's own."""
        self.head.compute(0, len(logits))
        apart = float(np.abs(self.head.logits[: len(logits)] - logits).max())
        return apart <= _SAME * float(np.abs(logits).max())  # of numbers that are none nothing is


class LateRows:
    """Logits (n, n_vocab) of a context's last pass, of which the first ones are known. Valid until the next one."""

    def __init__(self, late: Late, n: int, reached: Sequence[float]) -> None:
        """`reached[i]` is the chance that row i + 1 is looked at."""
        self._head = late.head
        self._ends = iter(block_ends([1.0, *reached][:n], late.seconds))
        self._n = n
        self.known = 0
        """Rows that are computed by now."""

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, row: int) -> Floats:
        """(n_vocab,)."""
        found: Floats = self.upto(row + 1)[row]
        return found

    def upto(self, n: int) -> Floats:
        """The first `n` rows, (n, n_vocab)."""
        while self.known < n:
            end = next(self._ends, self._n)
            self._head.compute(self.known, end)
            self.known = end
        return self._head.logits[:n]

    def __iter__(self) -> Iterator[Floats]:
        """One row behind the other, (n_vocab,)."""
        return (self[row] for row in range(self._n))

    def blocks(self) -> Iterator[Floats]:
        """All rows in the blocks in which they are computed, one behind the other, (k, n_vocab)."""
        start = 0
        while start < self._n:
            self.upto(start + 1)
            yield self._head.logits[start : self.known]
            start = self.known


Rows: TypeAlias = Floats | LateRows
"""Logits (n, n_vocab), all computed or not."""


def in_blocks(rows: Rows) -> Iterator[Floats]:
    """The rows in blocks (k, n_vocab), each computed when it is its turn."""
    return rows.blocks() if isinstance(rows, LateRows) else iter((rows,))


def known(rows: Rows, n: int) -> Floats:
    """The first `n` rows, (n, n_vocab)."""
    return rows.upto(n) if isinstance(rows, LateRows) else rows[:n]


def block_ends(reached: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """Where to end the blocks of rows that are computed together, to take the least time that can be expected.

    `reached[i]` is the chance that row i is needed, `seconds` what heads of `HEADS` rows take together.
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
