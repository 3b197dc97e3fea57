"""Deterministic automata over characters: what a text may be, one state at a time.

A grammar that is made from one has a single way to read each text, whatever the pattern it came from, and constraints
on one text (a pattern, a format, a length) are the intersection of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from edgellm.errors import InvalidOption

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points from and to, inclusive, ascending and apart."""
State = TypeVar("State", bound=Hashable)

MAX_STATES = 4096  # of an automaton
_MAX_COMPARED = 150_000  # states, each time that they are compared to find equal ones


class TooLarge(InvalidOption):
    """An automaton would have more states than are allowed."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """`steps` has, for each state, code points from and to, and the state that they lead to, in ascending order and
    apart. State 0 is the first. A text may end in the states `accepting`; every state leads to one of them."""

    steps: tuple[tuple[tuple[int, int, int], ...], ...]
    accepting: frozenset[int]

    def __len__(self) -> int:
        return len(self.steps)

    def accepts(self, text: str) -> bool:
        """Return whether `text` is one of the automaton's."""
        state = 0
        for char in map(ord, text):
            found = next((to for low, high, to in self.steps[state] if low <= char <= high), None)
            if found is None:
                return False
            state = found
        return state in self.accepting

    @property
    def is_empty(self) -> bool:
        """Whether there is no text at all."""
        return not self.accepting

    def longest(self) -> int | None:
        """Return the characters of its longest text; None: there is no end to them."""
        left = [len({to for _, _, to in steps}) for steps in self.steps]
        before: list[set[int]] = [set() for _ in self.steps]
        for state, steps in enumerate(self.steps):
            for _, _, to in steps:
                before[to].add(state)
        length = [0] * len(self.steps)
        ready = [state for state, count in enumerate(left) if not count]
        for state in ready:
            for earlier in before[state]:
                length[earlier] = max(length[earlier], length[state] + 1)
                left[earlier] -= 1
                if not left[earlier]:
                    ready.append(earlier)
        return length[0] if len(ready) == len(self.steps) else None


def explore(
    start: State, step: Callable[[State], Iterable[tuple[int, int, State]]], accepts: Callable[[State], bool]
) -> Automaton:
    """Return the automaton of the states that `step` leads to from `start`, without those from which no text ends.
    `step` returns code points from and to, apart, and the state behind them.

    Raises:
        TooLarge: there are more than MAX_STATES.
    """
    numbers = {start: 0}
    states = [start]
    steps: list[list[tuple[int, int, int]]] = []
    for state in states:
        own = []
        for low, high, to in step(state):
            if to not in numbers:
                if len(states) >= MAX_STATES:
                    raise TooLarge(
                        f"A text or number of the JSON schema needs more than {MAX_STATES} states.",
                        "Simplify its pattern or its limits.",
                    )
                numbers[to] = len(states)
                states.append(to)
            own.append((low, high, numbers[to]))
        steps.append(own)
    return _smaller(steps, {number for number, state in enumerate(states) if accepts(state)})


def intersection(one: Automaton, other: Automaton) -> Automaton:
    """Return the automaton of the texts that both accept. Raises TooLarge."""

    def step(state: tuple[int, int]) -> Iterator[tuple[int, int, tuple[int, int]]]:
        for low, high, to in one.steps[state[0]]:
            for least, most, and_to in other.steps[state[1]]:
                if max(low, least) <= min(high, most):
                    yield max(low, least), min(high, most), (to, and_to)

    return explore((0, 0), step, lambda state: state[0] in one.accepting and state[1] in other.accepting)


def complement(one: Automaton, alphabet: Ranges) -> Automaton:
    """Return the automaton of the texts over `alphabet` that `one` does not accept. Raises TooLarge."""

    def step(state: int) -> Iterator[tuple[int, int, int]]:
        own = () if state < 0 else one.steps[state]
        yield from own
        for low, high in difference(alphabet, tuple((low, high) for low, high, _ in own)):
            yield low, high, -1

    return explore(0, step, lambda state: state not in one.accepting)


def limited(one: Automaton, least: int, most: int | None) -> Automaton:
    """Return the automaton of the texts of `one` with `least` to `most` characters. Raises TooLarge."""
    end = least if most is None else most

    def step(state: tuple[int, int]) -> Iterator[tuple[int, int, tuple[int, int]]]:
        if most is None or state[1] < most:
            for low, high, to in one.steps[state[0]]:
                yield low, high, (to, min(end, state[1] + 1))

    return explore((0, 0), step, lambda state: state[0] in one.accepting and state[1] >= least)


def difference(ranges: Sequence[tuple[int, int]], without: Sequence[tuple[int, int]]) -> Ranges:
    """Return the code points of `ranges` that are not in `without`; both in any order."""
    found: list[tuple[int, int]] = []
    for first, last in union(ranges):
        low = first
        for least, most in union(without):
            if most < low or least > last:
                continue
            if least > low:
                found.append((low, least - 1))
            low = most + 1
        if low <= last:
            found.append((low, last))
    return tuple(found)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the code points of all `ranges`, ascending and apart."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def _smaller(steps: Sequence[Sequence[tuple[int, int, int]]], accepting: set[int]) -> Automaton:
    """Return an automaton without states from which no text ends, and with one state for several that are equal."""
    before: list[list[int]] = [[] for _ in steps]
    for state, own in enumerate(steps):
        for _, _, to in own:
            before[to].append(state)
    alive, new = set(accepting), list(accepting)
    while new:
        for state in before[new.pop()]:
            if state not in alive:
                alive.add(state)
                new.append(state)
    if 0 not in alive:
        return Automaton(((),), frozenset())
    kept = sorted(alive)
    kinds = {state: int(state in accepting) for state in kept}
    count, compared = len(set(kinds.values())), 0
    while count < len(kept):
        compared += len(kept)
        if compared > _MAX_COMPARED:
            kinds = {state: number for number, state in enumerate(kept)}
            break
        found: dict[object, int] = {}
        kinds = {state: found.setdefault((kinds[state], _joined(steps[state], kinds)), len(found)) for state in kept}
        if len(found) == count:
            break
        count = len(found)
    else:
        kinds = {state: number for number, state in enumerate(kept)}
    return _renumbered(steps, accepting, kinds)


def _renumbered(
    steps: Sequence[Sequence[tuple[int, int, int]]], accepting: set[int], kinds: dict[int, int]
) -> Automaton:
    """Return the automaton of the `kinds` of states, numbered as they are reached from state 0."""
    example: dict[int, int] = {}
    for state, kind in kinds.items():
        example.setdefault(kind, state)
    numbers, order, made = {kinds[0]: 0}, [kinds[0]], []
    for kind in order:
        own = []
        for low, high, to in _joined(steps[example[kind]], kinds):
            if to not in numbers:
                numbers[to] = len(order)
                order.append(to)
            own.append((low, high, numbers[to]))
        made.append(tuple(own))
    return Automaton(tuple(made), frozenset(numbers[kind] for kind in order if example[kind] in accepting))


def _joined(steps: Iterable[tuple[int, int, int]], kinds: dict[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Return steps to states that are kept, by their kinds, with neighbouring code points joined."""
    found: list[tuple[int, int, int]] = []
    for low, high, to in sorted(steps):
        if (kind := kinds.get(to)) is None:
            continue
        if found and found[-1][1] + 1 == low and found[-1][2] == kind:
            found[-1] = (found[-1][0], high, kind)
        else:
            found.append((low, high, kind))
    return tuple(found)
