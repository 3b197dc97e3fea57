"""The memory of retrieval from reply to reply, and the drafters built on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edgellm.spec.draft_length import CostCurve, DraftLengthController
from edgellm.spec.drafters.hybrid import DrafterSelector
from edgellm.spec.ngram.acceptance_model import AcceptanceModel
from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.ngram.drafter import RetrievalDrafter
from edgellm.spec.ngram.lookup_throttle import LookupThrottle
from edgellm.spec.ngram.reuse import Reuse
from edgellm.spec.ngram.sources import ContextIndex, DraftSource, HistoryIndex
from edgellm.spec.ngram.template_replay import Analogy
from edgellm.spec.params import SOURCES

PRIORS = {"context": 0.35, "history": 0.5, "analogy": 0.5, "calibration": 0.3, "reuse": 0.4}
MOST_TOKENS = 60_000
"""Tokens of past conversations that are searched: they take a few tenths of a second to index."""


@dataclass(frozen=True, slots=True)
class PastConversation:
    """A past conversation as tokens: its prompt, or the end of it, and its reply."""

    prompt: Sequence[int]
    reply: Sequence[int]


def recent(talks: list[PastConversation]) -> list[PastConversation]:
    """Return all conversations; if they are more than MOST_TOKENS together, only the latest, about half as many
    tokens."""
    if sum(map(_size, talks)) <= MOST_TOKENS:
        return talks
    kept = 0
    for at in range(len(talks) - 1, -1, -1):
        kept += _size(talks[at])
        if kept > MOST_TOKENS // 2:
            return talks[at:]
    return talks


class DraftIndex:
    """The retrieval memory of one verifier. It serves one reply at a time; replies that begin meanwhile do without
    it."""

    def __init__(
        self,
        sources: Iterable[str],
        curve: CostCurve,
        inside: Callable[[int], bool],
        is_eog: Callable[[int], bool],
        length: DraftLengthController | None = None,
    ) -> None:
        """Retrieve from `sources`, some of `SOURCES`; `inside` says whether a token continues the word before it,
        `is_eog` whether it ends the turn. `length` chooses how much is drafted, by default as much as pays by
        `curve`."""
        self._names = [name for name in SOURCES if name in set(sources)]
        self._inside, self._is_eog = inside, is_eog
        self._context = ContextIndex()
        self._history = HistoryIndex()
        self._analogy = Analogy()
        self._calibration = Calibration(self._context, owns="context" not in self._names)
        self._reuse = Reuse(inside)
        self._chances = AcceptanceModel([PRIORS[name] for name in self._names])
        self.length = length or DraftLengthController(curve)
        self.rounds = DrafterSelector()
        self._looks = LookupThrottle()
        self._talks: list[PastConversation] = []
        self._new: list[PastConversation] = []
        self._busy = threading.Lock()

    def take(self) -> RetrievalDrafter | None:
        """Return a drafter for one reply, to be given back; None while another reply has it."""
        if not self._busy.acquire(blocking=False):
            return None
        self._index()
        by_name: dict[str, DraftSource] = {
            "context": self._context,
            "history": self._history,
            "analogy": self._analogy,
            "calibration": self._calibration,
            "reuse": self._reuse,
        }
        return RetrievalDrafter(
            {name: by_name[name] for name in self._names},
            self._chances,
            self.length,
            inside=self._inside,
            is_eog=self._is_eog,
            reuse=self._reuse if "reuse" in self._names else None,
            looks=self._looks,
            calibration=self._calibration if "calibration" in self._names else None,
        )

    def give(self) -> None:
        """Give the memory back after a reply."""
        self._busy.release()

    @property
    def remembers(self) -> bool:
        """Return whether past conversations are searched at all."""
        return "history" in self._names or "analogy" in self._names

    @property
    def tokens(self) -> int:
        """Return how many tokens of past conversations are kept."""
        return sum(map(_size, (*self._talks, *self._new)))

    def add(self, talk: PastConversation) -> None:
        """Remember a conversation that is over; it is searched from the next reply on."""
        self._new = recent([*self._new, talk])
        self.rounds.ended(len(talk.reply))

    def settle(self) -> None:
        """Index new conversations now, while no reply waits for it; do nothing while a reply uses the memory."""
        if self._busy.acquire(blocking=False):
            try:
                self._index()
            finally:
                self._busy.release()

    def _index(self) -> None:
        """Index new conversations; if that makes them too many, forget the older half."""
        new, self._new = self._new, []
        known, self._talks = len(self._talks) + len(new), recent([*self._talks, *new])
        if len(self._talks) < known:
            self._history, self._analogy, new = HistoryIndex(), Analogy(), self._talks
        for talk in new:
            if "history" in self._names:
                self._history.add(talk.prompt, talk.reply)
            if "analogy" in self._names:
                self._analogy.add(talk.prompt, talk.reply)


def _size(talk: PastConversation) -> int:
    return len(talk.prompt) + len(talk.reply)
