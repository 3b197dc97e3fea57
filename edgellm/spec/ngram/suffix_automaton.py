"""A suffix automaton over token ids, built online, with counts (Blumer et al. 1985; CoordGen, section 4.1).

Each state represents the substrings that end at the same positions. The transitions of the state of a text's longest
indexed suffix are the tokens that followed it, with their counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ROOT = 0
_NONE = -1
DEEPEST = 24
"""Suffix links that a token's count is carried along: deeper substrings repeat so often that the exact number no longer
matters, and the bound keeps a token's work constant."""

BYTES_A_TOKEN = 160
"""Bytes of memory per token of a text: words take 120 to 150, random tokens up to 160."""


class SuffixAutomaton:
    """A suffix automaton with amortised constant work per token, and at most two states per token.

    Nearly every state has one transition, kept in two flat arrays; the others have a dictionary for the rest.
    """

    __slots__ = ("_first", "_last", "_more", "_to", "count", "end", "length", "link")

    def __init__(self) -> None:
        self.length = array("i", [0])
        """Length of the longest substring of each state."""
        self.link = array("i", [_NONE])
        """For each state the state of its longest suffix that occurs in more places."""
        self.count = array("i", [0])
        """Number of places where the substrings of each state occur."""
        self.end = array("i", [_NONE])
        """For each state the place of the last token of its substrings' first occurrence."""
        self._first = array("i", [_NONE])  # the token by which a state was left first (`_to`: its target)
        self._to = array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}
        self._last = ROOT

    def __len__(self) -> int:
        """Return the number of tokens indexed."""
        return self.length[self._last]

    def extend(self, tokens: Iterable[int]) -> None:
        """Index `tokens` behind those already indexed. Ids are not negative."""
        length, link, count, ends = self.length, self.link, self.count, self.end
        first, to, more = self._first, self._to, self._more
        last, new = self._last, len(length)
        at = length[last]
        for token in tokens:
            length.append(at + 1)
            link.append(ROOT)
            count.append(0)
            ends.append(at)
            first.append(_NONE)
            to.append(_NONE)
            state, target = last, _NONE
            while state != _NONE:
                known = first[state]
                if known == token:
                    target = to[state]
                    break
                if known == _NONE:
                    first[state], to[state] = token, new
                elif (others := more.get(state)) is None:
                    more[state] = {token: new}
                elif (target := others.get(token, _NONE)) != _NONE:
                    break
                else:
                    others[token] = new
                state = link[state]
            if target != _NONE:
                link[new] = target if length[target] == length[state] + 1 else self._clone(state, token, target)
            state, left = new, DEEPEST
            while state != ROOT and left:
                count[state] += 1
                state, left = link[state], left - 1
            last, at, new = new, at + 1, len(length)
        self._last = last

    def _clone(self, state: int, token: int, target: int) -> int:
        """Split from `target` the part that is reached from `state`, which now occurs in more places than the rest;
        return the new state."""
        length, link, first, to, more = self.length, self.link, self._first, self._to, self._more
        clone = len(length)
        length.append(length[state] + 1)
        link.append(link[target])
        self.count.append(self.count[target])
        self.end.append(self.end[target])
        first.append(first[target])
        to.append(to[target])
        if target in more:
            more[clone] = more[target].copy()
        link[target] = clone
        while state != _NONE:
            if first[state] == token:
                if to[state] != target:
                    break
                to[state] = clone
            elif (others := more.get(state)) is not None and others.get(token) == target:
                others[token] = clone
            else:
                break
            state = link[state]
        return clone

    @property
    def seen(self) -> int:
        """Return the state of the longest suffix of the indexed tokens that also occurs earlier."""
        return max(ROOT, self.link[self._last])

    def step(self, state: int, token: int) -> int:
        """Return the state that `token` leads to from `state`; -1 if it has never followed."""
        if self._first[state] == token:
            return self._to[state]
        others = self._more.get(state)
        return _NONE if others is None else others.get(token, _NONE)

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Return the longest match (state, length) of a text with `token` behind it, from the text's own longest
        match."""
        while (to := self.step(state, token)) == _NONE:
            if state == ROOT:
                return ROOT, 0
            state = self.link[state]
            matched = self.length[state]
        return to, matched + 1

    def likeliest(self, state: int) -> tuple[int, int, int]:
        """Return the token that has followed most often (of equals, the first to follow), the state it leads to, and
        how often; (-1, -1, 0) at the end of all indexed tokens."""
        token, to = self._first[state], self._to[state]
        if token == _NONE:
            return _NONE, _NONE, 0
        count = self.count
        most = count[to]
        for other, target in self._more.get(state, _EMPTY).items():
            if count[target] > most:
                token, to, most = other, target, count[target]
        return token, to, most


_EMPTY: dict[int, int] = {}
