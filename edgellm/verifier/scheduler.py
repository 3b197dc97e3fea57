"""The verifier's next batch: Synera's Algorithm 1 (section 4.5) for one device, turns between several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from edgellm.spec.drafting.acceptance import DECAY
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.protocols import begun
from edgellm.spec.types import Verdict
from edgellm.spec.verification import Judgement

RECENT = 30.0
"""Seconds that a device counts as active after its last request."""
DELAY, SOLO_DELAY = 0.05, 0.5
"""Seconds that a chunk of a prefill may delay the verdict of another session, and those of a single session's chunk:
the longest wait of a new session."""
_PER_SEQUENCE = 2  # rows that cost as much as a further sequence in a batch
_BUDGET = 10  # rows of a typical request, a chunk of four or five tokens and the token before it, and a quarter more
_TURN_ROWS = 32  # most rows of a request in a batch, if devices take turns


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a batch, which has at most `rows`.

    A prefill advances by `chunk` tokens at a time (Synera: 32), or by `solo_chunk` if there is only one session. A
    request with no more unseen tokens than a chunk needs no prefill: the tokens join its verification. If devices take
    turns, a batch beyond their first turn is no heavier than `budget` rows.
    """

    rows: int = 512
    chunk: int = 32
    solo_chunk: int = 128
    budget: int = _BUDGET

    def within(self, rows: int) -> SchedulerLimits:
        """Return the limits for a context whose batches have at most `rows`."""
        chunk, solo_chunk = min(self.chunk, rows), min(self.solo_chunk, rows)
        return replace(self, rows=min(self.rows, rows), chunk=chunk, solo_chunk=solo_chunk)

    def measured(self, rows: Sequence[int], seconds: Sequence[float]) -> SchedulerLimits:
        """Return limits with the largest chunks that verdicts may wait for, by the measured `seconds` of a pass over
        each number of `rows`; no chunk shrinks. A pass over the budget takes a quarter longer than a typical one: that
        is much where reading the model's weights takes most of a pass."""
        slope, base = np.polyfit(rows, seconds, 1)
        slope = max(slope, 1e-9)  # Measurements may not tell rows apart.
        chunk, solo = (int((delay - base) / slope) for delay in (DELAY, SOLO_DELAY))
        return replace(
            self,
            chunk=max(self.chunk, min(chunk, self.rows)),
            solo_chunk=max(self.solo_chunk, min(solo, self.rows)),
            budget=max(self.budget, int(min(self.rows, _BUDGET + 0.25 * base / slope))),
        )


class Slice(NamedTuple):
    """The next `tokens` of one request; the last `outputs` of them yield rows of logits, none in a prefill."""

    request: Job
    tokens: int
    outputs: int


def next_batch(
    requests: Sequence[Job], limits: SchedulerLimits, prefills: int, *, single_session: bool = False,
    turns: bool = False,
) -> list[Slice]:  # fmt: skip
    """Return the next batch over `requests` (least recently served first) after `prefills` prefill batches.
    `single_session`: no other session has a slot. `turns`: devices take turns.

    Prefill and verification never share a batch: their row counts differ too much. A chunk of prefill goes first, as in
    the paper, unless a prefill has already overtaken a waiting verification. If devices take turns, the first in line
    decides between the two. Verifications share a batch only if they have the same number of rows, because llama.cpp
    splits a batch of several streams into equal parts.
    """
    step = limits.chunk
    most = max(limits.budget, min(step, _TURN_ROWS))  # rows of a request in turns
    if turns:
        step = min(step, most)
    elif single_session:
        step = min(limits.solo_chunk, limits.rows)
    prefill = [request for request in requests if request.unseen > step]
    verify = [request for request in requests if request.unseen <= step]
    if turns:
        verify_first = bool(verify) and verify[0] is requests[0]
    else:
        verify.sort(key=lambda request: request.arrival)
        verify_first = bool(verify) and verify[0].arrival < prefills
    if prefill and not verify_first:
        return [Slice(prefill[0], step, 0)]
    batch: list[Slice] = []
    weight = 0
    for request in verify:
        drafted = min(request.drafted, most) if turns else request.drafted  # The rest waits until these are accepted.
        piece = Slice(request, request.unseen + drafted, drafted + 1)
        if batch and piece.tokens != batch[0].tokens:
            continue
        weight += piece.tokens + _PER_SEQUENCE
        heavy = turns and request.turn and weight > limits.budget
        if batch and (heavy or piece.tokens * (len(batch) + 1) > limits.rows):
            break
        batch.append(piece)
    return batch


