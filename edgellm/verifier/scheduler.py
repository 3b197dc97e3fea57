"""The choice of what the verifier computes next: a pure function of the waiting requests (Synera, section 4.5,
Algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from edgellm.verifier.requests import VerifyRequest


class BatchKind(Enum):
    """Prefill and verification never share a batch: their row counts differ too much."""

    PREFILL = "prefill"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """One batch has at most `rows`; a prefill advances by `chunk` tokens at a time (Synera: 32), or by `alone` where
    there is only one session: no other can wait for a verdict then, and larger pieces are done sooner. A request
    with no more unseen tokens than such a piece needs no prefill: they join its verification.

    A verification waits behind at most `ahead` chunks of prefill, whoever's they are. `even`: verifications share a
    batch only if they have the same number of rows; llama.cpp splits a batch of several streams into even pieces.
    """

    rows: int = 512
    chunk: int = 32
    ahead: int = 1
    even: bool = True
    alone: int = 128


class Schedulable(Protocol):
    """The view of a request that the choice of a batch needs; see `VerifyRequest`."""

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
        """Return about how many rows could be computed in the time of this slice: a further sequence costs two."""
        return self.tokens + 2


@dataclass(frozen=True, slots=True)
class ScheduledBatch(Generic[R]):
    """One pass of the model, over one or more sessions."""

    kind: BatchKind
    slices: tuple[ScheduledSlice[R], ...]


def next_batch(
    requests: Collection[R], limits: SchedulerLimits, prefills: int, alone: bool = False, budget: int | None = None
) -> ScheduledBatch[R] | None:
    """Return the next batch over `requests` (least recently served first), when `prefills` prefill batches have been
    computed; None if no request waits. `alone`: no other session has a slot. `budget`: devices ask by turns, and
    beyond the first turn a batch is no heavier than this.

    Prefill goes first, as in the paper, unless a prefill has already gone ahead of a waiting verification. So a
    verification waits behind one prefill batch, of `limits.ahead` chunks; and a prefill waits only until the
    verifications that the last prefill went ahead of are done. Where several devices ask, the first in line decides
    which of the two is computed, and its device then goes to the end of the line.
    """
    step = min(limits.alone, limits.rows) if alone else limits.chunk
    most = None  # most rows of one request
    if budget is not None:
        most = max(budget, _PORTION if any(request.turn for request in requests) else limits.chunk)
        step = min(step, most)
    prefill: list[R] = []
    verify: list[R] = []
    for request in requests:
        (prefill if request.unseen > step else verify).append(request)
    if budget is None:
        verify.sort(key=_arrival)
        hurry = bool(verify) and verify[0].arrival < prefills
    else:  # the first in line decides, even if requests of other devices have waited for longer
        hurry = any(request.unseen <= step for request in islice(requests, 1))
    if prefill and not hurry:
        pieces = (ScheduledSlice(request, step, 0) for request in prefill)
        return ScheduledBatch(
            BatchKind.PREFILL, _fitting(pieces, min(limits.rows, limits.ahead * min(limits.chunk, step)), budget)
        )
    if verify:
        whole = (_verification(request, most) for request in verify)
        if limits.even:
            first = _verification(verify[0], most).tokens
            whole = (piece for piece in whole if piece.tokens == first)
        return ScheduledBatch(BatchKind.VERIFY, _fitting(whole, limits.rows, budget))
    return None


class Scheduler:
    """Algorithm 1 as published: it knows only sessions. The engine's thread calls its methods."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits

    def next(
        self, ready: Collection[VerifyRequest], prefills: int, alone: bool
    ) -> ScheduledBatch[VerifyRequest] | None:
        """Return the next batch over `ready`; see `next_batch`."""
        return next_batch(ready, self.limits, prefills, alone)

    def shared(self) -> bool:
        """Return whether slots are shared out between several devices."""
        return False

    def arrived(self, request: VerifyRequest) -> None:
        """Take note of a request that has come."""

    def computed(self, batch: ScheduledBatch[VerifyRequest], seconds: float, answered: int) -> None:
        """Take note of the time a batch took, and of how many requests it answered."""


def _arrival(request: Schedulable) -> int:
    return request.arrival


def _verification(request: R, most: int | None) -> ScheduledSlice[R]:
    """Return all of it, or its first `most` drafted tokens: the others are verified once these stand."""
    drafted = min(request.drafted, most or request.drafted)
    return ScheduledSlice(request, request.unseen + drafted, drafted + 1)


def _fitting(slices: Iterable[ScheduledSlice[R]], rows: int, budget: int | None) -> tuple[ScheduledSlice[R], ...]:
    """Return as many of `slices` as fit in `rows`, in their order, but always the first. Beyond the first turn they
    have to fit in `budget` as well, if there is one. Of dozens of requests often only the first few are looked at."""
    taken: list[ScheduledSlice[R]] = []
    weight = 0
    for piece in slices:
        rows -= piece.tokens
        if budget is not None:
            weight += piece.weight
            if taken and piece.request.turn and weight > budget:
                break
        if taken and rows < 0:
            break
        taken.append(piece)
    return tuple(taken)


_PORTION = 16  # rows of one request in a batch, where a device asks for several at once beside other devices
