"""Drafts by analogy: the reply to a similar prompt, with its copied words replaced by those of this prompt.

A reply to "… meet at the castle? Nelly" differs from the one to "… meet at the ferry? Agnes" only in the words taken
from the prompt. For every past reply, copied tokens and their surroundings in its prompt are known; the words in the
same surroundings of this prompt replace them. Suffix matching alone ends at every name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgellm.spec.ngram.sources import NOTHING, Cursor, DraftSource, Offer

MAX_PROMPTS = 16
"""Past prompts with a pair of tokens, at most: a more common pair does not tell which prompt is similar."""
_CONTEXT = 4  # tokens before a copied run that are compared
_LONGER = 32  # tokens by which a run of this prompt may be longer than that of the past one
_SKIPPED = 12  # tokens of the past reply that may be left out at once

Places = Mapping[int, Sequence[int]]
"""The places of each token in a prompt."""


def places_of(prompt: Sequence[int]) -> dict[int, list[int]]:
    """Return the places of each token in a prompt."""
    found: dict[int, list[int]] = {}
    for at, token in enumerate(prompt):
        found.setdefault(token, []).append(at)
    return found


def runs(prompt: Sequence[int], reply: Sequence[int]) -> list[tuple[int, int]]:
    """Return `reply` as runs, each the longest that can be copied: its place in `prompt`, and its length; (-1, 1) for a
    token that was not copied."""
    places, found, at = places_of(prompt), list[tuple[int, int]](), 0
    while at < len(reply):
        best, length = -1, 0
        for place in places.get(reply[at], ()):
            n = 1
            while at + n < len(reply) and place + n < len(prompt) and prompt[place + n] == reply[at + n]:
                n += 1
            if n >= length:
                best, length = place, n
        found.append((best, max(1, length)))
        at += found[-1][1]
    return found


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that are expected next. If they are `copied` from the prompt, their run ends before the token `stop`, as
    the past one did, and a past run of `length` tokens was as long."""

    tokens: Sequence[int]
    copied: bool = False
    stop: int = -1
    length: int = 0


@dataclass(frozen=True, slots=True)
class PastReply:
    """A past conversation, with the `runs` of its reply."""

    prompt: Sequence[int]
    reply: Sequence[int]
    runs: Sequence[tuple[int, int]]


