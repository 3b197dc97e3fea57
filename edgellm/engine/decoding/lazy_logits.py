"""Logits that are computed when they are looked at.

A pass over drafted tokens stops before the head, which is then computed for the first rows, and for further rows only
as long as the drafts before them are accepted.
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
"""Numbers of rows whose heads are computed together; the last block of a pass may have fewer."""
_USUAL = (1.0, 1.7, 2.0, 2.9, 4.0, 4.8, 9.0, 18.0)  # relative times of `HEADS`, where they were not measured
_NORM = b"result_norm"
_SAME = 1e-3  # of the largest logit: products of other shapes are rounded in another order


class Late:
    """The late head of one context: while watched, its graph stops before the head, and the head's input is kept."""

    def __init__(self, head: LMHead) -> None:
        self.head = head
        self._seconds: Sequence[float] = _USUAL
        """Seconds of heads of `HEADS` rows together, or numbers in proportion to them."""
        self.kept = 0
        """Rows kept of the last pass; 0 where it had another number of rows than expected."""
        self.error: BaseException | None = None
        self._expected = 0  # 0: it does not watch
        self._stops = True
        self._names: dict[int, bool] = {}  # whether the tensor at an address is the head's input
        library = native.ggml()
        self._name = native.at_once(library.ggml_get_name, ctypes.c_char_p, ctypes.c_void_p)
        self._bytes = native.at_once(library.ggml_nbytes, ctypes.c_size_t, ctypes.c_void_p)
        self._get = library.ggml_backend_tensor_get
        self.callback: Any = lib.ggml_backend_sched_eval_callback(self._see)

    @property
    def seconds(self) -> Sequence[float]:
        """Seconds that heads of `HEADS` rows take together, or numbers in proportion to them."""
        return self._seconds

    def take(self, seconds: Sequence[float]) -> None:
        """Set the seconds that heads of `HEADS` rows take together."""
        self._seconds = seconds

    def close(self) -> None:
        """Let go of the model's file; called when the context is closed."""
        self.callback = None

    @contextmanager
    def watching(self, rows: int, stops: bool) -> Iterator[None]:
        """Keep `rows` rows of the pass within, which ends before the head if it `stops`."""
        self._expected, self._stops, self.kept = rows, stops, 0
        try:
            yield
        finally:
            self._expected = 0
        if not self.kept:  # addresses are used again: this graph had another tensor there
            self._names.clear()

    def __enter__(self) -> Self:
        """Begin a llama.cpp batch."""
        self.error = None
        return self

    def __exit__(self, *_raised: object) -> None:
        """End the batch; raise any error that occurred while looking at it, such as an interrupt."""
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
        """Return whether the heads of the kept rows give llama.cpp's own `logits`, (n, n_vocab)."""
        self.head.compute(0, len(logits))
        apart = float(np.abs(self.head.logits[: len(logits)] - logits).max())
        return apart <= _SAME * float(np.abs(logits).max())  # False for NaN


class LateRows:
    """Logits (n, n_vocab) of a context's last pass, computed from the first on as needed. Valid until the next pass."""

    def __init__(self, late: Late, n: int, reached: Sequence[float]) -> None:
        """Plan the blocks of `n` rows; `reached[i]` is the chance that row i + 1 is looked at."""
        self._head = late.head
        self._ends = iter(block_ends([1.0, *reached][:n], late.seconds))
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


Rows: TypeAlias = Floats | LateRows
"""Logits (n, n_vocab), all computed or not."""


def in_blocks(rows: Rows) -> Iterator[Floats]:
    """Return an iterator over the rows in blocks (k, n_vocab), each computed when it is its turn."""
    return rows.blocks() if isinstance(rows, LateRows) else iter((rows,))


def known(rows: Rows, n: int) -> Floats:
    """Return the first `n` rows, (n, n_vocab)."""
    return rows.upto(n) if isinstance(rows, LateRows) else rows[:n]


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
