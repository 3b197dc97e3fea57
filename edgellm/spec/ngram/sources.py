"""Sources of retrieved drafts (CoordGen, section 3.1): the context with the reply so far, and past conversations.

A draft model often knows how an answer continues but not the name, number or time in it. There, the token that followed
the same words in the context is right more often than its own.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from edgellm.engine import common_prefix
from edgellm.spec.types import NO_IDS, Chunk, Expected, Ids, Verdict

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


class Guess(NamedTuple):
    """A `token` that may come next (-1: none), behind a match of `matched` tokens, and the `share` of the match's
    places where the token follows (or the token's probability by the model)."""

    token: int
    matched: int
    share: float


NOTHING = Guess(_NONE, 0, 0.0)
SEPARATOR = -2
"""The separator of two conversations: no token of a model, so that nothing is matched or drafted across it."""


class Cursor(Protocol):
    """A source read forward from the end of the reply, over tokens that are drafted and not yet accepted."""

    def offer(self) -> Guess: ...

    def advance(self, token: int) -> None:
        """Move on over `token`, which this source or another has drafted."""
        ...


class DraftSource:
    """A source of drafts, for one reply at a time; this base class offers nothing."""

    expect: Callable[[Expected], None] | None = None
    """A callback for the verifier's next-token predictions at positions of the prompt, if the source wants them."""

    @property
    def matched(self) -> int:
        """Return how many of the latest tokens have occurred before the offered token."""
        return 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a reply to `prompt`."""
        return

    def extend(self, tokens: Sequence[int]) -> None:
        """Extend the source by committed `tokens`."""
        return

    def cursor(self) -> Cursor | None:
        """Return a cursor at the end of the reply; None where nothing is offered."""
        return None

    def observe(self, chunk: Chunk, verdict: Verdict) -> None:
        """Observe the verdict on a chunk, whose tokens are about to be committed."""
        return


class ListCursor:
    """A cursor that offers `tokens` one after the other; tokens of other sources in between do not end it. The first
    one is offered as if `matched` tokens before it had occurred."""

    __slots__ = ("_at", "_matched", "_tokens")

    def __init__(self, tokens: Sequence[int], matched: int) -> None:
        self._tokens, self._matched, self._at = tokens, matched, 0

    def offer(self) -> Guess:
        if self._at >= len(self._tokens):
            return NOTHING
        return Guess(self._tokens[self._at], self._matched + self._at, 1.0)

    def advance(self, token: int) -> None:
        if self._at < len(self._tokens) and token == self._tokens[self._at]:
            self._at += 1


class AutomatonCursor:
    """A cursor on the likeliest continuation of the longest match; at its end, of a shorter one."""

    __slots__ = ("_automaton", "_matched", "_offered", "_open", "_state", "_to")

    def __init__(self, automaton: SuffixAutomaton, state: int, matched: int, open_end: int = 0) -> None:
        """Start from `state`; `open_end` is 1 if the match also ends the indexed text, a place without continuation."""
        self._automaton, self._state, self._matched, self._open = automaton, state, matched, open_end
        self._offered, self._to = -1, (0, 0)  # offered token, and the state after it

    def offer(self) -> Guess:
        automaton, state, matched = self._automaton, self._state, self._matched
        while matched > 0:
            token, to, count = automaton.likeliest(state)
            if token >= 0:
                self._offered, self._to = token, (to, matched + 1)
                return Guess(token, matched, count / max(count, automaton.count[state] - self._open))
            if token == SEPARATOR:
                return NOTHING
            state = automaton.link[state]
            matched = automaton.length[state]
        return NOTHING

    def advance(self, token: int) -> None:
        if token == self._offered:
            self._state, self._matched = self._to
        else:
            self._state, self._matched = self._automaton.follow(self._state, self._matched, token)
        self._offered, self._open = -1, 0


class ContextIndex(DraftSource):
    """The prompt and the reply so far. A prompt that continues the last text is not indexed again."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.text: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        known = len(self.text)
        if len(prompt) < known or list(prompt[:known]) != self.text:
            self.automaton, self.text, known = SuffixAutomaton(), [], 0
        self.extend(prompt[known:])

    @property
    def matched(self) -> int:
        return self.automaton.length[self.automaton.seen]

    def extend(self, tokens: Sequence[int]) -> None:
        self.automaton.extend(tokens)
        self.text += tokens

    def cursor(self) -> AutomatonCursor:
        automaton = self.automaton
        return AutomatonCursor(automaton, automaton.seen, automaton.length[automaton.seen], 1)


PROMPT_TAIL = 16
"""Tokens of a prompt that go before a reply into the history: a prompt with the same ending leads to that reply."""


class HistoryIndex(DraftSource):
    """Past conversations: the end of each prompt, and its reply."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.state, self._matched = ROOT, 0  # the longest end of the reply that occurs in the past

    def add(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        """Index a conversation that is over."""
        self.automaton.extend([*prompt[-PROMPT_TAIL:], *reply, SEPARATOR])

    def begin(self, prompt: Sequence[int]) -> None:
        self.state, self._matched = ROOT, 0
        self.extend(prompt[-PROMPT_TAIL:])
        if self._matched < PROMPT_TAIL:  # It may be no more than the end of the chat template, which every prompt has.
            self.state, self._matched = ROOT, 0

    def extend(self, tokens: Sequence[int]) -> None:
        follow = self.automaton.follow
        for token in tokens:
            self.state, self._matched = follow(self.state, self._matched, token)

    @property
    def matched(self) -> int:
        return self._matched

    def cursor(self) -> Cursor | None:
        return AutomatonCursor(self.automaton, self.state, self._matched) if len(self.automaton) else None


MIN_MATCH = 2
"""Minimum length of a context match that counts against the model; a single token is hardly ever right."""
_MIN_GAIN = 0.1  # share of copied tokens; a smaller gain in right tokens is chance


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A token at which the context differed from the model: the model's confidence, and which of both was right."""

    confidence: float
    draft_right: bool
    context_right: bool


class ContextLookup:
    """A lookup in one text: a prompt, and the reply to it so far."""

    def __init__(self, prompt: Ids) -> None:
        """Begin with `prompt` (n,)."""
        self._context = ContextIndex()
        self._context.begin(prompt.tolist())
        self._tail = NO_IDS  # the part of the last prefix that is not indexed

    def cursor(self, prefix: Ids, committed: bool = True) -> Cursor:
        """Return a cursor at the end of `prefix` (n,), which begins with the prompt.

        `committed`: it is the reply so far, perhaps with a draft to follow. What it shares with the prefix of the last
        such call is indexed; the rest is only read.
        """
        context = self._context
        tail = prefix[len(context.text) :]
        if committed:
            common = common_prefix(tail, self._tail)
            context.extend(tail[:common].tolist())
            self._tail = tail = tail[common:]
        cursor = context.cursor()
        for token in tail.tolist():
            cursor.advance(token)
        return cursor


def dissents(chunk: Chunk) -> list[int]:
    """Return the places where the context has another token than the draft."""
    return [
        at for at, (token, drafted) in enumerate(zip(chunk.ids.tolist(), chunk.drafted, strict=False))
        if drafted.offered not in (-1, token) and drafted.matched >= MIN_MATCH
    ]  # fmt: skip


def disagreements(chunk: Chunk, verdict: Verdict) -> list[Disagreement]:
    """Return the judged tokens at which the context differed from the model's draft."""
    truth = [*chunk.ids[: verdict.accepted].tolist(), *verdict.tokens[:1].tolist()]
    return [
        Disagreement(
            float(chunk.confidence[at]), bool(chunk.ids[at] == truth[at]), chunk.drafted[at].offered == truth[at]
        )
        for at in dissents(chunk) if at < len(truth)
    ]  # fmt: skip


def lookup_threshold(seen: Sequence[Disagreement]) -> float:
    """Return the confidence below which the context's token is right more often than the model's, in steps of 0.05; 0.0
    if nowhere."""
    confidence = np.array([each.confidence for each in seen])
    gains = np.array([float(each.context_right) - float(each.draft_right) for each in seen])
    best, gained = 0.0, 0.0
    for step in (at / 20.0 for at in range(1, 20)):
        below = confidence < step
        gain = float(gains[below].sum())
        if gain > gained and gain > _MIN_GAIN * float(below.sum()):
            best, gained = step, gain
    return best
