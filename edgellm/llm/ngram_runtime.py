"""Retrieval for a pair: its draft index, the verifier's cost curve, and the draft model as its own verifier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np

from edgellm.engine import Message, Model, ShouldStop, never, why_lazy
from edgellm.engine.kv.prompt_cache import PromptCache
from edgellm.engine.timing import BUSY, CpuWait
from edgellm.errors import EdgeError
from edgellm.llm.cost_curves import LINK_CURVE, SHARED, ModelCurve
from edgellm.llm.model_loading import verifier_of
from edgellm.spec.draft_length import DRIFT, CostCurve, DraftLengthController
from edgellm.spec.drafters.hybrid import HybridDrafter
from edgellm.spec.ngram.draft_index import DraftIndex, PastConversation, recent
from edgellm.spec.ngram.drafter import RetrievalDrafter
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import Filling, Suggestions
from edgellm.spec.types import Ids, TryingCost
from edgellm.spec.verifier import Verifier
from edgellm.verifier.in_process import LocalVerifier

_MAX_LOAD = 16.0
"""Maximum slowdown that other programs can explain."""
_LEARNED = 8
"""Rounds after which decode times are known better than by an estimate."""
MAX_INDEXES = 4
"""Number of kept indexes, one per choice of sources."""


class NgramRuntime:
    """Retrieval for one verifier. It is opened with the pair; nothing is measured before it is used."""

    def __init__(
        self, model: Model, n_ctx: int, threads: int | None, curve: ModelCurve | None,
        prompt_cache: PromptCache | None = None,
    ) -> None:  # fmt: skip
        """Use `model`, which verifies in this process and has this `curve`, or provides the vocabulary of a verifier
        across a link; then there is none. `prompt_cache` as for `Context`."""
        self._prompt_cache = prompt_cache
        self.model, self._n_ctx, self._threads, self._curve = model, n_ctx, threads, curve
        self._self_verifier: LocalVerifier | None = None
        self._indexes: dict[tuple[str, ...], DraftIndex] = {}
        self._measured = curve is None  # and the indexes use what was measured
        self._waiting = CpuWait()
        self._verifier: Verifier | None = None  # of the last reply
        self._shared = 0  # decodes of it that shared the cores, before the last correction
        self._conversations: list[PastConversation] = []
        self._texts: list[tuple[str, str]] = []  # not yet tokenised
        self._lock = threading.RLock()  # replies may be written by several threads

    def index(self, sources: tuple[str, ...]) -> DraftIndex:
        """Return the draft index for these sources."""
        with self._lock:
            self._tokenise_pending()
            curve = self.curve()
            if self._curve is not None and self._curve.measured > self._measured:
                for known in self._indexes.values():
                    known.use_curve(curve)
                self._measured = True
            index = self._indexes.pop(sources, None)
            if index is None:
                index = DraftIndex(sources, curve, continues_word(self.model), cache(self.model.is_eog))
                for conversation in self._conversations:
                    index.add(conversation)
            self._indexes[sources] = index  # most recently used last
            while len(self._indexes) > MAX_INDEXES:
                del self._indexes[next(iter(self._indexes))]
            return index

    def remember(self, conversations: Sequence[tuple[str, str]]) -> None:
        """Add past questions and replies, the oldest first. They are tokenised when needed."""
        self._texts += conversations

    def _tokenise_pending(self) -> None:
        texts, self._texts = self._texts, []
        end = [token] if (token := self.model.end_of_turn) is not None else []
        for question, reply in texts:
            with suppress(EdgeError, UnicodeEncodeError):  # a text that this model cannot read is of no use to it
                prompt = self.model.chat_prompt([Message("user", question)])
                self.add(prompt, [*self.model.tokenize(reply).tolist(), *end])

    def add(self, prompt: Ids, reply: Sequence[int]) -> None:
        """Add a complete reply and its prompt."""
        conversation = PastConversation(prompt.tolist(), reply)
        with self._lock:
            self._conversations = recent([*self._conversations, conversation])
            for index in self._indexes.values():
                index.add(conversation)
            for index in list(self._indexes.values())[-1:]:  # the most recently used one
                index.index_pending()

    def curve(self) -> CostCurve:
        """Return the cost curve: an estimate until it is measured, and across a link."""
        return LINK_CURVE if self._curve is None else self._curve.current()

    def measure(self, should_stop: ShouldStop = never) -> CostCurve:
        """Return the measured cost curve, as `ModelCurve.measure` does; across a link an estimate."""
        return LINK_CURVE if self._curve is None else self._curve.measure(should_stop)

    def track(self, verifier: Verifier) -> None:
        """Track the decodes of `verifier`, to tell a slow curve from shared cores."""
        self._verifier, self._shared = verifier, verifier.shared

    def correct(self, rule: DraftLengthController) -> None:
        """Keep the curve that decodes follow if it differs, unless the machine's load explains the difference."""
        with self._lock:
            if self._curve is None or not (rule.drifted if self._curve.measured else rule.rounds >= _LEARNED):
                return
            if self._curve.measured > self._measured:  # `rule` still follows the estimate
                return
            wait_share, shared = self._waiting.share(), self._verifier.shared if self._verifier is not None else 0
            if shared > self._shared:
                wait_share = max(wait_share, SHARED)
            self._shared = shared
            if self._measured and wait_share > BUSY and 1.0 <= rule.factor <= _MAX_LOAD:
                return
            curve = replace(rule.corrected(), doubtful=wait_share > BUSY or not self._measured)
            current = self._curve.current()
            if current.rows != curve.rows:  # it was measured meanwhile, and `rule` still follows the estimate
                return
            moved = np.log(np.array(curve.seconds) / np.array(current.seconds))
            if np.abs(moved).max() > np.log(1.0 + DRIFT):
                self._curve.learn(curve, wait_share)

    @property
    def head_note(self) -> str:
        """Return for which rows the verifier's head is computed, and why; "" across a link."""
        return "" if self._curve is None else f"; {why_lazy(self.model)[1]}"

    def begin(self, sources: tuple[str, ...], prompt_tokens: int) -> NgramSession | None:
        """Return a retrieval session for one reply to a prompt of so many tokens; None while another reply uses the
        index."""
        index = self.index(sources)
        drafter = index.take(prompt_tokens)
        return None if drafter is None else NgramSession(self, index, drafter, prompt_tokens)

    def self_verifier(self) -> LocalVerifier:
        """Return the model as the verifier of drafts copied for it."""
        if self._self_verifier is None:
            self._self_verifier = verifier_of(self.model, self._n_ctx, self._threads, self._prompt_cache)
        return self._self_verifier

    def close(self) -> None:
        """Keep the curve if it was corrected, and close the verifier."""
        for index in self._indexes.values():
            self.correct(index.length)
        if self._self_verifier is not None:
            self._self_verifier.close()


