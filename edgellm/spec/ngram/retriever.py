"""Copies that may follow a reply: from the context, past conversations, the model's own predictions, and rejected
drafts; and the index of these texts, kept from reply to reply."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from edgellm.spec.drafting.acceptance import Evidence, EvidenceAcceptance, evidence
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.ngram.sources import PROMPT_TAIL, ContextIndex, Cursor, DraftSource, HistoryIndex
from edgellm.spec.params import SOURCES, mechanism
from edgellm.spec.types import Chunk, Expected, Ids, Verdict

Candidates: TypeAlias = list[list[tuple[int, float, Evidence]]]
"""The candidates of each place, the likeliest first: token, chance, and `evidence`."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens that may be copied, each with the chance that it and all before it are accepted."""

    ids: Sequence[int] = ()
    survives: Sequence[float] = ()

    def chunk(self, n: int, reason: str = "") -> Chunk:
        """Return the first `n` tokens as a chunk."""
        if not n:
            return Chunk(reason=reason)
        confidence = np.array(self.survives[:n], dtype=np.float32)
        return Chunk(np.array(self.ids[:n], dtype=np.int32), confidence, retrieved=True, reason=reason)


NO_OFFER = Offer()


class Retriever:
    """A retriever of the likeliest token of its sources at each place, which learns from verdicts."""

    def __init__(
        self, sources: Mapping[str, DraftSource | None], chances: EvidenceAcceptance, *, inside: Callable[[int], bool],
        is_eog: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """Copy from `sources`, by name, in the order of the priors of `chances`; None where one is not used.

        `inside` tells whether a token continues a word, `is_eog` whether it ends the turn.
        """
        self._sources = [(1 << at, source) for at, source in enumerate(sources.values()) if source is not None]
        self._chances, self._inside, self._is_eog = chances, inside, is_eog
        self._known = 0  # tokens of the text that the sources know
        self._candidates: Candidates = []  # candidates of the places from `_place` on
        self._place = 0
        self._names = tuple(sources)
        self.copied = {name: 0 for name, source in sources.items() if source is not None}
        """Accepted tokens of the reply by the source that offered them."""

    @property
    def has_sources(self) -> bool:
        """Return whether there is anything to copy from."""
        return bool(self._sources)

    @property
    def expect(self) -> Callable[[Expected], None] | None:
        """Return the callback for the verifier's predictions on the prompt; None if no source wants them."""
        return next((source.expect for _, source in self._sources if source.expect is not None), None)

    def begin(self, prompt: Ids) -> None:
        """Begin a reply to `prompt` (n,)."""
        ids, self._known = prompt.tolist(), len(prompt)
        for _, source in self._sources:
            source.begin(ids)
        self._candidates = []

    def follow(self, text: Ids) -> int:
        """Read the reply's new tokens in `text` (n,); return the length of the longest match of a source, -1 without
        sources."""
        if len(text) > self._known:
            new, self._known = text[self._known :].tolist(), len(text)
            for _, source in self._sources:
                source.extend(new)
        self._candidates = []
        return max((source.matched for _, source in self._sources), default=-1)

    def offers(
        self, floor: Callable[[int], float], most: int, drafted: Sequence[int] = (), alive: float = 1.0
    ) -> Offer:
        """Return up to `most` tokens that may follow the reply and the tokens that another drafter has `drafted`, which
        are all accepted with probability `alive`; fewer where the chance falls below `floor`."""
        if drafted and self._is_eog(drafted[-1]):
            return NO_OFFER
        cursors = [(bit, cursor) for bit, source in self._sources if (cursor := source.cursor()) is not None]
        for token in drafted:
            for _, cursor in cursors:
                cursor.advance(token)
        ids: list[int] = []
        survives: list[float] = []
        self._candidates, self._place = [], len(drafted)
        for place in range(len(drafted), len(drafted) + most):
            if not (options := self._options(cursors)):
                break
            self._candidates.append(options)
            token, chance, _ = options[0]
            alive *= chance
            if ids and alive < floor(place):
                break
            ids.append(token)
            survives.append(alive)
            if self._is_eog(token):
                break
            for _, cursor in cursors:
                cursor.advance(token)
        trust = self._chances.trust
        return Offer(ids, [trust * chance for chance in survives])

    def _options(self, cursors: Sequence[tuple[int, Cursor]]) -> list[tuple[int, float, Evidence]]:
        """Return the tokens that are offered, the likeliest first. Each cursor comes with its source's bit."""
        offers: dict[int, tuple[int, int, float]] = {}
        for bit, cursor in cursors:
            token, matched, share = cursor.offer()
            if token >= 0:
                agree, longest, largest = offers.get(token, (0, 0, 0.0))
                offers[token] = agree | bit, max(longest, matched), max(largest, share)
        found = []
        for token, (agree, matched, share) in offers.items():
            kind = evidence(agree, matched, share, self._inside(token))
            found.append((token, self._chances.chance(kind), kind))
        if len(found) > 1:
            found.sort(key=itemgetter(1), reverse=True)
        return found

    def observe(self, chunk: Chunk, verdict: Verdict) -> None:
        """Learn from every offer for a place, drafted or not: that costs nothing, and avoids bias."""
        for _, source in self._sources:
            source.observe(chunk, verdict)
        if not self._candidates:
            return
        accepted = verdict.accepted
        copied = 0 if chunk.retrieved else len(chunk) - chunk.tail  # first place of a copied token
        truth = [*chunk.ids[:accepted].tolist(), *verdict.tokens[:1].tolist()]
        for at, (answer, options) in enumerate(zip(truth[self._place :], self._candidates, strict=False), self._place):
            for token, _, kind in options:
                self._chances.learn(kind, token == answer)
                if token == answer and copied <= at < accepted:
                    for bit, name in enumerate(self._names):
                        if kind.agree >> bit & 1:
                            self.copied[name] += 1


MOST_TOKENS = 60_000
"""Indexed tokens of past conversations: they take a few tenths of a second to index."""


class DraftIndex:
    """Indexes of the prompt and of past conversations, in tokens, with the policy that decides on their copies. They
    serve one reply at a time; concurrent replies do without."""

    def __init__(self, policy: DraftPolicy, inside: Callable[[int], bool], is_eog: Callable[[int], bool]) -> None:
        """Start empty. `inside` tells whether a token continues a word, `is_eog` whether it ends the turn."""
        self.policy, self._inside, self._is_eog = policy, inside, is_eog
        self._context, self._history = ContextIndex(), HistoryIndex()
        self._past: list[tuple[Sequence[int], Sequence[int]]] = []  # ends of prompts, with replies, the oldest first
        self._indexed = 0  # those that the history has
        self._busy = threading.Lock()

    def take(self, names: Collection[str], forced: Callable[[Ids], Sequence[int]] | None = None) -> Retriever | None:
        """Return a retriever from the sources `names` of `SOURCES`, until `give`; None while another reply uses the
        index. `forced` returns the tokens of the only text that the reply's grammar allows, if it has one."""
        if not self._busy.acquire(blocking=False):
            return None
        self._index()
        opened: dict[str, Callable[[], DraftSource | None]] = {
            "context": lambda: self._context,
            "history": lambda: self._history,
            "calibration": lambda: mechanism("calibration").Calibration(self._context, "context" not in names),
            "reuse": lambda: mechanism("reuse").Reuse(self._inside),
            "schema": lambda: None if forced is None else mechanism("forced text").ForcedText(forced),
        }
        sources = {name: opened[name]() if name in names else None for name in SOURCES}
        return Retriever(sources, self.policy.copy_chances, inside=self._inside, is_eog=self._is_eog)

    def give(self) -> None:
        """Give the index back after a reply."""
        self._busy.release()

    def add(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        """Add a conversation that is over; it is searched from the next reply on."""
        self._past.append((prompt[-PROMPT_TAIL:], reply))

    def _index(self) -> None:
        """Index new conversations; if all have more than `MOST_TOKENS`, only the latest, with about half of that."""
        sizes = np.cumsum([len(prompt) + len(reply) for prompt, reply in reversed(self._past)])
        if len(sizes) and sizes[-1] > MOST_TOKENS:
            del self._past[: -1 - int(sizes.searchsorted(MOST_TOKENS // 2))]
            self._history, self._indexed = HistoryIndex(), 0
        for prompt, reply in self._past[self._indexed :]:
            self._history.add(prompt, reply)
        self._indexed = len(self._past)
