"""Sweep the threshold of the early exit: the share of tokens that leave early, and the time saved (Synera, Fig. 17).

    python -m bench.synera.early_exit [--cases 40] [--thresholds 0.3 0.5 0.7 0.9 1.0] [--draft PATH]

The draft model alone, cut after the first layer of its last quarter, answers held-out cases of every family. A token
leaves early if its probability exceeds that of the second one by more than the threshold. At 1.0 none does, which is
the cost of the cut itself.

Columns: `score` of the replies; `agreement`, the share of replies that equal those of full depth; `left`, the share of
tokens that left early; and `time` of a token against full depth, over equal replies.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench.harness.figures import empty_plot, save_plot
from bench.harness.report import write
from bench.harness.statistics import spread
from edgellm.llm import LLM
from models.home.corpus import HELD_OUT_SEED
from testkit.questions import MOST, Question, parsed_with_pair, questions


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


def run(draft: str, made: str, cases: int, thresholds: list[float]) -> list[dict[str, Any]]:
    """Return a row for each threshold; `made` is the pair whose questions are asked."""
    full = Setting({"early_exit": "off"})
    settings = {threshold: Setting({"early_exit": "on", "exit_threshold": threshold}) for threshold in thresholds}
    with LLM.open(draft, "none", threads=1) as pair:
        drawn = questions(cases, pair=made)
        for setting in (full, *settings.values()):  # not by question, as only drafters of one kind are kept open
            for question in drawn:
                setting.answer(pair, question)
    rows = []
    for threshold, setting in settings.items():
        both = zip(setting.seconds, full.seconds, setting.texts, full.texts, strict=True)
        ratios = [ours / theirs for ours, theirs, *texts in both if texts[0] == texts[1] and not isnan(theirs)]
        rows.append(
            {
                "threshold": threshold,
                "score": sum(setting.scores) / len(drawn),
                "full_score": sum(full.scores) / len(drawn),
                "agreement": sum(a == b for a, b in zip(setting.texts, full.texts, strict=True)) / len(drawn),
                "left": setting.exits / setting.tokens,
                "time": median(ratios),
                "time_spread": spread(ratios),
            }
        )
    return rows


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each threshold."""
    rows = results["thresholds"]
    lines = [f"{'threshold':>9}{'score':>8}{'agreement':>11}{'left':>7}{'time':>7}"]
    lines += [
        f"{row['threshold']:9g}{row['score']:8.1f}{row['agreement']:11.1%}{row['left']:7.1%}{row['time']:7.2f}"
        for row in rows
    ]
    return "\n".join([*lines, f"full depth: {rows[0]['full_score']:.1f}"]) + "\n"


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw score and share of tokens that leave early, against the threshold (Fig. 17)."""
    made = empty_plot("The early exit's threshold", "threshold of the margin", "%")
    if made is None:
        return None
    figure, axes = made
    rows = found["thresholds"]
    for name, style in (("score", "-o"), ("left", "--s"), ("agreement", ":^")):
        scale = 1.0 if name == "score" else 100.0
        axes.plot([row["threshold"] for row in rows], [scale * row[name] for row in rows], style, label=name)
    return save_plot(figure, axes, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40, help="a family")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.9, 1.0])
    parser.add_argument("--name", default="early_exit", help="of the result file")
    arguments = parsed_with_pair(parser)
    rows = run(arguments.draft, arguments.pair, arguments.cases, arguments.thresholds)
    print(table({"thresholds": rows}), end="")
    print(
        f"written: {write(arguments.name, 'bench.synera.early_exit', {'thresholds': rows}, HELD_OUT_SEED, plot=plot)}"
    )


if __name__ == "__main__":
    main()
