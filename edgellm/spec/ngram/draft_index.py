"""The retrieval index that is kept from reply to reply, and the drafters built on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edgellm.spec.draft_length import CostCurve, DraftLengthController
from edgellm.spec.drafters.allowance import Allowance
from edgellm.spec.drafters.hybrid import DrafterSelector
from edgellm.spec.ngram.acceptance_model import AcceptanceModel
from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.ngram.drafter import RetrievalDrafter
from edgellm.spec.ngram.duty_cycle import DutyCycle
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


def recent(conversations: list[PastConversation]) -> list[PastConversation]:
    """Return all conversations; if they are more than MOST_TOKENS together, only the latest, about half as many
    tokens."""
    if sum(map(_size, conversations)) <= MOST_TOKENS:
        return conversations
    kept = 0
    for at in range(len(conversations) - 1, -1, -1):
        kept += _size(conversations[at])
        if kept > MOST_TOKENS // 2:
            return conversations[at:]
    return conversations


class DraftIndex:
    """The retrieval index of one verifier. It serves one reply at a time; concurrent replies do without it."""

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
        self._calibration = (
            Calibration(self._context, owns="context" not in self._names) if "calibration" in self._names else None
        )
        self._reuse = Reuse(inside) if "reuse" in self._names else None
        self._chances = AcceptanceModel([PRIORS[name] for name in self._names])
        self.length = length or DraftLengthController(curve)
        self._new_curve: CostCurve | None = None
        self.allowance = Allowance()
        self.rounds, self.speculator_rounds = DrafterSelector(), DrafterSelector()
        self._conversations: list[PastConversation] = []
        self._pending: list[PastConversation] = []
        self._busy = threading.Lock()

    def take(self, positions: int = 0) -> RetrievalDrafter | None:
        """Return a drafter for one reply to a prompt of so many tokens, to be given back; None while another reply uses
        the index."""
        if not self._busy.acquire(blocking=False):
            return None
        self._index()
        if self._new_curve is not None:
            self.length, self._new_curve = DraftLengthController(self._new_curve), None
        self.length.begin(positions)
        by_name: dict[str, DraftSource | None] = {
            "context": self._context,
            "history": self._history,
            "analogy": self._analogy,
            "calibration": self._calibration,
            "reuse": self._reuse,
        }
        past = self._history.automaton if len(self._history.automaton) else None
        # what calibration and reuse know is of the last round, or of the prompt as it is read
        always = self._calibration is not None or self._reuse is not None
        return RetrievalDrafter(
            {name: source for name, source in by_name.items() if name in self._names and source is not None},
            self._chances,
            self.length,
            inside=self._inside,
            is_eog=self._is_eog,
            reuse=self._reuse,
            calibration=self._calibration,
            duty=None if always else DutyCycle(self.allowance, self._decode_seconds, past),
        )

    def _decode_seconds(self) -> float:
        return self.length.single

    def use_curve(self, curve: CostCurve) -> None:
        """Choose by `curve` how much is drafted, from the next reply on."""
        self._new_curve = curve

    def give(self) -> None:
        """Give the index back after a reply."""
        self._busy.release()

    @property
    def tokens(self) -> int:
        """Return the number of tokens of past conversations."""
        return sum(map(_size, (*self._conversations, *self._pending)))

    def add(self, conversation: PastConversation) -> None:
        """Add a finished conversation; it is searched from the next reply on."""
        self._pending = recent([*self._pending, conversation])
        for rounds in (self.rounds, self.speculator_rounds):
            rounds.record_reply(len(conversation.reply))

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
            self._history, self._analogy, new = HistoryIndex(), Analogy(), self._conversations
        for conversation in new:
            if not {"history", "analogy"}.isdisjoint(self._names):  # it tells when a look at an analogous reply is due
                self._history.add(conversation.prompt, conversation.reply)
            if "analogy" in self._names:
                self._analogy.add(conversation.prompt, conversation.reply)


def _size(conversation: PastConversation) -> int:
    return len(conversation.prompt) + len(conversation.reply)
