"""The drafting methods that are compared: PLD, SAM, our sources on top of them, ours, and an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from bench.coordgen.tasks import Reply
from edgellm.engine import Model
from edgellm.llm.generation import MAX_MODEL_DRAFT
from edgellm.llm.ngram_runtime import continues_word
from edgellm.spec.draft_length import MAX_DRAFT as LONGEST
from edgellm.spec.draft_length import CostCurve, DraftLengthController
from edgellm.spec.drafters.hybrid import HybridDrafter
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.ngram.acceptance_model import AcceptanceModel
from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.ngram.draft_index import PRIORS, DraftIndex, PastConversation
from edgellm.spec.ngram.drafter import HOPELESS, RetrievalDrafter
from edgellm.spec.ngram.reuse import Reuse
from edgellm.spec.ngram.sources import NOTHING, PROMPT_TAIL, SEPARATOR, DraftSource, Offer
from edgellm.spec.ngram.sources import ContextIndex as Seen
from edgellm.spec.ngram.sources import HistoryIndex as Past
from edgellm.spec.ngram.template_replay import Analogy
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState, Suggestions
from edgellm.spec.types import Chunk, Round

MOST = 40
"""Tokens of a draft for methods that ignore costs: the length that SAM's authors use."""


class Everything(DraftLengthController):
    """Drafts all that is offered, up to a length, at any cost."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__(CostCurve((1, 64), (1.0, 1.0)))
        self._most = most

    def choose(
        self,
        survives: Sequence[float],
        alternative: tuple[float, float] | None = None,  # noqa: ARG002
        allowed: float = 0.0,  # noqa: ARG002
    ) -> int:
        return min(len(survives), self._most)

    def floors(self, rows: int = 0, seconds: float = 0.0) -> list[float]:  # noqa: ARG002
        return [0.0] * (LONGEST - rows)


class TextCursor:
    """A cursor that reads a text from a given place."""

    def __init__(self, text: Sequence[int], at: int, matched: int) -> None:
        self._text, self._at, self._matched = text, at, matched

    def offer(self) -> Offer:
        if not 0 <= self._at < len(self._text) or (token := self._text[self._at]) == SEPARATOR:
            return NOTHING
        return token, self._matched, 1.0

    def advance(self, token: int) -> None:
        if self._at >= 0 and self.offer()[0] == token:
            self._at, self._matched = self._at + 1, self._matched + 1
        else:
            self._at = -1


class PromptLookup:
    """PLD (Saxena 2023): drafts what followed the first occurrence of the text's last three, two or one tokens."""

    longest = 3

    def __init__(self) -> None:
        self.text: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.text = list(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def cursor(self) -> TextCursor:
        text = self.text
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            end = text[-n:]
            for at in range(len(text) - n):
                if text[at : at + n] == end:
                    return TextCursor(text, at + n, n)
        return TextCursor(text, -1, 0)


class SuffixLookup:
    """SAM (Hu et al. 2024): drafts what followed the first place of the longest match, in this text or past ones."""

    def __init__(self) -> None:
        self._seen, self._past = Seen(), Past()
        self._texts: list[int] = []
        self._read: list[int] = []

    def add(self, prompt: Sequence[int], reply: Sequence[int]) -> None:
        self._past.add(prompt, reply)
        self._texts += [*prompt[-PROMPT_TAIL:], *reply, SEPARATOR]

    def begin(self, prompt: Sequence[int]) -> None:
        self._seen.begin(prompt)
        self._past.begin(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        self._seen.extend(tokens)
        self._past.extend(tokens)

    def cursor(self) -> TextCursor:
        here = self._seen.automaton
        matched = here.length[here.seen]
        before, deep = self._past.match
        if deep > matched:
            return TextCursor(self._texts, self._past.automaton.end[before] + 1, deep)
        return TextCursor(self._seen.text, here.end[here.seen] + 1 if matched else -1, matched)


class Method:
    """A drafting method, with its memory of past cases."""

    suggestions: Suggestions | None = None

    def __init__(
        self, base: DraftSource, others: Sequence[str], length: DraftLengthController, model: Model, prior: float
    ) -> None:
        """`others` of `edgellm chat --retrieval` go beside `base`, whose lone offers are accepted with `prior`."""
        inside = continues_word(model)
        self._seen = Seen()  # where calibration looks for the reply's end
        self.base = base
        self._analogy, self._past = Analogy(), Past()
        self._calibration, self._reuse = Calibration(self._seen), Reuse(inside)
        beside: dict[str, DraftSource] = {
            "history": self._past,
            "analogy": self._analogy,
            "calibration": self._calibration,
            "reuse": self._reuse,
        }
        self.calibrates = "calibration" in others
        sources: dict[str, DraftSource] = {"base": base, **{name: beside[name] for name in others}}
        if self.calibrates:
            sources["none"] = _Mute(self._seen)
        self.drafter = RetrievalDrafter(
            sources,
            AcceptanceModel([prior, *(PRIORS[name] for name in others), 0.0]),
            length,
            inside=inside,
            is_eog=cache(model.is_eog),
            reuse=self._reuse if "reuse" in others else None,
            calibration=self._calibration if self.calibrates else None,
            hopeless=0.0 if not others else HOPELESS,
        )
        self._remembers = [part for part in (base, self._past, self._analogy) if hasattr(part, "add")]

    def begin(self, case: Reply) -> None: ...

    def end(self, case: Reply) -> None:
        for part in self._remembers:
            part.add(case.prompt.tolist(), case.reply)


class Ours:
    """Drafting as in edgellm, with its cost curve and all its memory."""

    suggestions: Suggestions | None = None

    def __init__(
        self, sources: Sequence[str], curve: CostCurve, model: Model, length: DraftLengthController | None = None
    ) -> None:
        """`sources` as in `edgellm chat --retrieval`; `length` replaces the rule that follows the curve."""
        self._memory = DraftIndex(sources, curve, continues_word(model), cache(model.is_eog), length=length)
        self.calibrates = "calibration" in sources
        self.drafter: Drafter | None = None

    def begin(self, case: Reply) -> None:  # noqa: ARG002
        self.drafter = self._memory.take()

    def end(self, case: Reply) -> None:
        self._memory.give()
        self._memory.add(PastConversation(case.prompt.tolist(), case.reply))
        self._memory.index_pending()


class Together(Ours):
    """The same with a draft model beside it, as in `edgellm chat`."""

    def __init__(self, sources: Sequence[str], curve: CostCurve, model: Model, small: ModelDrafter) -> None:
        """`small` is ready for this device: its curve is measured."""
        super().__init__(sources, curve, model)
        self._small = small

    def begin(self, case: Reply) -> None:  # noqa: ARG002
        self.suggestions = copies = self._memory.take()
        if copies is not None:
            self.drafter = HybridDrafter(copies, self._small, MAX_MODEL_DRAFT, self._memory.rounds)


class _Mute:
    """A source that follows the reply and offers nothing."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def begin(self, prompt: Sequence[int]) -> None:
        self._seen.begin(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        self._seen.extend(tokens)

    def cursor(self) -> TextCursor:
        return TextCursor((), -1, 0)


class Oracle(Drafter):
    """A drafter that knows the reply, and drafts as much of it as pays."""

    def __init__(self, length: DraftLengthController) -> None:
        self._length = length
        self._left: tuple[int, ...] = ()
        self._end = 0

    def reads(self, case: Reply) -> None:
        """Set the reply."""
        self._end = len(case.prompt) + len(case.reply)
        self._left = case.reply

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        left = self._left[len(self._left) - (self._end - len(state.ids)) :][:gamma]
        kept = left[: self._length.choose([1.0] * len(left))]
        return Chunk(np.array(kept, dtype=np.int32), np.ones(len(kept), dtype=np.float32), retrieved=True)

    def observe(self, state: GenerationState, turn: Round) -> None:  # noqa: ARG002
        if turn.verdict is not None:
            tokens = turn.verdict.accepted + len(turn.verdict.tokens)
            self._length.learn(len(turn.chunk), tokens, turn.seconds)


class Foresight:
    """The oracle as a method."""

    calibrates = False
    suggestions = None

    def __init__(self, length: DraftLengthController) -> None:
        self.drafter = Oracle(length)

    def begin(self, case: Reply) -> None:
        self.drafter.reads(case)

    def end(self, case: Reply) -> None: ...
