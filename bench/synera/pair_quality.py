"""Judge a pair that the repository makes through llama.cpp on held-out cases, for the table of the model card.

Greedy. Columns, for each family: exact match of the draft model alone, of the verifier alone, and of both together with
every chunk verified; ROUGE-1 of both models; the share of chunks of four drafted tokens that were accepted whole; and
the mean acceptance length, in tokens for each verification.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import edgellm
from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.cli.options import DRAFT, VERIFIER, HardwareOptions
from edgellm.engine import Message
from edgellm.spec.stats import Summary
from models.case import Case
from models.pairs import PAIRS
from testkit.questions import PairName, pair_files, rouge

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
        self.rouge += rouge(case.answer, text)
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


def measure(hardware: HardwareOptions, pair: PairName = "home", cases: Annotated[int, "a family"] = 300) -> Figures:
    """Return the scores of both models alone and together, by family."""
    made, files = PAIRS[pair], pair_files(pair)
    chosen = {
        "draft": (files.draft, "none"),
        "verifier": ("none", files.verifier),
        "pair": (files.draft, files.verifier),
    }
    families: dict[str, Figures] = {family: {} for family in made.families}
    own, own_draft = hardware.of(VERIFIER), hardware.of(DRAFT)
    for mode, family in track([(mode, family) for mode in MODES for family in made.families], "families"):
        score = Score()
        with edgellm.LLM.open(*chosen[mode], hardware=own, draft_hardware=own_draft) as opened:
            for case, text, summary in replies(opened, list(made.held_out(family, cases))):
                score.add(case, text, summary)
        families[family][mode] = score.figures()
    chunks = sum(row["pair"]["chunks"] for row in families.values())
    whole = sum(row["pair"]["chunks_accepted_whole"] * row["pair"]["chunks"] for row in families.values()) / chunks
    return {"families": families, "chunks_accepted_whole": whole, "chunks": chunks}


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
