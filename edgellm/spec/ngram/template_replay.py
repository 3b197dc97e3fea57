"""Drafts by analogy: the reply to a similar prompt, with its copied words replaced by those of this prompt.

A reply to "… meet at the castle? Nelly" differs from the one to "… meet at the ferry? Agnes" only in the words taken
from the prompt. For every past reply, copied tokens and their surroundings in its prompt are known; the words in the
same surroundings of this prompt replace them. Suffix matching alone ends at every name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgellm.spec.ngram.sources import NO_CURSOR, NOTHING, Cursor, DraftSource, Offer

MAX_PROMPTS = 16
"""Past prompts with a pair of tokens, at most: a more common pair does not tell which prompt is similar."""
MAX_CONTEXT = 4
"""Tokens before a copied run that are compared."""
_END = -1


@dataclass(frozen=True, slots=True)
class PastReply:
    """A past conversation. `origins[i]` is the place in `prompt` that token i of `reply` was copied from, and how many
    tokens of the copied run remain, including this one; (-1, 1) for a token that was not copied."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    origins: tuple[tuple[int, int], ...]


def origins(prompt: Sequence[int], reply: Sequence[int]) -> list[tuple[int, int]]:
    """Return the `PastReply.origins` of `reply` in `prompt`, always by the longest run."""
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


class Analogy(DraftSource):
    """A source: the past conversation with the most similar prompt."""

    def __init__(self) -> None:
        self._past: list[PastReply] = []
        self._by_pair: dict[tuple[int, int], list[int]] = {}
        self._prompt: list[int] = []
        self._places: dict[int, list[int]] = {}
        self.replay: ReplayCursor | None = None

    def add(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        """Add a finished conversation."""
        for pair in set(pairwise(prompt)):
            self._by_pair.setdefault(pair, []).append(len(self._past))
        self._past.append(PastReply(tuple(prompt), tuple(reply), tuple(origins(prompt, reply))))

    def begin(self, prompt: Sequence[int]) -> None:
        self._prompt = list(prompt)
        self._places = {}
        for at, token in enumerate(prompt):
            self._places.setdefault(token, []).append(at)
        overlap: Counter[int] = Counter()
        for pair in set(pairwise(prompt)):
            prompts = self._by_pair.get(pair)
            if prompts is not None and len(prompts) <= MAX_PROMPTS:
                for at in prompts:
                    overlap[at] += 1
        best = max(overlap, key=lambda at: (overlap[at], at), default=-1)
        self.replay = ReplayCursor(self._past[best], self._prompt, self._places) if best >= 0 else None

    @property
    def matched(self) -> int:
        return 0 if self.replay is None or self.replay.finished else self.replay.followed

    def extend(self, tokens: Sequence[int]) -> None:
        if self.replay is not None:
            for token in tokens:
                self.replay.advance(token)

    def cursor(self) -> Cursor:
        return NO_CURSOR if self.replay is None or self.replay.finished else self.replay.copy()


class ReplayCursor:
    """A cursor: a position in the past reply, and in the run of the prompt that is being copied."""

    __slots__ = ("_at", "_copied", "_counterparts", "_past", "_places", "_prompt", "_resume", "followed")

    def __init__(
        self,
        past: PastReply,
        prompt: list[int],
        places: dict[int, list[int]],
        counterparts: dict[int, int] | None = None,
    ) -> None:
        self._past, self._prompt, self._places = past, prompt, places
        # Cache of `_counterpart`, shared by all copies.
        self._counterparts: dict[int, int] = {} if counterparts is None else counterparts
        self._at = 0  # place in the past reply; -1 after its end
        self._copied = _END  # next place in the prompt to copy
        self._resume = 0  # place in the past reply after the run
        self.followed = 0

    def copy(self) -> ReplayCursor:
        other = ReplayCursor(self._past, self._prompt, self._places, self._counterparts)
        other._at, other._copied, other._resume, other.followed = self._at, self._copied, self._resume, self.followed
        return other

    @property
    def finished(self) -> bool:
        """Return whether nothing more will be offered."""
        return self._at < 0

    def offer(self) -> Offer:
        token = self._next()
        return (token, self.followed, 1.0 if self._copied < 0 else 0.5) if token >= 0 else NOTHING

    def _next(self) -> int:
        past = self._past
        if self._at < 0:
            return _END
        if self._copied >= 0:
            if not self._run_ends():
                return self._prompt[self._copied] if self._copied < len(self._prompt) else _END
            return past.reply[self._resume] if self._resume < len(past.reply) else _END
        if self._at >= len(past.reply):
            return _END
        place = self._counterpart(self._at)
        return self._prompt[place] if place >= 0 else past.reply[self._at]

    def _run_ends(self) -> bool:
        """Return whether the copied run ends here, as the past one did: at the token that followed it there."""
        past = self._past
        place, left = past.origins[self._at]
        after = place + left
        at_copy = self._copied
        return at_copy >= len(self._prompt) or (
            after < len(past.prompt) and self._prompt[at_copy] == past.prompt[after]
        )

    def _counterpart(self, at: int) -> int:
        """Return where the counterpart of the past run at `at` begins in this prompt; -1 if there is none."""
        known = self._counterparts.get(at)
        if known is None:
            known = self._counterparts[at] = self._find_counterpart(at)
        return known

    def _find_counterpart(self, at: int) -> int:
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
                same < MAX_CONTEXT
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
            if self._run_ends() and self._resume < len(past.reply) and token == past.reply[self._resume]:
                self._at, self._copied = self._resume + 1, _END
            elif self._copied < len(self._prompt) and self._prompt[self._copied] == token:
                self._copied += 1
            elif self._resume < len(past.reply) and token == past.reply[self._resume]:
                self._at, self._copied = self._resume + 1, _END
            else:
                self._diverge(token)
                return
            self.followed += 1
            return
        if self._at >= len(past.reply):
            self._at = _END
            return
        place = self._counterpart(self._at)
        left = past.origins[self._at][1]
        if place >= 0 and self._prompt[place] == token:
            self._copied, self._resume = place + 1, self._at + left
            self.followed += 1
        elif past.reply[self._at] == token:
            self._at += 1
            self.followed += 1
        else:
            self._resume = self._at + left
            self._diverge(token)

    def _diverge(self, token: int) -> None:
        """Follow a token that differs from the past reply: into a run copied from another place, or past words that
        were not copied."""
        places = self._places.get(token)
        self.followed = 0
        if places and self._past.origins[self._at][0] >= 0:
            self._copied = places[-1] + 1
        else:
            self._resync(token)

    def _resync(self, token: int) -> None:
        past = self._past
        for at in range(self._at, min(len(past.reply), self._at + 12)):
            if past.reply[at] == token:
                self._at, self._copied = at + 1, _END
                return
        self._copied = _END
