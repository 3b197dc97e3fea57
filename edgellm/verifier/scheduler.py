"""The scheduler: the verifier's next batch, a pure function of the waiting requests (Synera, section 4.5, Algorithm
1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from edgellm.verifier.judgement import Job


class BatchKind(Enum):
    """The kinds of batches. Prefill and verification never share a batch: their row counts differ too much."""

    PREFILL = "prefill"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a batch.

    A batch has at most `rows`. A prefill advances by `chunk` tokens at a time (Synera: 32), or by `solo_chunk` if there
    is only one session: no other session waits then, and larger chunks are faster. A request with no more unseen tokens
    than a chunk needs no prefill: the tokens join its verification. A verification waits behind at most
    `max_prefill_ahead` chunks of prefill, of all sessions together. `equal_rows`: verifications share a batch only if
    they have the same number of rows, because llama.cpp splits a batch of several streams into equal parts.
    """

    rows: int = 512
    chunk: int = 32
    max_prefill_ahead: int = 1
    equal_rows: bool = True
    solo_chunk: int = 128

    def measured(self, rows: Sequence[int], seconds: Sequence[float]) -> SchedulerLimits:
        """Return limits with the largest chunks that verdicts may wait for, by the measured `seconds` of a pass over
        each number of `rows`; no chunk shrinks."""
        slope, base = np.polyfit(rows, seconds, 1)
        chunk, solo = (int((delay - base) / max(slope, _FASTEST)) for delay in (DELAY, SOLO_DELAY))
        return replace(
            self,
            chunk=max(self.chunk, min(chunk, self.rows)),
            solo_chunk=max(self.solo_chunk, min(solo, self.rows)),
        )


class Schedulable(Protocol):
    """The part of a `Job` that the scheduler uses."""

    @property
    def unseen(self) -> int: ...

    @property
    def drafted(self) -> int: ...

    @property
    def arrival(self) -> int: ...

    @property
    def turn(self) -> int: ...


R = TypeVar("R", bound=Schedulable)


class ScheduledSlice(NamedTuple, Generic[R]):
    """The next `tokens` of one request; the last `outputs` of them yield rows of logits."""

    request: R
    tokens: int
    outputs: int

    @property
    def weight(self) -> int:
        """Return the approximate cost of this slice in rows: a further sequence costs two."""
        return self.tokens + 2


@dataclass(frozen=True, slots=True)
class ScheduledBatch(Generic[R]):
    """One pass of the model, over one or more sessions."""

    kind: BatchKind
    slices: tuple[ScheduledSlice[R], ...]


def next_batch(
    requests: Collection[R],
    limits: SchedulerLimits,
    prefills: int,
    single_session: bool = False,
    budget: int | None = None,
) -> ScheduledBatch[R] | None:
    """Return the next batch over `requests` (least recently served first) after `prefills` prefill batches; None if no
    request waits. `single_session`: no other session has a slot. `budget`: devices take turns, and beyond the first
    turn a batch is no heavier than this.

    Prefill goes first, as in the paper, unless a prefill has already overtaken a waiting verification. So a
    verification waits behind one prefill batch of `limits.max_prefill_ahead` chunks, and a prefill waits only for the
    verifications that the last prefill overtook. If several devices take turns, the first in line decides between the
    two, and its device then goes to the end of the line.
    """
    step = min(limits.solo_chunk, limits.rows) if single_session else limits.chunk
    max_rows = None  # maximum rows of one request
    if budget is not None:
        shared = any(request.turn for request in requests)
        max_rows = max(budget, _MAX_ROWS_SHARED if shared else min(limits.chunk, _MAX_ROWS_TURN))
        step = min(step, max_rows)
    prefill: list[R] = []
    verify: list[R] = []
    for request in requests:
        (prefill if request.unseen > step else verify).append(request)
    if budget is None:
        verify.sort(key=lambda request: request.arrival)
        verify_first = bool(verify) and verify[0].arrival < prefills
    else:  # The first in line decides, even if requests of other devices have waited longer.
        verify_first = any(request.unseen <= step for request in islice(requests, 1))
    if prefill and not verify_first:
        pieces = (ScheduledSlice(request, step, 0) for request in prefill)
        return ScheduledBatch(
            BatchKind.PREFILL,
            _fit(pieces, min(limits.rows, limits.max_prefill_ahead * min(limits.chunk, step)), budget),
        )
    if verify:
        chosen = alike(verify, max_rows) if limits.equal_rows else (verification(one, max_rows) for one in verify)
        return ScheduledBatch(BatchKind.VERIFY, _fit(chosen, limits.rows, budget))
    return None


class Scheduler:
    """Synera's Algorithm 1 as published, which knows only sessions. The engine's thread calls its methods."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits

    def use_curve(self, rows: Sequence[int], seconds: Sequence[float]) -> str:
        """Choose the chunks of prefills by a measured cost curve; return the reason."""
        self.limits = limits = self.limits.measured(rows, seconds)
        return (
            f"Prefills advance by {limits.chunk} tokens at a time, by {limits.solo_chunk} for a session without others:"
            f" a verdict should wait at most {1e3 * DELAY:.0f} ms"
        )

    def next(self, ready: Collection[Job], prefills: int, single_session: bool) -> ScheduledBatch[Job] | None:
        """Return the next batch over `ready`."""
        return next_batch(ready, self.limits, prefills, single_session)

    def on_request(self, request: Job) -> None:
        """Observe a new request."""

    def on_batch(self, batch: ScheduledBatch[Job], seconds: float, answered: int) -> None:
        """Observe a batch, with its `seconds` and the number of requests that it `answered`."""


def alike(requests: Sequence[R], max_rows: int | None) -> Iterable[ScheduledSlice[R]]:
    """Return the verifications with the same row count as the first request's."""
    first = verification(requests[0], max_rows).tokens
    return (piece for request in requests if (piece := verification(request, max_rows)).tokens == first)


def verification(request: R, max_rows: int | None) -> ScheduledSlice[R]:
    """Return the whole request, or its first `max_rows` drafted tokens; the rest waits until these are accepted."""
    drafted = min(request.drafted, max_rows or request.drafted)
    return ScheduledSlice(request, request.unseen + drafted, drafted + 1)


def _fit(slices: Iterable[ScheduledSlice[R]], rows: int, budget: int | None) -> tuple[ScheduledSlice[R], ...]:
    """Return as many of `slices` as fit in `rows`, in order, but always the first. Beyond the first turn, slices must
    also fit in `budget`, if given."""
    fitted: list[ScheduledSlice[R]] = []
    weight = 0
    for piece in slices:
        rows -= piece.tokens
        if budget is not None:
            weight += piece.weight
            if fitted and piece.request.turn and weight > budget:
                break
        if fitted and rows < 0:
            break
        fitted.append(piece)
    return tuple(fitted)


_MAX_ROWS_TURN = 32  # most rows of a request in a batch, if devices take turns
_MAX_ROWS_SHARED = 16  # most rows of a request in a batch, if a device has several requests beside other devices
DELAY = 0.05
"""Seconds that a chunk of a prefill may delay the verdict of another session."""
SOLO_DELAY = 0.5
"""Seconds of a chunk of a single session: the longest wait of a new session."""
_FASTEST = 1e-9  # least seconds of a row, if measurements do not tell rows apart
