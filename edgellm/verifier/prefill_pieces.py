"""How many tokens a prefill advances by at a time, by the measured cost of passes (Synera, section 4.5: always 32).

A pass over n rows takes about a + b n seconds: it reads the model's weights, and computes n rows. A piece of

    n = S R f / (f + (1 - S) R),  f = a / b

rows reaches the share S of the rows per second of a piece of R rows, the largest. It is made no longer than D seconds,
for which a verdict may have to wait, and never shorter than the scheduler's own limit:

    max(least, min(n, (D - a) / b, R))
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgellm.verifier.judgement import Job
from edgellm.verifier.scheduler import BatchKind, ScheduledBatch, SchedulerLimits

_log = logging.getLogger(__name__)

SPEED = 0.9
"""Share S of the speed of the largest piece."""
DELAY = 0.05
"""Seconds D that a piece may delay the verdict of another session."""
SOLO_DELAY = 0.5
"""Seconds D of a session without others: the longest wait of a new one."""
_FEW, _MANY = 16, 32  # rows: the base and the slope follow from passes of at most, and of at least, these
_NEWS = 0.25  # share by which a piece has to change to be logged
_WEIGHT = 0.1  # of the last pass in the mean of its kind


@dataclass(slots=True)
class _Mean:
    """Decaying means of the rows and seconds of passes."""

    rows: float = 0.0
    seconds: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        weight = _WEIGHT if self.rows else 1.0
        self.rows += weight * (rows - self.rows)
        self.seconds += weight * (seconds - self.seconds)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The limits that a scheduler uses, and the reason."""

    limits: SchedulerLimits
    reason: str


class PrefillPieces:
    """Chooses the sizes of pieces: as `limits` say, until a cost curve is known; then by the passes since, too."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._least = limits
        self._few, self._many = _Mean(), _Mean()
        self._measured = False
        self._logged = 0  # tokens of the piece that was logged last
        self.current = Pieces(limits, f"Prefills advance by {limits.chunk} tokens at a time: nothing is measured yet")

    def use_curve(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Begin with a measured cost curve: the `seconds` of a decode for each of `rows`."""
        self._few, self._many, self._measured = _Mean(), _Mean(), True
        for n, taken in zip(rows, seconds, strict=True):
            self._add(n, taken)
        self._choose()

    def on_batch(self, batch: ScheduledBatch[Job], seconds: float) -> None:
        """Learn from a pass of the engine. Verdicts of several sessions are no measure: their heads cost more."""
        if self._measured and len(batch.slices) == 1:
            rows = batch.slices[0].tokens
            if batch.kind is BatchKind.PREFILL or rows <= _FEW:
                self._add(rows, seconds)
                self._choose()

    def _add(self, rows: int, seconds: float) -> None:
        if rows <= _FEW:
            self._few.add(rows, seconds)
        elif rows >= _MANY:
            self._many.add(rows, seconds)

    def _choose(self) -> None:
        least, few, many = self._least, self._few, self._many
        if not few.rows or not many.rows:
            return
        slope = max((many.seconds - few.seconds) / (many.rows - few.rows), 1e-9 * many.seconds / many.rows)
        base = max(0.0, many.seconds - slope * many.rows)
        chunk, solo = (
            max(size, _piece(base, slope, least.rows, delay))
            for size, delay in ((least.chunk, DELAY), (least.solo_chunk, SOLO_DELAY))
        )
        self.current = Pieces(
            replace(least, chunk=chunk, solo_chunk=solo),
            f"Prefills advance by {chunk} tokens at a time, by {solo} for a session without others: a pass takes"
            f" {1e3 * base:.1f} ms and {1e3 * slope:.2f} ms a token, {SPEED:.0%} of the most tokens per second take"
            f" {_wanted(base, slope, least.rows)} tokens, and a verdict should wait at most {1e3 * DELAY:.0f} ms",
        )
        if abs(chunk - self._logged) > _NEWS * self._logged:
            self._logged = chunk
            _log.info("%s", self.current.reason)


def _wanted(base: float, slope: float, most: int) -> int:
    """Return the rows of a piece that reaches the share `SPEED` of the speed of `most` rows."""
    fixed = base / slope
    return int(SPEED * most * fixed / (fixed + (1.0 - SPEED) * most))


def _piece(base: float, slope: float, most: int, delay: float) -> int:
    return min(_wanted(base, slope, most), int((delay - base) / slope))
