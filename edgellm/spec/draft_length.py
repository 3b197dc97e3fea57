"""The cost curve: how long one decode of n rows takes on this device, and which draft length makes the most of it."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp, inf, log
from operator import mul
from statistics import median

import numpy as np

from edgellm.engine import HEADS

KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
"""Rows of a decode that are measured."""
ROW_TILE = 4
"""Rows that llama.cpp computes together; the rest one by one."""
MIN_SAVING = 0.1
"""Share of the time that filling a decode up beyond the next tile, or measured number of rows, has to save."""
MAX_DRAFT = KNOTS[-1] - 1
"""Drafted tokens in a chunk, at most: with the token before them they are one decode."""
MIN_GAIN = 0.02
"""Tokens that a draft has to bring beyond its cost: a curve is not measured more exactly than that."""
DEPTH_STEP = 256
"""Positions of a context by which curves are told apart."""
EXPLORATION = 0.004
"""Share of the time that may go into drafts which are not expected to pay, to notice when they begin to; and into tries
of the small model."""
DRIFT = 0.25
"""A curve that is wrong by more than this share, in the mean, is replaced by what decodes really take."""
OUTLIER = 2.0
"""Decodes that take this many times longer or shorter than expected, `WITNESSES` in a row, are believed at once."""
WITNESSES = 3
_MIN_ROUNDS = 50  # rounds that are needed to judge a curve
_REFIT = 8  # rounds after which their times go into the table for the first time
_MAX_REFIT = 64  # rounds between two such updates, once there were many
_MIN_REFIT = 0.01  # by which a length's time must have changed for an update
_MIN_WEIGHT = 0.1  # weight of the last round in the time of its length
_MEMORY = 0.98  # decay per round: a memory of about fifty rounds
_RECENT_ROUNDS = 32  # rounds for which a length that was tried counts as known
_MAX_TRY = 2.0  # upper limit of a trial's cost, in decodes of one row, whatever the curve says of two rows
_CURVES = 16  # that are in use at once, at most: what follows from one is asked for by every reply
_TRIES = 8.0  # decodes of one row that may be spent on trials at once while the curve is doubtful


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a decode by its number of rows: `seconds[i]` for `rows[i]`, both ascending; `rows` begins with 1.

    The times hold if the previous decode had the same number of rows; otherwise `change` is added, because llama.cpp
    then rebuilds its graph. With `heads`, the times are of decodes without the LM head, and `heads[i]` are the seconds
    of `HEADS[i]` head rows, which are computed lazily. With `filled`, decodes are padded to a multiple of four, or a
    measured number of rows: a number in between can be slower than both (a quantised 0.5B model takes 34 ms for 4 rows,
    66 ms for 7 and 44 ms for 8). `doubtful`: the machine was busy during the measurement.

    The times are those at the beginning of a context. Behind each position a decode takes `attention[0]` longer, and
    each of its rows `attention[1]`: see `behind`.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    change: float = 0.0
    filled: bool = False
    heads: tuple[float, ...] = ()
    doubtful: bool = False
    attention: tuple[float, float] = (0.0, 0.0)

    def behind(self, positions: int) -> CostCurve:
        """Return the curve of decodes behind so many positions, in steps of `DEPTH_STEP`."""
        positions -= positions % DEPTH_STEP
        decode, row = (positions * taken for taken in self.attention)
        if not decode + row:
            return self
        seconds = tuple(taken + decode + row * rows for rows, taken in zip(self.rows, self.seconds, strict=True))
        return replace(self, seconds=seconds)

    def scaled(self, factor: float) -> CostCurve:
        """Return the curve of a device on which everything takes `factor` times as long."""
        return replace(
            self,
            seconds=tuple(factor * taken for taken in self.seconds),
            change=factor * self.change,
            heads=tuple(factor * taken for taken in self.heads),
            attention=(factor * self.attention[0], factor * self.attention[1]),
        )

    def head_seconds(self) -> list[float]:
        """Return the seconds of the heads of 0, 1, 2 … `MOST + 1` rows together; 0 where the decode's time includes
        them."""
        if not self.heads:
            return [0.0] * (MAX_DRAFT + 2)
        found: list[float] = np.interp(np.arange(MAX_DRAFT + 2), (0, *HEADS), (0.0, *self.heads)).tolist()
        return found

    def filling(self) -> tuple[Sequence[int], Sequence[float]]:
        """Return the curve's facts for a context; see `Context.fill`."""
        return _kept_widths(self), self.heads

    def widths(self) -> list[int]:
        """Return to how many rows a decode of 0, 1, 2 … `MOST + 1` rows is filled up."""
        wanted = list(range(MAX_DRAFT + 2))
        if not self.filled:
            return wanted
        for rows in wanted[2 : self.rows[-1] + 1]:  # one row is the reference
            at = bisect_left(self.rows, rows)
            near = min(self.rows[at], ROW_TILE * ceil(rows / ROW_TILE))
            least = min(range(at, len(self.rows)), key=self.seconds.__getitem__)
            taken = np.interp(near, self.rows, self.seconds)
            wanted[rows] = self.rows[least] if self.seconds[least] < (1.0 - MIN_SAVING) * taken else near
        return wanted

    def table(self, widths: Sequence[int] = ()) -> list[float]:
        """Return the seconds of a decode of 0, 1, 2 … `MOST + 1` rows (0 rows cost nothing), filled up to `widths`,
        by default the curve's own."""
        wanted = np.array((widths or self.widths())[1:])
        # more rows are never faster, and disturbances only make a measurement longer
        known = np.minimum.accumulate(np.array(self.seconds)[::-1])[::-1]
        found = np.interp(wanted, self.rows, known)
        beyond = wanted > self.rows[-1]
        found[beyond] = known[-1] * wanted[beyond] / self.rows[-1]
        return [0.0, *found.tolist()]


