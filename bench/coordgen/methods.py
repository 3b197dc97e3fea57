"""The drafting methods that are compared: PLD, SAM, our sources on top of them, ours, and an oracle."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from bench.coordgen.tasks import Reply
from edgellm.engine import Model
from edgellm.llm.drafting import continues_word
from edgellm.llm.reply import MAX_MODEL_DRAFT
from edgellm.spec.drafters.model import HybridDrafter, ModelDrafter
from edgellm.spec.drafting.acceptance import EvidenceAcceptance
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.drafting.policy import Bid, DraftPolicy
from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.ngram.retriever import DraftIndex, Retriever
from edgellm.spec.ngram.reuse import Reuse
from edgellm.spec.ngram.sources import NOTHING, PROMPT_TAIL, SEPARATOR, DraftSource, Guess
from edgellm.spec.ngram.sources import ContextIndex as Seen
from edgellm.spec.ngram.sources import HistoryIndex as Past
from edgellm.spec.params import SOURCES
from edgellm.spec.protocols import Drafter, GenerationState
from edgellm.spec.types import Chunk, Round

MOST = 40
"""Tokens of a draft for methods that ignore costs: the length that SAM's authors use."""


class Everything(DraftPolicy):
    """Copies all that is offered, up to a length, at any cost."""

    def __init__(self, copy_chances: EvidenceAcceptance | None = None, most: int = MOST) -> None:
        super().__init__(CostCurve((1, 64), (1.0, 1.0)), copy_chances)
        self._most = most

    def looks(self, known: int) -> bool:  # noqa: ARG002
        return True

    def bid(self, survives: Sequence[float], room: int) -> Bid:
        return Bid(min(len(survives), room, self._most))

    def floor(self, rows: int) -> float:  # noqa: ARG002
        return 0.0


class TextCursor:
    """A cursor that reads a text from a given place."""

    def __init__(self, text: Sequence[int], at: int, matched: int) -> None:
        self._text, self._at, self._matched = text, at, matched

    def offer(self) -> Guess:
        if not 0 <= self._at < len(self._text) or (token := self._text[self._at]) == SEPARATOR:
            return NOTHING
        return Guess(token, self._matched, 1.0)

    def advance(self, token: int) -> None:
        if self._at >= 0 and self.offer().token == token:
            self._at, self._matched = self._at + 1, self._matched + 1
        else:
            self._at = -1


class PromptLookup(DraftSource):
    """PLD (Saxena 2023): drafts what followed the first occurrence of the text's last three, two or one tokens."""

    longest = matched = 3

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


class SuffixLookup(DraftSource):
    """SAM (Hu et al. 2024): drafts what followed the first place of the longest match, in this text or past ones."""

    @property
    def matched(self) -> int:
        return max(self._seen.matched, self._past.matched)

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
        before, deep = self._past.state, self._past.matched
        if deep > matched:
            return TextCursor(self._texts, self._past.automaton.end[before] + 1, deep)
        return TextCursor(self._seen.text, here.end[here.seen] + 1 if matched else -1, matched)


class Method:
    """A drafting method, with its memory of past cases."""

    def __init__(
        self,
        base: DraftSource,
        others: Sequence[str],
        policy: Callable[[EvidenceAcceptance], DraftPolicy],
        model: Model,
        prior: float,
    ) -> None:
        """`others` of `edgellm chat --retrieval` go beside `base`, whose lone offers are accepted with `prior`."""
        inside = continues_word(model)
        seen, self.base = Seen(), base  # where calibration looks for the reply's end
        self.calibrates = "calibration" in others
        beside: dict[str, DraftSource] = {
            "history": Past(), "calibration": Calibration(seen), "reuse": Reuse(inside),
        }  # fmt: skip
        others = [name for name in others if name in beside]  # A task has no JSON schema.
        sources: dict[str, DraftSource | None] = {"base": base, **{name: beside[name] for name in others}}
        if self.calibrates:
            sources["none"] = _Mute(seen)
        chances = EvidenceAcceptance([prior, *(SOURCES[name] for name in others), 0.0])
        self.retriever = Retriever(sources, chances, inside=inside, is_eog=cache(model.is_eog))
        self.drafter = HybridDrafter(policy(chances), self.retriever)
        self._remembers = [part for part in (base, *beside.values()) if hasattr(part, "add")]

    def begin(self, case: Reply) -> None: ...

    def end(self, case: Reply) -> None:
        for part in self._remembers:
            part.add(case.prompt.tolist(), case.reply)


class Ours:
    """Drafting as in edgellm, with its cost curve and all its memory."""

    def __init__(
        self, sources: Sequence[str], policy: DraftPolicy, model: Model, small: ModelDrafter | None = None
    ) -> None:
        """`sources` as in `edgellm chat --retrieval`; `small` is a draft model beside them."""
        self._memory = DraftIndex(policy, continues_word(model), cache(model.is_eog))
        self._sources, self._small = sources, small
        self.calibrates = "calibration" in sources
        self.retriever: Retriever | None = None
        self.drafter: Drafter | None = None

    def begin(self, case: Reply) -> None:  # noqa: ARG002
        self.retriever = self._memory.take(self._sources)
        if self.retriever is not None:
            self.drafter = HybridDrafter(self._memory.policy, self.retriever, self._small, MAX_MODEL_DRAFT)

    def end(self, case: Reply) -> None:
        self._memory.give()
        self._memory.add(case.prompt.tolist(), case.reply)


class _Mute(DraftSource):
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

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self._left: tuple[int, ...] = ()
        self._end = 0

    def reads(self, case: Reply) -> None:
        """Set the reply."""
        self._end = len(case.prompt) + len(case.reply)
        self._left = case.reply

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        left = self._left[len(self._left) - (self._end - len(state.ids)) :][:gamma]
        bid = self._policy.bid([1.0] * len(left), gamma)
        kept = left[: bid.copies]
        return Chunk(np.array(kept, dtype=np.int32), np.ones(len(kept), dtype=np.float32), retrieved=True)

    def observe(self, state: GenerationState, turn: Round) -> None:  # noqa: ARG002
        self._policy.observe(turn)


class Foresight:
    """The oracle as a method."""

    calibrates = False
    retriever = None

    def __init__(self, policy: DraftPolicy) -> None:
        self.drafter = Oracle(policy)

    def begin(self, case: Reply) -> None:
        self.drafter.reads(case)

    def end(self, case: Reply) -> None: ...