class Analogy(DraftSource):
    """A source: the past conversation with the most similar prompt."""

    def __init__(self) -> None:
        self._past: list[PastReply] = []
        self._by_pair: dict[tuple[int, int], list[int]] = {}
        self._replay: ReplayCursor | None = None

    def add(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        """Add a finished conversation."""
        for pair in set(pairwise(prompt)):
            self._by_pair.setdefault(pair, []).append(len(self._past))
        self._past.append(PastReply(tuple(prompt), tuple(reply), runs(prompt, reply)))

    def begin(self, prompt: Sequence[int]) -> None:
        overlap: Counter[int] = Counter()
        for pair in set(pairwise(prompt)):
            prompts = self._by_pair.get(pair, ())
            if len(prompts) <= MAX_PROMPTS:
                overlap.update(prompts)
        best = max(overlap, key=lambda at: (overlap[at], at), default=-1)
        self._replay = None
        if best >= 0:
            prompt, places = tuple(prompt), places_of(prompt)
            self._replay = ReplayCursor(adapted(self._past[best], prompt, places), prompt, places)

    @property
    def matched(self) -> int:
        return 0 if self._replay is None or self._replay.finished else self._replay.followed

    def extend(self, tokens: Sequence[int]) -> None:
        if self._replay is not None:
            for token in tokens:
                self._replay.advance(token)

    def cursor(self) -> Cursor | None:
        return None if self._replay is None or self._replay.finished else self._replay.copy()


def adapted(past: PastReply, prompt: Sequence[int], places: Places) -> list[Segment]:
    """Return a past reply with the words of this prompt."""
    found, at = list[Segment](), 0
    for place, length in past.runs:
        tokens = past.reply[at : at + length]
        if place < 0:
            found.append(Segment(tokens))
        else:
            stop = past.prompt[place + length] if place + length < len(past.prompt) else -1
            start = _counterpart(past.prompt, place, prompt, places)
            found.append(Segment(tokens if start < 0 else _run(prompt, start, stop, length), True, stop, length))
        at += length
    return found


def _counterpart(past: Sequence[int], place: int, prompt: Sequence[int], places: Places) -> int:
    """Return where the words begin in this prompt that stand as those at `place` of the past one: behind the most of
    the same tokens; -1 if nowhere."""
    best, most = -1, 0
    for before in places.get(past[place - 1], ()) if place else ():
        same = 1
        while same < min(_CONTEXT, place, before + 1) and prompt[before - same] == past[place - 1 - same]:
            same += 1
        if same >= most and before + 1 < len(prompt):
            best, most = before + 1, same
    return best


def _run(prompt: Sequence[int], start: int, stop: int, length: int) -> Sequence[int]:
    """Return the words of a prompt from `start` on, up to the token `stop`."""
    end = min(len(prompt), start + length + _LONGER)
    return prompt[start : next((at for at in range(start + 1, end) if prompt[at] == stop), end)]


class ReplayCursor:
    """A cursor: a place in the reply that is expected."""

    __slots__ = ("_at", "_now", "_offset", "_places", "_prompt", "_segments", "followed")

    def __init__(self, segments: Sequence[Segment], prompt: Sequence[int], places: Places) -> None:
        self._segments, self._prompt, self._places = segments, prompt, places
        self._at = self._offset = self.followed = 0
        self._now = segments[0] if segments else Segment(())

    def copy(self) -> ReplayCursor:
        other = ReplayCursor(self._segments, self._prompt, self._places)
        other._at, other._offset, other._now, other.followed = self._at, self._offset, self._now, self.followed
        return other

    @property
    def finished(self) -> bool:
        """Return whether nothing more will be offered."""
        return self._at >= len(self._segments)

    def offer(self) -> Offer:
        if self.finished:
            return NOTHING
        return self._now.tokens[self._offset], self.followed, 0.5 if self._now.copied and self._offset else 1.0

    def advance(self, token: int) -> None:
        if self.finished:
            return
        now, following = self._now, self._segments[self._at + 1 : self._at + 2]
        if now.tokens[self._offset] == token:
            self._go(self._at, self._offset + 1)
            self.followed += 1
        elif now.copied and following and following[0].tokens[0] == token:  # The run is shorter than expected.
            self._go(self._at + 1, 1)
            self.followed += 1
        else:
            self.followed = 0
            if not (now.copied and self._copies_elsewhere(now, token)):
                self._resume(token)

    def _go(self, at: int, offset: int) -> None:
        """Go to a place of a segment, or to the next one if it ends there."""
        if at != self._at:
            self._now = self._segments[at]
        self._at, self._offset = at, offset
        if offset >= len(self._now.tokens):
            self._at, self._offset = at + 1, 0
            self._now = self._segments[at + 1] if at + 1 < len(self._segments) else Segment(())

    def _copies_elsewhere(self, now: Segment, token: int) -> bool:
        """Follow a run that is copied from another place than expected, if there is one."""
        if not (places := self._places.get(token)):
            return False
        self._now = Segment(_run(self._prompt, places[-1], now.stop, now.length), True, now.stop, now.length)
        self._go(self._at, 1)
        return True

    def _resume(self, token: int) -> None:
        """Go on behind the next occurrence of a token: words were left out. Stay without one."""
        left, at, offset = _SKIPPED, self._at, self._offset
        tokens = self._now.tokens
        while left > 0 and at < len(self._segments):
            for number in range(offset, min(len(tokens), offset + left)):
                if tokens[number] == token:
                    self._go(at, number + 1)
                    return
            left, at, offset = left - len(tokens) + offset, at + 1, 0
            tokens = self._segments[at].tokens if at < len(self._segments) else ()