@lru_cache(maxsize=_CURVES)
def _kept_widths(curve: CostCurve) -> tuple[int, ...]:
    return tuple(curve.widths())


@lru_cache(maxsize=_CURVES)
def acceptance_floors(curve: CostCurve) -> Sequence[float]:
    """Return, for each number of other rows, the acceptance probability above which one more row pays, compared with a
    decode of its own later."""
    table = curve.table()
    return tuple(slope / table[1] for slope in _least_slopes(table))


class DraftLengthController:
    """Chooses the draft length that maximises expected accepted tokens per second; zero is a choice.

    A further token is worth the time it saves later, which is the recent time per token. The length that maximises
    `expected - rate * seconds` therefore maximises the rate (Dinkelbach 1967).
    """

    def __init__(self, curve: CostCurve) -> None:
        self._rows = np.log(curve.rows)
        self._positions = 0  # before the reply
        self._log_errors = [0.0] * len(curve.rows)  # log of measured over predicted seconds
        self._tries = [0.0] * len(curve.rows)
        self._recent: list[deque[float]] = [
            deque(maxlen=WITNESSES) for _ in curve.rows
        ]  # as `_log_errors`, decode by decode
        self._last_tried = [0] * len(curve.rows)  # the round in which a length was tried last
        self._log_scale = 0.0  # the same of all lengths together, against the curve that was given
        self._use_curve(curve)
        self._last = -1  # rows of the last decode; -1: unknown
        self._explored = 0.0
        self._doubtful = False
        if curve.doubtful:
            self._doubt()
        self._total_seconds = 0.0
        self._rounds = 0
        self._refit_at = _REFIT
        self._fitted = list(self._log_errors)  # that are in the table

    def begin(self, positions: int) -> None:
        """Begin a reply behind a prompt of so many tokens, which makes decodes longer."""
        if (positions := positions - positions % DEPTH_STEP) != self._positions:
            self._positions = positions
            self._use_curve(self._given)
            self._refit()

    def _use_curve(self, given: CostCurve) -> None:
        """Use another curve with the same rows."""
        self._given, self._curve = given, given.behind(self._positions)
        curve = self._curve
        self._widths = curve.widths()
        nearest = np.abs(np.log(self._widths[1:])[:, None] - self._rows).argmin(axis=1)
        # index of the nearest measured width, for drafts of 0, 1, 2 ... tokens
        self._nearest: list[int] = nearest.tolist()
        self._plain = self._table = curve.table(self._widths)
        self._heads = curve.head_seconds()
        self._slopes = _least_slopes(self._table)
        self._tokens, self._seconds = 1.0, self.single  # of recent rounds, fading

    @property
    def rate(self) -> float:
        """Return the latest tokens per second, or those without drafts where they would have been more."""
        return max(self._tokens / self._seconds, 1.0 / self.single)

    @property
    def single(self) -> float:
        """Return the seconds of a decode without drafts."""
        return self._table[1] + self._heads[1]

    def loss(self, drafted: int, accepted: int) -> float:
        """Return what a draft of which so many tokens were accepted has cost more than it saved, in decodes without
        drafts."""
        taken = self._table[drafted + 1] + self._head_seconds(drafted + 1, accepted + 1.0) + 2.0 * self._curve.change
        return taken / self.single - 1.0 - accepted

    def _head_seconds(self, rows: int, expected: float) -> float:
        """Return the seconds of the heads of `rows` rows, of which `expected` are expected to be needed: computed one
        by one or all together, whichever is faster."""
        return min(expected * self._heads[1], self._heads[rows])

    @property
    def factor(self) -> float:
        """Return how many times as long decodes take as the given curve says, for the length where it is farthest
        off."""
        return exp(max((self._log_scale + log_error for log_error in self._log_errors), key=abs))

    @property
    def rounds(self) -> int:
        """Return the number of decodes that were learned from."""
        return self._rounds

    @property
    def drifted(self) -> bool:
        """Return whether decode times have drifted from the curve for long, or are off by more than `OUTLIER`."""
        if max(self.factor, 1.0 / self.factor) > OUTLIER:
            return True
        if self._rounds < _MIN_ROUNDS:
            return False
        tries = sum(self._tries)
        wrong = sum(map(mul, self._log_errors, self._tries)) / tries if tries else 0.0
        return abs(self._log_scale + wrong) > log(1.0 + DRIFT)

    def corrected(self) -> CostCurve:
        """Return the curve that decodes really follow; lengths that were not tried are interpolated from their
        neighbours."""
        return self._corrected(self._given)

    def _corrected(self, curve: CostCurve) -> CostCurve:
        tried = np.array(self._tries) > 0
        if not tried.any():
            return curve
        log_error = np.interp(self._rows, self._rows[tried], np.array(self._log_errors)[tried])
        seconds = np.array(curve.seconds) * np.exp(log_error)
        return replace(curve, seconds=tuple(seconds.tolist()))

    def choose(
        self, survives: Sequence[float], alternative: tuple[float, float] | None = None, allowed: float = inf
    ) -> int:
        """Return how many of the offered tokens to draft; `survives[i]` is the chance that the first i + 1 are all
        accepted. The result may exceed their number: then arbitrary tokens fill up the decode.

        Without a draft the verifier's next token comes alone, or `alternative`, tokens and seconds, if that is better.
        A draft that is expected to pay takes at most `allowed` decodes without drafts longer than one.
        """
        table, last, change = self._table, self._last, self._curve.change
        best, gain, expected = self._best(survives, alternative, allowed)
        price = self.rate
        as_before = best < last - 1 > len(survives) > 0
        if as_before and expected - price * (table[last] + self._head_seconds(last, expected)) > gain:
            return last - 1  # an arbitrary row is cheaper than a changed number of rows
        if self._doubtful and best < (longest := min(len(survives), MAX_DRAFT)) and self._untried(longest):
            cost = min(table[longest + 1] - table[best + 1], _MAX_TRY * self.single)
            if self._explored + cost <= EXPLORATION * self._total_seconds:
                self._explored += cost
                return longest
        if best or not survives:
            return best
        cost = max(table[2] - table[1] + 2.0 * change, MIN_GAIN * self.single)  # to another number of rows, and back
        cost = min(cost, _MAX_TRY * self.single)  # a wrong curve must not prevent the tries that would expose it
        budget = EXPLORATION * self._total_seconds
        if self._explored + cost > budget:
            return 0
        self._explored = max(self._explored, budget - cost)  # no more than one try is saved up
        self._explored += cost
        return 1

    def wanted(self, survives: Sequence[float], alternative: tuple[float, float] | None = None) -> int:
        """Return how many tokens `choose` would draft if that were allowed, leaving tries aside."""
        return self._best(survives, alternative, inf)[0]

    def _best(
        self, survives: Sequence[float], alternative: tuple[float, float] | None, allowed: float
    ) -> tuple[int, float, float]:
        """Return how many tokens gain most, what they gain (or what a draft has to), and how many tokens a draft of all
        is expected to bring."""
        table, price, change, last, widths = self._table, self.rate, self._curve.change, self._last, self._widths
        tokens, seconds = 1.0, self.single + (change if widths[1] != last else 0.0)
        one, heads = self._heads[1], self._heads
        if alternative is not None and alternative[0] - price * alternative[1] > tokens - price * seconds:
            tokens, seconds = alternative
        best, gain, expected = 0, MIN_GAIN + tokens - price * seconds, 1.0
        most = (1.0 + allowed) * self.single
        for at, chance in enumerate(survives[:MAX_DRAFT], 1):
            expected += chance
            taken = table[at + 1] + min(expected * one, heads[at + 1])
            changed = change if widths[at + 1] != last else 0.0
            now = expected - price * (taken + changed)
            if now > gain and taken + 2.0 * changed <= most:
                best, gain = at, now
        return best, gain, expected

    def _untried(self, drafted: int) -> bool:
        """Return whether it is not known yet how long a decode with `drafted` drafted tokens takes."""
        return self._tries[self._nearest[drafted]] < WITNESSES

    def pays(self, model_round: tuple[float, float]) -> bool:
        """Return whether `model_round`, tokens and seconds for them, is better than a decode without drafts."""
        tokens, seconds = model_round
        return tokens - self.rate * seconds > 1.0 - self.rate * self.single

    def floors(self, rows: int = 0, seconds: float = 0.0) -> list[float]:
        """Return for every place behind `rows` drafted tokens the chance to survive below which no token there or
        later pays, if drafting one takes `seconds`."""
        price = self.rate
        return [price * (slope + seconds) for slope in self._slopes[rows:]]

    def floor(self, rows: int) -> float:
        """Return the first of `floors`: the chance below which no token behind `rows` drafted ones pays."""
        return self.rate * self._slopes[rows]

    def places(self, rows: int) -> int:
        """Return how many tokens may be drafted behind `rows` drafted ones."""
        return len(self._slopes) - rows

    def choose_additional(self, rows: int, survives: Sequence[float]) -> int:
        """Return how many of the offered tokens to draft besides `rows` that are drafted anyway; 0 where none gains
        anything."""
        table, heads, price = self._table, self._heads, self.rate
        best, gain, expected = 0, 0.0, 0.0
        for at, chance in enumerate(survives[: max(0, MAX_DRAFT - rows)], 1):
            expected += chance
            head_seconds = min(expected * heads[1], heads[rows + at + 1])
            now = expected - price * (table[rows + at + 1] - table[rows + 1] + head_seconds)
            if now > gain:
                best, gain = at, now
        return best

    def explain(self, survives: Sequence[float], chosen: int, alternative: tuple[float, float] | None = None) -> str:
        """Return in words why `choose` chose so."""
        if not survives:
            return "no draft is retrieved"
        one = self.single
        if not chosen and alternative is not None:
            return f"a retrieved token has a {survives[0]:.0%} chance: the draft model does better"
        if not chosen:
            extra = (self._table[2] - self._table[1]) / one
            return f"a draft has a {survives[0]:.0%} chance, and a second row costs {extra:.0%} of the first"
        expected = 1.0 + sum(survives[:chosen])
        cost = (self._table[chosen + 1] + self._head_seconds(chosen + 1, expected)) / one
        return f"{chosen} drafted: {expected:.1f} tokens expected in the time of {cost:.1f}"

    def learn_plain(self, rounds: int, seconds: float) -> None:
        """Learn from so many rounds without drafts, each of one token, which took `seconds` together."""
        mean, kept = seconds / rounds, _MEMORY ** (rounds - 1)
        others = (1.0 - kept) / (1.0 - _MEMORY)
        self._tokens = kept * self._tokens + others
        self._seconds = kept * self._seconds + others * mean
        self._total_seconds += seconds - mean
        self._rounds += rounds - 1
        self.learn(0, 1, mean)

    def learn(self, drafted: int | None, tokens: int, seconds: float) -> None:
        """Learn from a round with `drafted` tokens that yielded `tokens` in `seconds`. `drafted` is None if the time
        was not that of one decode."""
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._total_seconds += seconds
        last, self._last = self._last, -1
        if drafted is None or tokens > drafted + 1:  # these were several decodes
            return
        self._last = self._widths[drafted + 1]
        at = self._nearest[drafted]
        expected = self._plain[drafted + 1] + (self._curve.change if self._last != last else 0.0)
        expected += self._head_seconds(drafted + 1, tokens)
        log_error = log(max(seconds, 1e-9) / expected)
        self._tries[at] += 1.0
        self._rounds += 1
        self._last_tried[at] = self._rounds
        gap, recent = log_error - self._log_errors[at], self._recent[at]
        if abs(gap) > log(OUTLIER):  # a single outlier is an interruption
            if recent and (recent[-1] > self._log_errors[at]) != (gap > 0.0):
                recent.clear()
            recent.append(log_error)
            if len(recent) == WITNESSES:
                self._accept_shift(at)
            return
        recent.clear()
        weight = max(_MIN_WEIGHT, 1.0 / (self._tries[at] + 1.0))  # the curve itself was a try
        self._log_errors[at] += weight * gap
        if self._rounds >= self._refit_at:
            self._refit_at = self._rounds + min(self._rounds, _MAX_REFIT)
            pairs = zip(self._log_errors, self._fitted, strict=True)
            if any(abs(now - fitted) > _MIN_REFIT for now, fitted in pairs):
                self._refit()

    def _accept_shift(self, at: int) -> None:
        """Believe the latest decodes of a length; if no other length is known to be right lately, scale all of them,
        and the heads."""
        log_error, lengths = median(self._recent[at]), range(len(self._log_errors))
        self._recent[at].clear()
        late = self._rounds - _RECENT_ROUNDS
        known = [n for n in lengths if n != at and self._tries[n] >= WITNESSES and self._last_tried[n] > late]
        if any(abs(self._log_errors[n]) <= log(OUTLIER) for n in known):
            if log_error < self._log_errors[at]:  # other lengths may be overestimated as much
                self._doubt()
            self._log_errors[at] = log_error
            self._refit()
            return
        for n in lengths:
            self._recent[n].clear()
            if n in known:
                self._log_errors[n] -= log_error
            elif self._tries[n] < WITNESSES:
                self._log_errors[n], self._tries[n] = 0.0, 0.0
        self._log_errors[at] = 0.0
        self._log_scale += log_error
        self._explored *= exp(log_error)
        self._use_curve(self._given.scaled(exp(log_error)))
        self._refit()

    def _doubt(self) -> None:
        """Let some time go into tries of lengths for which there is only a doubtful curve."""
        if not self._doubtful:
            self._doubtful = True
            self._explored -= _TRIES * self.single

    def _refit(self) -> None:
        """Update the table to decodes as they are now."""
        self._fitted = list(self._log_errors)
        self._table = self._corrected(self._curve).table(self._widths)
        self._slopes = _least_slopes(self._table)


def _least_slopes(table: Sequence[float]) -> list[float]:
    """Return in `[i]` the least cost of a row, in the mean of all up to any length, behind the first token and i
    drafted."""
    seconds = np.array(table[1:])
    rows = np.arange(len(seconds))
    apart = rows[None, :] - rows[:, None]
    slopes = np.where(apart > 0, (seconds[None, :] - seconds[:, None]) / np.maximum(apart, 1), np.inf)
    least: list[float] = slopes[:-1].min(axis=1).tolist()
    return least
