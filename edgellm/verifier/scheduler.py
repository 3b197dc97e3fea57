"""The verifier's next batch: Synera's Algorithm 1 (section 4.5) for one device, turns between several."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from edgellm.verifier.fairness import DeviceTurns
from edgellm.verifier.judgement import Job

DELAY = 0.05
"""Seconds that a chunk of a prefill may delay the verdict of another session."""
SOLO_DELAY = 0.5
"""Seconds of a chunk of a single session: the longest wait of a new session."""
_FASTEST = 1e-9  # least seconds of a row, if measurements do not tell rows apart
_PER_SEQUENCE = 2  # rows that cost as much as a further sequence in a batch
_TYPICAL = 8  # weight of a typical request: a chunk of four or five tokens and the token before it
_SLOWDOWN = 1.25  # longest time of a pass relative to a typical request, if several devices are active
_MAX_ROWS_TURN = 32  # most rows of a request in a batch, if devices take turns
_MAX_ROWS_SHARED = 16  # most rows of a request in a batch, if a device has several requests beside other devices
_DECAY = 0.98  # decay of measurements per pass: about the last fifty count
_INITIAL_SECONDS = 0.1  # seconds per answer before a measurement


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
    budget: int = int(_SLOWDOWN * _TYPICAL)

    def measured(self, rows: Sequence[int], seconds: Sequence[float]) -> SchedulerLimits:
        """Return limits with the largest chunks that verdicts may wait for, by the measured `seconds` of a pass over
        each number of `rows`; no chunk shrinks. The budget is large where reading the model's weights takes most of a
        pass."""
        slope, base = np.polyfit(rows, seconds, 1)
        slope = max(slope, _FASTEST)
        chunk, solo = (int((delay - base) / slope) for delay in (DELAY, SOLO_DELAY))
        return replace(
            self,
            chunk=max(self.chunk, min(chunk, self.rows)),
            solo_chunk=max(self.solo_chunk, min(solo, self.rows)),
            budget=max(self.budget, int(min(self.rows, _SLOWDOWN * _TYPICAL + (_SLOWDOWN - 1.0) * base / slope))),
        )


class Slice(NamedTuple):
    """The next `tokens` of one request; the last `outputs` of them yield rows of logits, none in a prefill."""

    request: Job
    tokens: int
    outputs: int


def next_batch(
    requests: Collection[Job], limits: SchedulerLimits, prefills: int, *, single_session: bool = False,
    turns: bool = False,
) -> list[Slice]:  # fmt: skip
    """Return the next batch over `requests` (least recently served first) after `prefills` prefill batches.
    `single_session`: no other session has a slot. `turns`: devices take turns.

    Prefill and verification never share a batch: their row counts differ too much. A chunk of prefill goes first, as in
    the paper, unless a prefill has already overtaken a waiting verification. If devices take turns, the first in line
    decides between the two. Verifications share a batch only if they have the same number of rows, because llama.cpp
    splits a batch of several streams into equal parts.
    """
    step = min(limits.solo_chunk, limits.rows) if single_session else limits.chunk
    most = limits.rows  # rows of one request's draft
    if turns:
        shared = any(request.turn for request in requests)
        most = max(limits.budget, _MAX_ROWS_SHARED if shared else min(limits.chunk, _MAX_ROWS_TURN))
        step = min(step, most)
    prefill = [request for request in requests if request.unseen > step]
    verify = [request for request in requests if request.unseen <= step]
    if turns:
        verify_first = any(request.unseen <= step for request in islice(requests, 1))
    else:
        verify.sort(key=lambda request: request.arrival)
        verify_first = bool(verify) and verify[0].arrival < prefills
    if prefill and not verify_first:
        return [Slice(prefill[0], step, 0)]
    batch: list[Slice] = []
    weight = 0
    for request in verify:
        drafted = min(request.drafted, most) if turns else request.drafted  # the rest waits until these are accepted
        piece = Slice(request, request.unseen + drafted, drafted + 1)
        if batch and piece.tokens != batch[0].tokens:
            continue
        weight += piece.tokens + _PER_SEQUENCE
        heavy = turns and request.turn and weight > limits.budget
        if batch and (heavy or piece.tokens * (len(batch) + 1) > limits.rows):
            break
        batch.append(piece)
    return batch


class Scheduler:
    """Algorithm 1 for a single active device, turns between several. The engine's thread calls its methods."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._turns = DeviceTurns()
        self._seconds = self._answers = 0.0  # decaying sums over the last passes

    def use_curve(self, rows: Sequence[int], seconds: Sequence[float]) -> str:
        """Choose the chunks of prefills and the budget by a measured cost curve; return the reason."""
        self.limits = limits = self.limits.measured(rows, seconds)
        return (
            f"Prefills advance by {limits.chunk} tokens at a time, by {limits.solo_chunk} for a session without others:"
            f" a verdict should wait at most {1e3 * DELAY:.0f} ms"
        )

    def next(self, ready: Collection[Job], prefills: int, single_session: bool) -> list[Slice]:
        """Return the next batch over `ready`."""
        turns = self._turns.several_devices()
        requests = self._turns.order(ready) if turns else ready
        return next_batch(requests, self.limits, prefills, single_session=single_session and not turns, turns=turns)

    def on_request(self, job: Job) -> None:
        """Observe a new request."""
        self._turns.record_request(job.device)

    def on_batch(self, batch: Sequence[Slice], seconds: float, answered: int) -> None:
        """Observe a batch, with its `seconds` and the number of requests that it `answered`."""
        self._turns.record_batch({piece.request.device for piece in batch})
        self._seconds = _DECAY * self._seconds + seconds
        self._answers = _DECAY * self._answers + answered

    def wait_seconds(self, requests: int) -> float:
        """Return the expected seconds until `requests` are answered."""
        if not self._answers:  # The first answer takes at least the time already spent.
            return requests * max(self._seconds, _INITIAL_SECONDS)
        return requests * self._seconds / self._answers
