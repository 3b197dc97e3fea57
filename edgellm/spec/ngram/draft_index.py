"""The index that drafts are copied from, kept from reply to reply: the context, and past conversations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.mechanisms import has, mechanism
from edgellm.spec.ngram.retriever import Retriever
from edgellm.spec.ngram.sources import ContextIndex, DraftSource, HistoryIndex
from edgellm.spec.params import SOURCES

MOST_TOKENS = 60_000
"""Indexed tokens of past conversations: they take a few tenths of a second to index."""


@dataclass(frozen=True, slots=True)
class PastConversation:
    """A past conversation as tokens: its prompt, or the end of it, and its reply."""

    prompt: Sequence[int]
    reply: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.reply)


def recent(conversations: list[PastConversation]) -> list[PastConversation]:
    """Return all conversations; if these have more than MOST_TOKENS, only the latest, with about half of that."""
    if sum(map(len, conversations)) <= MOST_TOKENS:
        return conversations
    kept, at = 0, len(conversations)
    while kept <= MOST_TOKENS // 2:
        at -= 1
        kept += len(conversations[at])
    return conversations[at:]


class DraftIndex:
    """The texts that one verifier's drafts are copied from, and its draft policy. An index serves one reply at a time;
    concurrent replies do without."""

    def __init__(self, policy: DraftPolicy, inside: Callable[[int], bool], is_eog: Callable[[int], bool]) -> None:
        """Start empty. `inside` tells whether a token continues a word, `is_eog` whether it ends the turn."""
        self.policy, self._inside, self._is_eog = policy, inside, is_eog
        self._context, self._history = ContextIndex(), HistoryIndex()
        self._analogy: Any = None  # from the first conversation on
        self._conversations: list[PastConversation] = []
        self._pending: list[PastConversation] = []
        self._busy = threading.Lock()

    def take(self, names: Collection[str]) -> Retriever | None:
        """Return a retriever from the sources `names` of `SOURCES`, until `give`; None while another reply uses the
        index."""
        if not self._busy.acquire(blocking=False):
            return None
        self._index()
        sources = {name: self._source(name, names) if name in names else None for name in SOURCES}
        return Retriever(sources, self.policy.copies, inside=self._inside, is_eog=self._is_eog)

    def _source(self, name: str, names: Collection[str]) -> DraftSource:
        source: DraftSource
        match name:
            case "calibration":
                source = mechanism(name).Calibration(self._context, owns="context" not in names)
            case "reuse":
                source = mechanism(name).Reuse(self._inside)
            case "analogy":
                source = self._analogy or DraftSource()
            case _:
                source = self._context if name == "context" else self._history
        return source

    def give(self) -> None:
        """Give the index back after a reply."""
        self._busy.release()

    @property
    def tokens(self) -> int:
        """Return the number of tokens of past conversations."""
        return sum(map(len, (*self._conversations, *self._pending)))

    def add(self, conversation: PastConversation) -> None:
        """Add a finished conversation; it is searched from the next reply on."""
        self._pending = recent([*self._pending, conversation])

    def index_pending(self) -> None:
        """Index new conversations now, while no reply waits for it; do nothing while a reply uses the index."""
        if self._busy.acquire(blocking=False):
            try:
                self._index()
            finally:
                self._busy.release()

    def _index(self) -> None:
        """Index new conversations; if they become too many, drop the older half."""
        new, self._pending = self._pending, []
        known, self._conversations = len(self._conversations) + len(new), recent([*self._conversations, *new])
        if len(self._conversations) < known:
            self._history, self._analogy, new = HistoryIndex(), None, self._conversations
        if new and self._analogy is None and has("templates"):
            self._analogy = mechanism("templates").Analogy()
        for conversation in new:
            for source in filter(None, (self._history, self._analogy)):
                source.add(conversation.prompt, conversation.reply)
