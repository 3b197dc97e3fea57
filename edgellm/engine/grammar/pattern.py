"""Regular expressions as JSON schemas have them (ECMA 262), as automata.

What dialects read differently is read so that the text fits all of them: `\\d` is 0 to 9, and `\\D` no digit of any
script. Look-ahead works where it stands first, as in `^(?=.*[A-Z])(?!.*x)`; what is not regular is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from edgellm.engine.grammar.automaton import Automaton, Ranges, complement, difference, explore, intersection, union
from edgellm.errors import InvalidOption

WRITABLE: Ranges = ((8, 10), (12, 13), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF))
"""The characters that strings are written with: those that JSON has as they are, or by an escape of two characters."""

_MAX_NODES, _MAX_NESTED, _MAX_WORK = 20_000, 50, 2_000_000
_REPEAT = re.compile(r"\{(\d{1,6})(,(\d{0,6}))?\}")
_DIGITS: Ranges = ((0x30, 0x39),)
_WORDS: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = ((9, 10), (12, 13), (0x20, 0x20))
_ENDS_OF_LINES: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_SURELY: dict[str, tuple[Ranges, Ranges]] = {
    # what is in the class in every dialect, and what is outside of it in every dialect
    "d": (_DIGITS, (*difference(WRITABLE, (*_DIGITS, (0x660, 0x10FFFF))), (0x3000, 0x9FFF), (0xAC00, 0xD7A3))),
    "w": (_WORDS, difference(WRITABLE, (*_WORDS, (0x80, 0x10FFFF)))),
    "s": (_SPACES, difference(WRITABLE, (
        *_SPACES, (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E), (0x2000, 0x200B),
        (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)))),
}  # fmt: skip
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_REFUSED = {
    "b": r"the word boundary \b", "B": r"the word boundary \B", "k": r"the back reference \k",
    "p": r"the class of characters \p", "P": r"the class of characters \P", "A": r"\A", "Z": r"\Z", "z": r"\z",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Chars:
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class _Edge:
    """The beginning of the text, or its end."""

    begins: bool


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


_Node: TypeAlias = _Chars | _Edge | _Sequence | _Choice | _Repeat


@lru_cache(maxsize=64)
def automaton_of(pattern: str) -> Automaton:
    """Return the automaton of the texts in which `pattern` is found.

    Raises:
        InvalidOption: it is no regular expression, or more than one can be in a grammar, or too large.
    """
    ahead, node = _Parser(pattern).parsed()
    found = _Nfa.of(node, searches=True).automaton()
    for wanted, one in ahead:
        seen = _Nfa.of(one, searches=False).automaton()
        found = intersection(found, seen if wanted else complement(seen, WRITABLE))
    return found


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text, self._at, self._depth = pattern, 0, 0

    def parsed(self) -> tuple[list[tuple[bool, _Node]], _Node]:
        """Return what must be ahead, or must not, at the beginning, and the pattern itself."""
        ahead: list[tuple[bool, _Node]] = []
        if self._text.startswith(("^(?=", "^(?!")):
            self._at = 1
            while self._text.startswith(("(?=", "(?!"), self._at):
                wanted = self._text[self._at + 2] == "="
                self._at += 3
                ahead.append((wanted, self._group()))
        node = self._choice()
        if self._at < len(self._text):
            raise self._wrong("a parenthesis is closed that was not opened")
        if ahead:
            if isinstance(node, _Choice):
                raise self._wrong("look-ahead works before one alternative only")
            node = _Sequence((_Edge(True), node))
        return ahead, node

    def _wrong(self, why: str) -> InvalidOption:
        return InvalidOption(
            f"The JSON schema's pattern {self._text[:60]!r} cannot be used: {why}.",
            "Write it as a regular one, or leave it out.",
        )

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise self._wrong("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_NESTED:
            raise self._wrong(f"it is more than {_MAX_NESTED} groups deep")
        parts = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            parts.append(self._sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._atom()
            parts.append(part if isinstance(part, _Edge) else self._repeated(part))
        return _Sequence(tuple(parts))

    def _repeated(self, part: _Node) -> _Node:
        char = self._text[self._at : self._at + 1]
        if char and char in "*+?":
            self._at += 1
            part = _Repeat(part, int(char == "+"), 1 if char == "?" else None)
        elif found := _REPEAT.match(self._text, self._at):
            self._at = found.end()
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
            if most is not None and most < least:
                raise self._wrong(f"{found[0]} is no range")
            part = _Repeat(part, least, most)
        else:
            return part
        if self._text.startswith("?", self._at):  # takes less first, which makes no difference to whether it is found
            self._at += 1
        if self._text[self._at : self._at + 1] in ("*", "+", "?"):
            raise self._wrong("a repetition is repeated")
        return part

    def _atom(self) -> _Node:
        char = self._next()
        match char:
            case "^" | "$":
                return _Edge(char == "^")
            case "(":
                return self._opened()
            case "[":
                return self._class()
            case ".":
                return _Chars(difference(WRITABLE, _ENDS_OF_LINES))
            case "\\":
                char = self._next()
                if char.lower() in _SURELY:
                    return _Chars(_SURELY[char.lower()][char.isupper()])
                return _Chars(_only(self._escaped(char)))
            case "*" | "+" | "?":
                raise self._wrong(f"{char} has nothing to repeat")
        return _Chars(_only(ord(char)))

    def _opened(self) -> _Node:
        if self._text.startswith("?", self._at):
            for opening, name in (("?=", "look-ahead within it"), ("?!", "look-ahead within it"),
                                  ("?<=", "look-behind"), ("?<!", "look-behind")):  # fmt: skip
                if self._text.startswith(opening, self._at):
                    raise self._wrong(f"{name}, ({opening}…), is not regular")
            found = re.compile(r"\?(:|P?<[A-Za-z_]\w*>)").match(self._text, self._at)
            if found is None:
                raise self._wrong(f"({self._text[self._at : self._at + 3]}…) is not supported")
            self._at = found.end()
        return self._group()

    def _group(self) -> _Node:
        """Return what stands up to the closing parenthesis."""
        inside = self._choice()
        if self._next() != ")":
            raise self._wrong("a parenthesis is not closed")
        return inside

    def _escaped(self, char: str) -> int:
        """Return the character that stands for a backslash and `char`."""
        if char in _REFUSED:
            raise self._wrong(f"{_REFUSED[char]} is not supported")
        if char in "123456789":
            raise self._wrong(f"the back reference \\{char} is not regular")
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in "xuc":
            found = re.compile({"x": r"([0-9A-Fa-f]{2})", "u": r"([0-9A-Fa-f]{4})|\{([0-9A-Fa-f]{1,6})\}",
                                "c": r"([A-Za-z])"}[char]).match(self._text, self._at)  # fmt: skip
            if found is None:
                raise self._wrong(f"\\{char} is not complete")
            self._at = found.end()
            return ord(found[1]) % 32 if char == "c" else min(int(found[found.lastindex or 1], 16), 0x10FFFF)
        if char.isalnum():
            raise self._wrong(f"\\{char} is not known")
        return ord(char)

    def _class(self) -> _Chars:
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while (char := self._next()) != "]":
            low = self._member(char, ranges, negated)
            if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member(self._next(), ranges, negated)
                if low is None or high is None:  # a class at one end: the hyphen is itself
                    ranges.extend((code, code) for code in (ord("-"), low, high) if code is not None)
                elif high < low:
                    raise self._wrong("a range of characters ends before it begins")
                else:
                    ranges.append((low, high))
            elif low is not None:
                ranges.append((low, low))
        outside = difference(((0, 0x10FFFF),), ranges)
        return _Chars(difference(WRITABLE, union(ranges) if negated else outside))

    def _member(self, char: str, ranges: list[tuple[int, int]], negated: bool) -> int | None:
        """Return a character of a class; None where it was a class itself, which is then in `ranges`."""
        if char != "\\":
            return ord(char)
        char = self._next()
        if char == "b":
            return 8
        if char.lower() not in _SURELY:
            return ord("-") if char == "-" else self._escaped(char)
        inside, outside = _SURELY[char.lower()][:: -1 if char.isupper() else 1]
        ranges.extend(difference(((0, 0x10FFFF),), outside) if negated else inside)
        return None


def _only(code: int) -> Ranges:
    return tuple((code, code) for low, high in WRITABLE if low <= code <= high)


@dataclass(slots=True)
class _Nfa:
    """An automaton with several next states. The first state is 0; `end` is that in which the pattern was found."""

    free: list[list[int]] = field(default_factory=lambda: [[]])
    edges: list[list[tuple[bool, int]]] = field(default_factory=lambda: [[]])
    chars: list[list[tuple[Ranges, int]]] = field(default_factory=lambda: [[]])
    end: int = 0

    @classmethod
    def of(cls, node: _Node, *, searches: bool) -> _Nfa:
        """Return that of the texts in which `node` is found; unless `searches`, at the beginning."""
        made = cls()
        if searches:
            made.chars[0].append((WRITABLE, 0))
        start = made._new()
        made.free[0].append(start)
        made.end = made._add(node, start)
        made.chars[made.end].append((WRITABLE, made.end))
        return made

    def _new(self) -> int:
        if len(self.free) >= _MAX_NODES:
            raise InvalidOption("A pattern of the JSON schema is too large.", "Simplify it, or repeat less in it.")
        for one in (self.free, self.edges, self.chars):
            one.append([])
        return len(self.free) - 1

    def _add(self, node: _Node, start: int) -> int:
        """Add `node` behind the state `start`, and return the state behind it."""
        match node:
            case _Chars(ranges):
                end = self._new()
                self.chars[start].append((ranges, end))
            case _Edge(begins):
                end = self._new()
                self.edges[start].append((begins, end))
            case _Sequence(parts):
                end = start
                for part in parts:
                    end = self._add(part, end)
            case _Choice(parts):
                end = self._new()
                for part in parts:
                    own = self._new()
                    self.free[start].append(own)
                    self.free[self._add(part, own)].append(end)
            case _Repeat(part, least, most):
                end = self._add_repeat(part, least, most, start)
        return end

    def _add_repeat(self, part: _Node, least: int, most: int | None, start: int) -> int:
        for _ in range(least):
            start = self._add(part, start)
            self._new()  # what is empty counts, too: a pattern must not take long to read
        end = self._new()
        self.free[start].append(end)
        if most is None:
            again = self._new()
            self.free[start].append(again)
            last = self._add(part, again)
            self.free[last] += [again, end]
        else:
            for _ in range(most - least):
                start = self._add(part, start)
                self.free[start].append(end)
                self._new()
        return end

    def automaton(self) -> Automaton:
        """Return the automaton that accepts the same texts. Raises InvalidOption where that is too much work."""
        work = 0

        def closed(states: Iterable[int], *, begins: bool, ends: bool) -> frozenset[int]:
            nonlocal work
            seen, new = set(states), list(states)
            while new:
                state = new.pop()
                work += 1
                reached = [to for first, to in self.edges[state] if (begins if first else ends)]
                for to in (*self.free[state], *reached):
                    if to not in seen:
                        seen.add(to)
                        new.append(to)
            if work > _MAX_WORK:
                raise InvalidOption("A pattern of the JSON schema is too ambiguous.", "Simplify it.")
            return frozenset(seen)

        def step(state: tuple[frozenset[int], bool]) -> Iterator[tuple[int, int, tuple[frozenset[int], bool]]]:
            nonlocal work
            own = [(low, high, to) for one in state[0] for ranges, to in self.chars[one] for low, high in ranges]
            made: dict[frozenset[int], frozenset[int]] = {}
            bounds = sorted({cut for low, high, _ in own for cut in (low, high + 1)})
            for low, beyond in pairwise(bounds):
                work += len(own)
                if targets := frozenset(to for least, most, to in own if least <= low <= most):
                    if targets not in made:
                        made[targets] = closed(targets, begins=False, ends=False)
                    yield low, beyond - 1, (made[targets], False)

        def accepts(state: tuple[frozenset[int], bool]) -> bool:
            return self.end in closed(state[0], begins=state[1], ends=True)

        return explore((closed([0], begins=True, ends=False), True), step, accepts)
