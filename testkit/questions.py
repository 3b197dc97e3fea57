"""Held-out questions for a pair that the repository makes, scores of replies to them, and a verifier that remembers its
verdicts."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from edgellm.engine import Message
from edgellm.errors import ModelNotFound
from edgellm.llm import LLM
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, VerifyRequest, settled
from edgellm.spec.stream import Reply
from edgellm.spec.types import Verdict
from models.case import Case
from models.home.corpus import HELD_OUT_SEED
from models.home.families import FAMILIES
from models.pairs import PAIRS

MOST = 96  # tokens of a reply
ASKED = {"home": tuple(FAMILIES), "code": PAIRS["code"].families}
"""The families of questions for each pair: those of the papers."""


PairName: TypeAlias = Literal["home", "code"]
"""Whose questions are asked."""


@dataclass(frozen=True, slots=True)
class PairFiles:
    """What opens a pair: names or files of both models, and the file of its profile where it is not found by itself."""

    draft: str
    verifier: str
    profile: Path | None


def pair_files(name: PairName) -> PairFiles:
    """Return the files of a pair.

    Raises:
        ModelNotFound: the code pair, which is not bundled, has not been made.
    """
    if name == "home":
        return PairFiles("edgellm-draft", "edgellm-verifier", None)
    pair = PAIRS[name]
    draft, verifier = (pair.file(role) for role in ("draft", "verifier"))
    for file in (draft, verifier):
        if not file.exists():
            raise ModelNotFound(f"{file} is not there.", f"Make it: python -m models.make --pair {name}")
    return PairFiles(str(draft), str(verifier), pair.profile if pair.profile.exists() else None)


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out case, as a conversation."""

    case: Case
    messages: list[Message]

    @property
    def family(self) -> str:
        return self.case.family

    def score(self, text: str) -> float:
        """Return exact match, or ROUGE-1 for free text, in percent."""
        if self.case.metric == "rouge":
            return 100.0 * rouge(self.case.answer, text)
        return 100.0 * (text == self.case.answer)


def questions(count: int, seed: int = HELD_OUT_SEED, pair: str = "home") -> list[Question]:
    """Return `count` questions of each family of a pair, in random order."""
    cases = [
        Question(case, [Message(turn.role, turn.text) for turn in case.prompt])
        for family in ASKED[pair]
        for case in PAIRS[pair].held_out(family, count, seed)
    ]
    random.Random(seed).shuffle(cases)
    return cases


@dataclass
class Answers:
    """Scores in the order of the questions, and the cost of the replies."""

    scores: list[float] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    passes: float = 0.0
    share: float | None = None

    def add(self, question: Question, reply: Reply) -> None:
        for _ in reply:
            pass
        summary = reply.summary
        self.scores.append(question.score(summary.text))
        self.tokens += summary.tokens
        self.drafted += summary.drafted
        self.passes += (summary.verifier_passes_per_token or 0.0) * summary.tokens
        self.share = summary.share_offloaded

    def figures(self, cases: Sequence[Question]) -> dict[str, Any]:
        return by_family(self.scores, cases) | {"share": self.share, "passes_per_token": self.passes / self.tokens}


def answered(cases: Sequence[Question], answer: Callable[[Question, int], Reply]) -> Answers:
    """Answer all questions, each with a seed of its own, and return their scores."""
    answers = Answers()
    for seed, question in enumerate(cases):
        answers.add(question, answer(question, seed))
    return answers


def reply_with(pair: LLM, **options: Any) -> Callable[[Question, int], Reply]:
    """Return a function that answers a question by the pair under `options`, by default greedily."""
    return lambda question, seed: pair.reply(question.messages, max_tokens=MOST, seed=seed, retrieval="off", **options)


def by_family(scores: Sequence[float], cases: Sequence[Question]) -> dict[str, Any]:
    """Return the mean of each family with its 95 % half-width, and the mean over families."""
    means, widths = {}, {}
    for family in dict.fromkeys(question.family for question in sorted(cases, key=_order)):
        part = np.array([score for score, question in zip(scores, cases, strict=True) if question.family == family])
        means[family] = float(part.mean())
        widths[family] = float(1.96 * part.std() / len(part) ** 0.5)
    return {"families": means, "half_width_95": widths, "mean": float(np.mean(list(means.values())))}


def _order(question: Question) -> int:
    return next(families.index(question.family) for families in ASKED.values() if question.family in families)


class Remembering(Verifier):
    """A verifier that remembers greedy verdicts, which depend only on the text and the chunk.

    `checked` counts the drafted tokens that it was asked about.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.checked = 0
        self._verifier = verifier
        self._session: Session | None = None
        self._known: dict[tuple[bytes, bytes, int], Verdict] = {}

    @property
    def capabilities(self) -> Capabilities:
        own = self._verifier.capabilities
        return Capabilities(own.name, own.context_length)

    def open(self, state: GenerationState) -> Session:
        if not state.sampling.greedy:
            raise ValueError("only greedy verdicts can be remembered")
        if self._session is None:
            self._session = self._verifier.open(GenerationState())
        return Session(state, self._verdict)  # not closed with the reply: it is used again for the next one

    def _verdict(self, request: VerifyRequest) -> Future[Verdict]:
        self.checked += len(request.draft)
        key = request.prefix.tobytes(), request.draft.ids.tobytes(), request.extra
        if key not in self._known:
            assert self._session is not None
            self._known[key] = self._session.submit(request.prefix, request.draft, request.extra).result()
        return settled(self._known[key])


def rouge(right: str, written: str, kind: str = "rouge1") -> float:
    """Return the F-measure of shared words, from 0 to 1, as the papers report it, or of another kind of ROUGE."""
    from rouge_score.rouge_scorer import RougeScorer  # of the `bench` extra

    return float(RougeScorer([kind]).score(right, written)[kind].fmeasure)
