"""Numbers between bounds, and multiples of a number, as automata over the characters that they are written with.

They are written without an exponent, and with so few digits (15 that count) that two texts of different values are
different binary numbers, too: a bound holds for the text and for the number that a client reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

from edgellm.engine.grammar.automaton import Automaton, explore, intersection

_DIGITS = 15
_MAX_DIGITS = 30  # of whole numbers, whose bounds may be longer
_Step: TypeAlias = tuple[int, int, Any]


@dataclass(frozen=True, slots=True)
class NumberBound:
    """A number that others are above or below of; `open`: itself not among them."""

    value: Decimal
    open: bool


@dataclass(frozen=True, slots=True)
class _Limit:
    """What a number without its sign is compared with: the digits before and behind the point, without zeros at their
    ends, and the results (-1: less, 0: equal, 1: more) that are wanted."""

    whole: str
    fraction: str
    wanted: tuple[int, ...]

    @classmethod
    def of(cls, value: Decimal, *wanted: int) -> _Limit:
        whole, _, fraction = f"{abs(value):f}".partition(".")  # a zero may have a sign
        return cls(whole.lstrip("0") or "0", fraction.rstrip("0"), wanted)

    def within(self, seen: int, digit: int, number: int) -> int:
        """Return the comparison after the `number`th digit before the point, where it was `seen` before."""
        if number > len(self.whole):
            return 1
        return seen or _sign(digit - int(self.whole[number - 1]))

    def at_point(self, seen: int, digits: int) -> int:
        """Return the comparison of all the `digits` before the point."""
        return -1 if digits < len(self.whole) else seen

    def behind(self, seen: int, digit: int, number: int) -> int:
        """Return the comparison after the `number`th digit behind the point."""
        own = int(self.fraction[number - 1]) if number <= len(self.fraction) else 0
        return seen or _sign(digit - own)

    def holds(self, seen: int, digits: int) -> bool:
        """Return whether a number may end with so many `digits` behind the point."""
        return (-1 if not seen and digits < len(self.fraction) else seen) in self.wanted


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _limits(low: NumberBound | None, high: NumberBound | None, negative: bool) -> list[_Limit] | None:
    """Return the limits of numbers of one sign, without the sign; None: there are no such numbers. There is no -0."""
    if negative:
        low, high = (_negated(bound) for bound in (high, low))
    zero = Decimal(0)
    if high is not None and (high.value < 0 or (high.value == 0 and (high.open or negative))):
        return None
    found = [_Limit.of(zero, 1)] if negative else []
    if high is not None:
        found.append(_Limit.of(high.value, *((-1,) if high.open else (-1, 0))))
    if low is not None and (low.value > 0 or (low.value == 0 and low.open)):
        found.append(_Limit.of(low.value, *((1,) if low.open else (0, 1))))
    return found


def _negated(bound: NumberBound | None) -> NumberBound | None:
    return None if bound is None else NumberBound(-bound.value, bound.open)


@dataclass(frozen=True, slots=True)
class _Read:
    """What has been read of a number: digits before the point, those behind it (-1: no point yet) while any comparison
    is open, how many may follow, and the comparisons."""

    negative: bool
    whole: int
    zero: bool
    fraction: int
    left: int
    seen: tuple[int, ...]


def between(low: NumberBound | None, high: NumberBound | None, *, whole: bool) -> Automaton:
    """Return the automaton of the numbers from `low` to `high`; `whole`: those without a point. Raises TooLarge."""
    given = [len(_Limit.of(abs(bound.value)).whole) for bound in (low, high) if bound is not None]
    digits = min(_MAX_DIGITS, max([_DIGITS, *given])) if whole else _DIGITS
    made = _Numbers(_limits(low, high, False), _limits(low, high, True), digits, whole)
    return explore("", made.step, made.accepts)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers by the limits of those at or above 0, and of those below."""

    positive: list[_Limit] | None
    negative: list[_Limit] | None
    digits: int
    whole: bool

    def step(self, state: str | _Read) -> Iterator[_Step]:
        """Yield the next characters, and what has been read with them. The first states are "" and "-"."""
        if isinstance(state, str):
            yield from self._first(state == "-")
            if not state and self.negative is not None:
                yield ord("-"), ord("-"), "-"
        elif state.fraction < 0:
            yield from self._before_point(state)
        elif state.left:
            for digit in range(10):
                number = state.fraction + 1
                seen = tuple(limit.behind(seen, digit, number) for limit, seen in self._pairs(state))
                to = _Read(state.negative, 0, False, number if 0 in seen else 1, state.left - 1, seen)
                yield ord("0") + digit, ord("0") + digit, to

    def _first(self, negative: bool) -> Iterator[_Step]:
        limits = self.negative if negative else self.positive
        for digit in range(10 if limits is not None else 0):
            seen = tuple(limit.within(0, digit, 1) for limit in limits or ())
            yield ord("0") + digit, ord("0") + digit, _Read(negative, 1, digit == 0, -1, self.digits - 1, seen)

    def _before_point(self, state: _Read) -> Iterator[_Step]:
        if not state.left:
            return
        if not self.whole:
            seen = tuple(limit.at_point(seen, state.whole) for limit, seen in self._pairs(state))
            yield ord("."), ord("."), _Read(state.negative, 0, False, 0, state.left, seen)
        for digit in range(0 if state.zero else 10):
            number = state.whole + 1
            seen = tuple(limit.within(seen, digit, number) for limit, seen in self._pairs(state))
            yield ord("0") + digit, ord("0") + digit, _Read(state.negative, number, False, -1, state.left - 1, seen)

    def accepts(self, state: str | _Read) -> bool:
        """Return whether a number may end there."""
        if isinstance(state, str) or not state.fraction:
            return False
        if state.fraction > 0:
            return all(limit.holds(seen, state.fraction) for limit, seen in self._pairs(state))
        return all(limit.holds(limit.at_point(seen, state.whole), 0) for limit, seen in self._pairs(state))

    def _pairs(self, state: _Read) -> list[tuple[_Limit, int]]:
        return list(zip((self.negative if state.negative else self.positive) or (), state.seen, strict=True))


def multiples(of: Decimal) -> Automaton:
    """Return the automaton of the multiples of a number above 0, with at most its digits behind the point. Raises
    TooLarge."""
    places = max(0, -int(of.normalize().as_tuple().exponent))
    unit = int(of.scaleb(places))

    def step(state: tuple[int, int] | str) -> Iterator[_Step]:
        if state == "":
            yield ord("-"), ord("-"), "-"
        rest, behind = (0, -1) if isinstance(state, str) else state
        if not isinstance(state, str) and behind < 0 and places:
            yield ord("."), ord("."), (rest, 0)
        if behind < places:
            for digit in range(10):
                yield ord("0") + digit, ord("0") + digit, ((rest * 10 + digit) % unit, behind + (behind >= 0))

    def accepts(state: tuple[int, int] | str) -> bool:
        if isinstance(state, str) or not state[1]:
            return False
        return state[0] * int(10 ** (places - max(0, state[1]))) % unit == 0

    return explore("", step, accepts)


def numbers(low: NumberBound | None, high: NumberBound | None, of: Sequence[Decimal], *, whole: bool) -> Automaton:
    """Return the automaton of the numbers from `low` to `high` that are multiples of each of `of`; `whole`: those
    without a point. Raises TooLarge."""
    found = between(low, high, whole=whole)
    for one in of:
        found = intersection(found, multiples(one))
    return found