class TakesTurns(Protocol):
    """A request of a device; `turn` is the number of earlier requests of the same device."""

    turn: int

    @property
    def device(self) -> str: ...


T = TypeVar("T", bound=TakesTurns)


class DeviceTurns:
    """The order of requests by device: the least recently served first, a device's own in order of arrival. Used by
    the worker's thread alone."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}  # time of each active device's last request
        self._served: dict[str, int] = {}  # number of the last batch that served the device
        self._batches = 0

    def record_request(self, device: str) -> None:
        """Record a request of `device`."""
        self._asked[device] = monotonic()

    def several_devices(self) -> bool:
        """Return whether more than one device sent a request within the last `RECENT` seconds."""
        if len(self._asked) > 1:
            oldest = monotonic() - RECENT
            self._asked = {device: time for device, time in self._asked.items() if time >= oldest}
            self._served = {device: batch for device, batch in self._served.items() if device in self._asked}
        return len(self._asked) > 1

    def order(self, requests: Iterable[T]) -> list[T]:
        """Set the `turn` of each of `requests` (least recently served first); return them sorted by turn.

        The first turn has a request of each device, the second turn the second request, and so on.
        """
        counts: Counter[str] = Counter()
        ordered = list(requests)
        for request in ordered:
            request.turn = counts[request.device]
            counts[request.device] += 1
        return sorted(ordered, key=lambda request: (request.turn, self._served.get(request.device, 0)))

    def record_batch(self, devices: Iterable[str]) -> None:
        """Record a batch that served `devices`."""
        self._batches += 1
        self._served |= dict.fromkeys(devices, self._batches)


class Scheduler(DeviceTurns):
    """Algorithm 1 for a single active device, turns between several. The engine's thread calls its methods."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__()
        self.limits = limits
        self._seconds, self._answers = 0.1, 1.0  # decaying sums over the last passes, and a first guess

    def use_curve(self, curve: CostCurve) -> None:
        """Choose the chunks of prefills and the budget by a measured cost curve."""
        self.limits = self.limits.measured(curve.rows, curve.seconds)

    def next(self, ready: Collection[Job], prefills: int, single_session: bool) -> list[Slice]:
        """Return the next batch over `ready`."""
        turns = self.several_devices()
        requests = self.order(ready) if turns else list(ready)
        return next_batch(requests, self.limits, prefills, single_session=single_session, turns=turns)

    def on_batch(self, batch: Sequence[Slice], seconds: float, answered: int) -> None:
        """Observe a batch, with its `seconds` and the number of requests that it `answered`."""
        self.record_batch({piece.request.device for piece in batch})
        self._seconds = DECAY * self._seconds + seconds
        self._answers = DECAY * self._answers + answered

    def wait_seconds(self, requests: int) -> float:
        """Return the expected seconds until `requests` are answered."""
        return requests * self._seconds / self._answers


@dataclass(slots=True, eq=False)
class Job(Judgement):
    """A request on its way through queue, slot and batches of the engine, until its answer."""

    answer: Future[Verdict] = field(default_factory=begun)
    arrival: int = 0  # prefill batches computed before the request arrived, or was last served
    turn: int = 0  # earlier requests of the same device, if devices take turns
    slot: int = -1  # -1 while it waits for one

    @property
    def unseen(self) -> int:
        """Return the number of tokens to compute before the drafted ones; at least 1."""
        return len(self.ids) - self.request.computed

    @property
    def drafted(self) -> int:
        """Return the number of drafted tokens still to be verified."""
        return len(self.remaining)

    @property
    def session(self) -> int:
        return self.request.session

    @property
    def device(self) -> str:
        return self.request.tenant.device


@dataclass(slots=True)
class Counters:
    """Counters of an engine, which grow. `shared` batches had several sessions.

    `rows` were computed; `copied` tokens came from another session's cache instead. `preemptions` are running requests
    that lost their slot to another device's request.
    """

    batches: int = 0
    prefills: int = 0
    shared: int = 0
    rows: int = 0
    copied: int = 0
    verdicts: int = 0
    evictions: int = 0
    preemptions: int = 0

    def add(self, **amounts: int) -> None:
        """Add these amounts to the counters of their names."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)