class NgramSession:
    """Retrieval for one reply, to be closed after it."""

    def __init__(
        self, retrieval: NgramRuntime, index: DraftIndex, drafter: RetrievalDrafter, prompt_tokens: int
    ) -> None:
        self._retrieval, self._index, self._drafter = retrieval, index, drafter
        self._prompt_tokens = prompt_tokens

    @property
    def suggestions(self) -> Suggestions:
        """Return suggestions for the models that write the reply."""
        return self._drafter

    @property
    def filling(self) -> Filling:
        """Return the padding of the verifier's decodes, and the times of its heads."""
        return self._retrieval.curve().behind(self._prompt_tokens).filling()

    def hybrid_drafter(
        self, model: Drafter | None, gamma: int, *, speculates: bool = False, linked: bool = False
    ) -> Drafter:
        """Return a drafter that copies, and uses `model`, if given, for up to `gamma` tokens where that is better.
        `speculates`: it is no draft model but a speculator, and rounds with it are compared apart. `linked` as for
        `HybridDrafter`."""
        if model is None:
            return self._drafter
        rounds = self._index.speculator_rounds if speculates else self._index.rounds
        return HybridDrafter(self._drafter, model, gamma, rounds, linked=linked)

    def verifier(self, given: Verifier | None) -> Verifier:
        """Return the verifier of the reply: the given one, or the model itself."""
        verifier = given or self._retrieval.self_verifier()
        self._retrieval.track(verifier)
        return verifier

    @property
    def counts(self) -> dict[str, int]:
        """Return accepted tokens by source; the dictionary is updated."""
        return self._drafter.copied

    def trying(self) -> TryingCost | None:
        """Return what trying has cost and saved so far; None where it is not accounted for."""
        return self._drafter.cost

    def close(self) -> None:
        self._retrieval.correct(self._index.length)
        self._index.give()


def continues_word(model: Model) -> Callable[[int], bool]:
    """Return a function that returns whether a token continues a word: it begins with a letter, a digit, or a byte
    beyond ASCII."""

    @cache
    def inside(token: int) -> bool:
        first = model.piece(token)[:1]
        return first.isalnum() or first >= b"\x80"

    return inside
