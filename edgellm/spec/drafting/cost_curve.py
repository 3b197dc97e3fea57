"""The cost curve: the seconds of a decode by its number of rows, measured on this device and corrected by decodes."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log
from statistics import median

import numpy as np
import numpy.typing as npt

KNOTS: tuple[int, ...] = tuple(np.union1d(2 ** np.arange(7), 3 * 2 ** np.arange(5)).tolist())
"""Rows of a decode that are measured: 1, 2, 3, 4, 6, 8, 12 ... 64."""
MAX_DRAFT = KNOTS[-1] - 1
"""Most drafted tokens in a chunk: with the token before them they are one decode."""
ROW_TILE = 4
"""Rows that llama.cpp computes together; it computes the rest one by one."""
WITNESSES = 3
"""Decodes of one number of rows that have to agree before the curve is corrected there."""
_MIN_SAVING = 0.1  # share of the time that padding a decode beyond the next tile or knot has to save
_MIN_MOVE = 0.05  # smaller changes of a time's logarithm do not recompute the table
_RECENT = 15  # latest decodes of one number of rows in the median


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a decode by its number of rows."""

    rows: tuple[int, ...]  # ascending, from 1
    seconds: tuple[float, ...]  # a decode with `rows`
    positions: tuple[float, float] = (0.0, 0.0)
    """Seconds that a position before a decode adds to its first row, and to each further one: by attention."""
    filled: bool = False
    """Decodes are padded to a multiple of four, or a measured number of rows: a number in between can be slower than
    both (a quantised 0.5B model takes 34 ms for 4 rows, 66 ms for 7 and 44 ms for 8)."""

    def widths(self) -> list[int]:
        """Return the padded number of rows for 0, 1, 2 … `MAX_DRAFT + 1` rows."""
        wanted = list(range(MAX_DRAFT + 2))
        if not self.filled:
            return wanted
        for rows in wanted[2 : self.rows[-1] + 1]:  # One row is the reference.
            at = bisect_left(self.rows, rows)
            near = min(self.rows[at], ROW_TILE * ceil(rows / ROW_TILE))
            least = min(range(at, len(self.rows)), key=self.seconds.__getitem__)
            taken = np.interp(near, self.rows, self.seconds)
            wanted[rows] = self.rows[least] if self.seconds[least] < (1.0 - _MIN_SAVING) * taken else near
        return wanted

    def table(self, position: int = 0) -> list[float]:
        """Return the seconds of a padded decode of 0, 1, 2 … `MAX_DRAFT + 1` rows behind so many positions; 0 rows cost
        nothing."""
        wanted = np.array(self.widths()[1:])
        # More rows are never faster, and disturbances only make a measurement longer.
        known = np.minimum.accumulate(np.array(self.seconds)[::-1])[::-1]
        found = np.interp(wanted, self.rows, known)
        beyond = wanted > self.rows[-1]
        found[beyond] = known[-1] * wanted[beyond] / self.rows[-1]
        first, further = self.positions
        return [0.0, *(found + position * (first + (wanted - 1) * further)).tolist()]


class DecodeCost:
    """The cost of decodes: a curve, corrected by measured decodes.

    A measured number of rows takes the median error of its latest decodes, after `WITNESSES` decodes; the others
    interpolate. Numbers of rows beyond the tried ones have the error of the last tried one.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.given = curve
        self._log_rows = np.log(curve.rows)
        # Logarithms of measured over expected seconds; the curve itself counts as two decodes.
        self._ratios = [deque([0.0, 0.0], _RECENT) for _ in curve.rows]
        self._tries, self._errors = [0] * len(curve.rows), [0.0] * len(curve.rows)
        self._log_widths = np.log(curve.widths()[1:])
        nearest = np.abs(self._log_widths[:, None] - self._log_rows).argmin(axis=1)
        self._nearest: list[int] = nearest.tolist()  # measured number of rows nearest to 1, 2, 3 ... rows
        self.move(0)

    def move(self, position: int) -> None:
        """Tell the cost of decodes behind so many positions from now on."""
        self.position, self._plain = position, self.given.table(position)
        self._correct(self._errors)

    def _correct(self, errors: Sequence[float]) -> None:
        """Compute the tables anew, with these logarithms of errors."""
        self._errors = list(errors)
        factors = [1.0, *self._factors(self._log_widths).tolist()]
        self.table: list[float] = [taken * factor for taken, factor in zip(self._plain, factors, strict=True)]
        """Seconds of a decode of 0, 1, 2 ... rows."""
        self.slopes = _least_slopes(self.table)
        """Seconds of a further row behind i drafted tokens, at least: the mean of rows up to the cheapest length."""

    def _factors(self, log_rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the measured over the expected seconds of decodes by the logarithms of their rows, (n,) each."""
        tried = np.array(self._tries) >= WITNESSES
        if not tried.any():
            return np.ones(len(log_rows))
        found: npt.NDArray[np.float64] = np.exp(
            np.interp(log_rows, self._log_rows[tried], np.array(self._errors)[tried])
        )
        return found

    def corrected(self) -> CostCurve:
        """Return the curve of measured decodes."""
        seconds = np.array(self.given.seconds) * self._factors(self._log_rows)
        return replace(self.given, seconds=tuple(seconds.tolist()))

    @property
    def single(self) -> float:
        """Return the seconds of a decode without a draft."""
        return self.table[1]

    def seconds(self, drafted: int) -> float:
        """Return the seconds of a decode with `drafted` tokens."""
        return self.table[drafted + 1]

    def loss(self, drafted: int, accepted: int) -> float:
        """Return the net cost of a draft with `accepted` tokens, in decodes without drafts."""
        return self.seconds(drafted) / self.single - 1.0 - accepted

    @property
    def strays(self) -> bool:
        """Return whether one row has long taken less than half or more than twice what the curve says, as one that was
        measured while the device lacked memory."""
        return self._tries[0] >= _RECENT and abs(self._errors[0]) > log(2.0)

    def observe(self, drafted: int, tokens: int, seconds: float) -> None:
        """Learn from a decode with `drafted` tokens that brought `tokens` in `seconds`, 0 if unknown."""
        if tokens > drafted + 1 or not seconds:  # More tokens come from several decodes.
            return
        at = self._nearest[drafted]
        self._ratios[at].append(log(seconds / self._plain[drafted + 1]))
        self._tries[at] += 1
        error = median(self._ratios[at])
        if abs(error - self._errors[at]) > _MIN_MOVE:
            self._correct([*self._errors[:at], error, *self._errors[at + 1 :]])


def _least_slopes(table: Sequence[float]) -> list[float]:
    """Return in `[i]` the least seconds of a further row behind i drafted tokens: the mean to the cheapest length."""
    seconds = np.array(table[1:])
    rows = np.arange(len(seconds))
    apart = rows[None, :] - rows[:, None]
    slopes = np.where(apart > 0, (seconds[None, :] - seconds[:, None]) / np.maximum(apart, 1), np.inf)
    least: list[float] = slopes[:-1].min(axis=1).tolist()
    return least
