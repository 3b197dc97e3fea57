"""The state of drafting with one verifier, kept from reply to reply: texts to copy from, draft policy, cost curve."""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache, partial

from edgellm.engine import Message, Model
from edgellm.errors import EdgeError
from edgellm.llm.cost_curves import LINK_CURVE, ModelCurve
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.ngram.retriever import DraftIndex, Retriever
from edgellm.spec.params import has
from edgellm.spec.protocols import Verifier
from edgellm.spec.sampling import ReplyGrammar
from edgellm.spec.types import Ids


class Drafting:
    """The state of drafting with one verifier, from reply to reply: the index of texts to copy and the draft policy,
    opened when first needed, the cost curve, and the model as the verifier of its own drafts."""

    def __init__(self, model: Model, open_verifier: Callable[[], Verifier], curve: ModelCurve | None) -> None:
        """Use `model`, which verifies in this process with this `curve`, or provides the vocabulary of a verifier
        across a link, without a curve. `open_verifier` opens it as the verifier of its own drafts."""
        self.model, self._open_verifier, self._curve = model, open_verifier, curve
        self._self_verifier: Verifier | None = None
        self._verifier: Verifier | None = None  # verifier of the last reply
        self._told = False  # it was said that the draft model does not pay
        self._kept = False  # the curve came from an earlier process
        self._shared = 0  # `shared` of that verifier, when the curve was last corrected
        self._texts: list[tuple[str, str]] = []  # texts to tokenise
        self._lock = threading.RLock()  # Several threads may write replies.
        self._opened: DraftIndex | None = None

    @property
    def policy(self) -> DraftPolicy:
        """Return the draft policy, which is opened with the index."""
        return self.opened_index().policy

    def opened_index(self) -> DraftIndex:
        """Return the index, opened when first needed, with the texts of `remember` tokenised."""
        with self._lock:
            if self._opened is None:
                policy = DraftPolicy(curve := self.curve())
                self._kept = curve.filled
                self._opened = DraftIndex(policy, continues_word(self.model), cache(self.model.is_eog))
            texts, self._texts = self._texts, []
            end = [token] if (token := self.model.end_of_turn) is not None else []
            for question, reply in texts:
                with suppress(EdgeError, UnicodeEncodeError):  # An unreadable text is useless.
                    prompt = self.model.chat_prompt([Message("user", question)])
                    self.add(prompt, [*self.model.tokenize(reply).tolist(), *end])
            return self._opened

    def remember(self, conversations: Sequence[tuple[str, str]]) -> None:
        """Add past questions and replies, the oldest first. They are tokenised when needed."""
        self._texts += conversations

    def add(self, prompt: Ids, reply: Sequence[int]) -> None:
        """Add a complete reply and its prompt, once anything is to be copied."""
        with self._lock:
            if self._opened is not None:
                self._opened.add(prompt.tolist(), reply)

    def begin(self, sources: Collection[str], grammar: ReplyGrammar | None = None) -> Retriever | None:
        """Return a retriever from `sources` for one reply, by `grammar`, until `end`; None while another reply uses the
        index."""
        index = self.opened_index()
        forced = None if grammar is None or not has("forced text") else partial(self._forced, grammar)
        copies = index.take(sources, forced)
        if copies is not None and (curve := self.curve()).filled and curve != index.policy.cost.given:
            index.policy.use_curve(curve)  # It has been measured.
        return copies

    def _forced(self, grammar: ReplyGrammar, text: Ids) -> Sequence[int]:
        said = grammar.forced(text)
        found: list[int] = self.model.tokenize(said.decode("utf-8", "ignore")).tolist() if said else []
        return found

    def end(self) -> None:
        """End the reply of `begin`, and correct the cost curve by its decodes."""
        index = self.opened_index()
        with self._lock:
            before, self._shared = self._shared, 0 if self._verifier is None else self._verifier.shared
            if self._curve is not None:
                self._curve.correct(index.policy.cost, self._shared > before)
        index.give()

    def curve(self) -> CostCurve:
        """Return the cost curve: an estimate until it is measured, and across a link."""
        return LINK_CURVE if self._curve is None else self._curve.current()

    def slow_once(self, model: str) -> str:
        """Return the sentence that replies are slower with the draft model, the first time; "" later, and where a kept
        curve alone says so, as that was said when it was measured."""
        slow = self.policy.slow_model(model, judged=self._kept)
        told, self._told = self._told, self._told or bool(slow)
        return "" if told else slow

    def measure(self) -> CostCurve:
        """Return the measured cost curve; across a link an estimate."""
        return LINK_CURVE if self._curve is None else self._curve.measure()

    def track(self, verifier: Verifier) -> None:
        """Track the decodes of `verifier`, to tell a slow curve from shared cores."""
        self._verifier, self._shared = verifier, verifier.shared
        if (curve := self.curve()).filled:
            verifier.use_curve(curve)

    def self_verifier(self) -> Verifier:
        """Return the model as the verifier of drafts copied for it."""
        with self._lock:
            if self._self_verifier is None:
                self._self_verifier = self._open_verifier()
            return self._self_verifier

    def close(self) -> None:
        """Close the self-verifier, if it was opened."""
        if self._self_verifier is not None:
            self._self_verifier.close()


def continues_word(model: Model) -> Callable[[int], bool]:
    """Return a function that returns whether a token continues a word: it begins with a letter, a digit, or a byte
    beyond ASCII."""

    @cache
    def inside(token: int) -> bool:
        first = model.piece(token)[:1]
        return first.isalnum() or first >= b"\x80"

    return inside
