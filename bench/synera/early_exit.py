"""Sweep the threshold of the early exit: the share of tokens that leave early, and the time saved (Synera, Fig. 17).

The draft model alone, cut after the first layer of its last quarter, answers held-out cases of every family. A token
leaves early if its probability exceeds that of the second one by more than the threshold. At 1.0 none does, which is
the cost of the cut itself.

Columns: `score` of the replies; `agreement`, the share of replies that equal those of full depth; `left`, the share of
tokens that left early; and `time` of a token against full depth, over equal replies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from statistics import median
from time import perf_counter
from typing import Annotated, Any

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import spread
from edgellm.llm import LLM
from edgellm.storage.model_files import HOME
from testkit.questions import MOST, Question, questions


@dataclass
class Setting:
    """One threshold, or full depth."""

    options: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of a token, for each reply
    tokens: int = 0
    exits: int = 0

    def answer(self, pair: LLM, question: Question) -> None:
        reply = pair.reply(question.messages, max_tokens=MOST, retrieval="off", **self.options)
        moments = [perf_counter() for _ in reply]
        summary = reply.summary
        self.texts.append(summary.text)
        self.scores.append(question.score(summary.text))
        self.seconds.append((moments[-1] - moments[0]) / (len(moments) - 1) if len(moments) > 5 else float("nan"))
        self.tokens += summary.tokens
        self.exits += summary.exits


def row(threshold: float, setting: Setting, full: Setting, questions: int) -> Figures:
    """Return the figures of a threshold, beside those of full depth."""
    both = zip(setting.seconds, full.seconds, setting.texts, full.texts, strict=True)
    ratios = [ours / theirs for ours, theirs, *texts in both if texts[0] == texts[1] and not isnan(theirs)]
    return {
        "threshold": threshold,
        "score": sum(setting.scores) / questions,
        "full_score": sum(full.scores) / questions,
        "agreement": sum(a == b for a, b in zip(setting.texts, full.texts, strict=True)) / questions,
        "left": setting.exits / setting.tokens,
        "time": median(ratios),
        "time_spread": spread(ratios),
    }


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each threshold."""
    rows = results["thresholds"]
    lines = [f"{'threshold':>9}{'score':>8}{'agreement':>11}{'left':>7}{'time':>7}"]
    lines += [
        f"{row['threshold']:9g}{row['score']:8.1f}{row['agreement']:11.1%}{row['left']:7.1%}{row['time']:7.2f}"
        for row in rows
    ]
    return "\n".join([*lines, f"full depth: {rows[0]['full_score']:.1f}"]) + "\n"


def measure(cases: Annotated[int, "a family"] = 40, thresholds: Sequence[float] = (0.3, 0.5, 0.7, 0.9, 1.0)) -> Figures:
    """Return a row for each threshold."""
    full = Setting({"early_exit": False})
    settings = {threshold: Setting({"early_exit": True, "exit_threshold": threshold}) for threshold in thresholds}
    drawn = questions(cases)
    with LLM.open(HOME.draft, "none", threads=1) as alone:
        for setting in track((full, *settings.values()), "thresholds"):  # as only drafters of one kind are kept open
            for question in track(drawn, "questions"):
                setting.answer(alone, question)
    return {"thresholds": [row(threshold, one, full, len(drawn)) for threshold, one in settings.items()]}
