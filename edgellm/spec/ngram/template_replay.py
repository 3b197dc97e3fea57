"""Drafts by analogy: the reply to a similar prompt, with what it copied from there copied from here.

A reply to "… meet at the castle? Nelly" is like the one to "… meet at the ferry? Agnes" but for words each took from
its prompt. For every past reply it is known which tokens were copied, and what stood before and behind them in its
prompt; the words in the same surroundings here take their place. Suffix matching alone loses the thread at every name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgellm.spec.ngram.sources import NOTHING, SILENT, Cursor, Offer

COMMON = 16
"""A pair of tokens that occurs in more past prompts than this says nothing about which of them is similar."""
LOOK = 4
"""Tokens before a copied run that are compared."""
_END = -1


@dataclass(frozen=True, slots=True)
class PastReply:
    """A past conversation: `origins[i]` is where in `prompt` the run that token i of `reply` belongs to was copied
    from, and how many tokens of the run are still to come, this one included; (-1, 1) for a token of the reply's
    own."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    origins: tuple[tuple[int, int], ...]


def origins(prompt: Sequence[int], reply: Sequence[int]) -> list[tuple[int, int]]:
    """Return which tokens of `reply` were copied from `prompt`, as `PastReply` has them: always the longest run."""
    places: dict[int, list[int]] = {}
    for at, token in enumerate(prompt):
        places.setdefault(token, []).append(at)
    found: list[tuple[int, int]] = []
    while len(found) < len(reply):
        at = len(found)
        best, length = -1, 0
        for place in places.get(reply[at], ()):
            n = 1
            while at + n < len(reply) and place + n < len(prompt) and prompt[place + n] == reply[at + n]:
                n += 1
            if n >= length:
                best, length = place, n
        found += [(best + i, length - i) for i in range(length)] if length else [(-1, 1)]
    return found


class Analogy:
    """A source: one past conversation, the one whose prompt has most in common with this one."""

    def __init__(self) -> None:
        self._past: list[PastReply] = []
        self._having: dict[tuple[int, int], list[int]] = {}
        self._prompt: list[int] = []
        self._places: dict[int, list[int]] = {}
        self.thread: ReplayCursor | None = None

    def add(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        """Remember a conversation that is over."""
        for pair in set(pairwise(prompt)):
            self._having.setdefault(pair, []).append(len(self._past))
        self._past.append(PastReply(tuple(prompt), tuple(reply), tuple(origins(prompt, reply))))

    def begin(self, prompt: Sequence[int]) -> None:
        self._prompt = list(prompt)
        self._places = {}
        for at, token in enumerate(prompt):
            self._places.setdefault(token, []).append(at)
        alike: Counter[int] = Counter()
        for pair in set(pairwise(prompt)):
            having = self._having.get(pair)
            if having is not None and len(having) <= COMMON:
                for at in having:
                    alike[at] += 1
        best = max(alike, key=lambda at: (alike[at], at), default=-1)
        self.thread = ReplayCursor(self._past[best], self._prompt, self._places) if best >= 0 else None

    def extend(self, tokens: Sequence[int]) -> None:
        if self.thread is not None:
            for token in tokens:
                self.thread.advance(token)

    def cursor(self) -> Cursor:
        return SILENT if self.thread is None or self.thread.over else self.thread.copy()


class ReplayCursor:
    """A position in the past reply that is followed, and in the prompt's run that is being copied."""

    __slots__ = ("_alikes", "_at", "_copied", "_followed", "_past", "_places", "_prompt", "_resume")

    def __init__(
        self, past: PastReply, prompt: list[int], places: dict[int, list[int]], alikes: dict[int, int] | None = None
    ) -> None:
        self._past, self._prompt, self._places = past, prompt, places
        self._alikes: dict[int, int] = {} if alikes is None else alikes  # cache of `_alike`, shared by all copies
        self._at = 0  # place in the past reply; -1: it is over
        self._copied = _END  # the place in the prompt that is copied next
        self._resume = 0  # where the past reply goes on behind the run
        self._followed = 0

    def copy(self) -> ReplayCursor:
        other = ReplayCursor(self._past, self._prompt, self._places, self._alikes)
        other._at, other._copied, other._resume, other._followed = self._at, self._copied, self._resume, self._followed
        return other

    @property
    def over(self) -> bool:
        """Return whether nothing more will be offered."""
        return self._at < 0

    def offer(self) -> Offer:
        token = self._next()
        return (token, self._followed, 1.0 if self._copied < 0 else 0.5) if token >= 0 else NOTHING

    def _next(self) -> int:
        past = self._past
        if self._at < 0:
            return _END
        if self._copied >= 0:
            if not self._over():
                return self._prompt[self._copied] if self._copied < len(self._prompt) else _END
            return past.reply[self._resume] if self._resume < len(past.reply) else _END
        if self._at >= len(past.reply):
            return _END
        place = self._alike(self._at)
        return self._prompt[place] if place >= 0 else past.reply[self._at]

    def _over(self) -> bool:
        """Return whether the copied run ends here, as the past one did: with the token that stood behind that run."""
        past = self._past
        place, left = past.origins[self._at]
        behind = place + left
        here = self._copied
        return here >= len(self._prompt) or (behind < len(past.prompt) and self._prompt[here] == past.prompt[behind])

    def _alike(self, at: int) -> int:
        """Return where the counterpart of the past run at `at` is in this prompt; -1 if nowhere, or if there is no
        run at `at`."""
        known = self._alikes.get(at)
        if known is None:
            known = self._alikes[at] = self._look_for(at)
        return known

    def _look_for(self, at: int) -> int:
        past = self._past
        place, _ = past.origins[at]
        if place < 1:
            return _END
        best, most = _END, 0
        for before in self._places.get(past.prompt[place - 1], ()):
            if before + 1 >= len(self._prompt):
                continue
            same = 1
            while (
                same < LOOK
                and before >= same
                and place - 1 >= same
                and self._prompt[before - same] == past.prompt[place - 1 - same]
            ):
                same += 1
            if same >= most:
                best, most = before + 1, same
        return best

    def advance(self, token: int) -> None:
        past = self._past
        if self._at < 0:
            return
        if self._copied >= 0:
            if self._over() and self._resume < len(past.reply) and token == past.reply[self._resume]:
                self._at, self._copied = self._resume + 1, _END
            elif self._copied < len(self._prompt) and self._prompt[self._copied] == token:
                self._copied += 1
            elif self._resume < len(past.reply) and token == past.reply[self._resume]:
                self._at, self._copied = self._resume + 1, _END
            else:
                self._elsewhere(token)
                return
            self._followed += 1
            return
        if self._at >= len(past.reply):
            self._at = _END
            return
        place = self._alike(self._at)
        left = past.origins[self._at][1]
        if place >= 0 and self._prompt[place] == token:
            self._copied, self._resume = place + 1, self._at + left
            self._followed += 1
        elif past.reply[self._at] == token:
            self._at += 1
            self._followed += 1
        else:
            self._resume = self._at + left
            self._elsewhere(token)

    def _elsewhere(self, token: int) -> None:
        """Follow a token that differs from the past reply: into a run from another place, or words of the reply's
        own."""
        places = self._places.get(token)
        self._followed = 0
        if places and self._past.origins[self._at][0] >= 0:
            self._copied = places[-1] + 1
        else:
            self._lost(token)

    def _lost(self, token: int) -> None:
        past = self._past
        for at in range(self._at, min(len(past.reply), self._at + 12)):
            if past.reply[at] == token:
                self._at, self._copied = at + 1, _END
                return
        self._copied = _END
