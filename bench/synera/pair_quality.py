"""Judge a pair that the repository makes through llama.cpp on held-out cases, for the table of the model card.

    python -m bench.synera.pair_quality [--pair home] [--cases 300] [--draft PATH] [--verifier PATH]

Greedy. Columns, for each family: exact match of the draft model alone, of the verifier alone, and of both together with
every chunk verified; ROUGE-1 of both models; the share of chunks of four drafted tokens that were accepted whole; and
the mean acceptance length, in tokens for each verification.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import edgellm
from bench.harness import hardware
from bench.harness.report import write
from edgellm.cli.options.hardware import DRAFT
from edgellm.engine import Message
from edgellm.spec.types import Summary
from models.case import Case
from models.home.corpus import HELD_OUT_SEED
from models.pairs import PAIRS
from testkit.questions import rouge_1

MODES = ("draft", "verifier", "pair")


@dataclass(slots=True)
class Score:
    """Counts over the cases of a family."""

    cases: int = 0
    exact: int = 0
    rouge: float = 0.0
    tokens: int = 0
    chunks: int = 0
    whole: int = 0
    lengths: list[float] = field(default_factory=list)

    def add(self, case: Case, text: str, summary: Summary) -> None:
        self.cases += 1
        self.exact += text == case.answer
        self.rouge += rouge_1(case.answer, text)
        self.tokens += summary.tokens
        self.chunks += summary.chunks_verified
        self.whole += summary.chunks_accepted_whole
        if summary.mean_acceptance_length is not None:
            self.lengths.append(summary.mean_acceptance_length)

    def figures(self) -> dict[str, Any]:
        share = self.exact / self.cases
        return {
            "cases": self.cases,
            "exact": share,
            "exact_95": 1.96 * math.sqrt(share * (1 - share) / self.cases),
            "rouge_1": 100 * self.rouge / self.cases,
            "tokens": self.tokens / self.cases,
            "chunks_accepted_whole": self.whole / self.chunks if self.chunks else None,
            "chunks": self.chunks,
            "mean_acceptance_length": sum(self.lengths) / len(self.lengths) if self.lengths else None,
        }


def replies(pair: edgellm.LLM, cases: Iterable[Case]) -> Iterator[tuple[Case, str, Summary]]:
    """Return greedy replies to `cases`."""
    for case in cases:
        reply = pair.reply([Message(turn.role, turn.text) for turn in case.prompt], max_tokens=96, retrieval="off")
        for _ in reply:
            pass
        yield case, reply.summary.text, reply.summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="a family")
    parser.add_argument("--pair", choices=PAIRS, default="home")
    parser.add_argument("--draft", help="the pair's by default")
    parser.add_argument("--verifier", help="the pair's by default")
    parser.add_argument("--name", default="pair_quality", help="of the result file")
    parser.add_argument("--show", type=int, default=0, help="the verifier's mistakes to print for each family")
    hardware.add_arguments(parser)
    arguments = parser.parse_args()
    made = PAIRS[arguments.pair]
    draft, verifier = (getattr(arguments, name) or str(made.folder / f"{name}.gguf") for name in ("draft", "verifier"))
    chosen = {"draft": (draft, "none"), "verifier": ("none", verifier), "pair": (draft, verifier)}
    families: dict[str, dict[str, Any]] = {family: {} for family in made.families}
    own, own_draft = hardware.of(arguments), hardware.of(arguments, DRAFT)
    for mode in MODES:
        with edgellm.LLM.open(*chosen[mode], hardware=own, draft_hardware=own_draft) as pair:
            for family in made.families:
                score, shown = Score(), 0
                for case, text, summary in replies(pair, list(made.held_out(family, arguments.cases))):
                    score.add(case, text, summary)
                    if mode == "verifier" and text != case.answer and shown < arguments.show:
                        shown += 1
                        sys.stdout.write(
                            f"{family}: {case.prompt[-1].text!r}\n  right {case.answer!r}\n  wrote {text!r}\n"
                        )
                families[family][mode] = score.figures()
    chunks = sum(row["pair"]["chunks"] for row in families.values())
    whole = sum(row["pair"]["chunks_accepted_whole"] * row["pair"]["chunks"] for row in families.values()) / chunks
    figures = {"families": families, "chunks_accepted_whole": whole, "chunks": chunks}
    write(arguments.name, "bench.synera.pair_quality", figures, HELD_OUT_SEED)
    sys.stdout.write(table(figures))


def table(figures: dict[str, Any]) -> str:
    """Return the table of the model card: a line for each family, and a summary."""
    columns = ("draft", "verifier", "pair", "R-1 draft", "R-1 verif.", "whole chunks", "length")
    lines = [f"{'family':10}" + "".join(f" {column:>12}" for column in columns)]
    for family, row in figures["families"].items():
        cells = [f"{row[mode]['exact']:.1%} ±{row[mode]['exact_95']:.1%}" for mode in MODES]
        cells += [f"{row[mode]['rouge_1']:.1f}" for mode in ("draft", "verifier")]
        cells += [f"{row['pair']['chunks_accepted_whole']:.1%}", f"{row['pair']['mean_acceptance_length']:.2f}"]
        lines.append(f"{family:10}" + "".join(f" {cell:>12}" for cell in cells))
    cases = next(iter(figures["families"].values()))["pair"]["cases"]
    lines.append(f"{cases} held-out cases a family; of {figures['chunks']} drafted chunks ")
    lines[-1] += f"{figures['chunks_accepted_whole']:.1%} were accepted whole"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
