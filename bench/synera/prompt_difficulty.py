"""Measure what the words of a prompt are worth to the gate `auto`, on pairs of the bundled verifier.

    python -m bench.synera.prompt_difficulty [--layers 0 7] [--cases 150] [--profiled 300] [--budgets 0.1 0.2 0.4]

The draft model is the bundled one (`--layers 0`), or as many of the verifier's first layers with its head. Each pair is
profiled once; from the same observations one profile is fitted with the prompts, and one without them. Both answer the
same held-out questions with the same seeds, and each keeps its budget by its own count.

Columns: mean score of all families in percent without and with the prompts, the difference with the 95 % half-width of
paired differences, and the shares that were verified.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.harness.report import write
from edgellm.engine.gguf.shard import cut
from edgellm.llm import LLM
from edgellm.spec.gates.fitting import build
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.profiler import Run
from edgellm.storage import resolve
from models.home.corpus import HELD_OUT_SEED
from models.home.families import FAMILIES
from models.pairs import PAIRS
from models.profile import CASES, prompts
from testkit.questions import Answers, Question, answered, by_family, questions, reply_with

VERIFIER = "edgellm-verifier"
ARMS = ("without", "with")


def draft_of(layers: int, folder: Path) -> str:
    """Return the draft model that consists of the verifier's first `layers` layers; 0: the bundled one."""
    if not layers:
        return "edgellm-draft"
    path = folder / f"first-{layers}.gguf"
    cut(resolve(VERIFIER), path, 0, layers - 1, head=True)
    return str(path)


def profiles(draft: str, count: int, folder: Path) -> dict[str, Path]:
    """Profile the pair on `count` prompts of each family, and return the files of both profiles by arm."""
    fitted: list[Profile] = []

    def both(runs: Sequence[Run], *, prompts: Sequence[Any], **fields: Any) -> Profile:
        fitted.extend((build(runs, **fields), build(runs, prompts=prompts, **fields)))
        return fitted[-1]

    patched = patch("edgellm.llm.profiling.build", both)  # the observations themselves are not returned
    with patched, LLM.open(draft, VERIFIER, threads=1) as pair:
        pair.profile(prompts(PAIRS["home"], count))
    files = {arm: folder / f"{arm}.json" for arm in ARMS}
    for arm, profile in zip(ARMS, fitted, strict=True):
        profile.save(files[arm])
    return files


def compared(found: Mapping[str, Answers], cases: Sequence[Question]) -> dict[str, Any]:
    """Return the scores of both arms, the difference with its 95 % half-width, and the shares."""
    apart = by_family(np.subtract(found["with"].scores, found["without"].scores).tolist(), cases)
    return {
        **{arm: by_family(answers.scores, cases)["mean"] for arm, answers in found.items()},
        "gain": apart["mean"],
        "half_width_95": float(np.linalg.norm(list(apart["half_width_95"].values())) / len(FAMILIES)),
        "shares": {arm: answers.share for arm, answers in found.items()},
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each pair at each budget."""
    cases, figures = questions(arguments.cases), {}
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            draft = draft_of(layers, folder)
            files = profiles(draft, arguments.profiled, folder)
            at = {}
            for budget in arguments.budgets:
                found = {}
                for arm, file in files.items():
                    with LLM.open(draft, VERIFIER, threads=1, profile=file, history=False) as pair:
                        found[arm] = answered(cases, reply_with(pair, gate="auto", budget=budget))
                at[str(budget)] = compared(found, cases)
        figures[f"first {layers} layers" if layers else "bundled"] = at
        sys.stdout.write(table({"pairs": figures, "questions": len(cases)}))
    return {"questions": len(cases), "profiled": arguments.profiled * len(FAMILIES), "pairs": figures}


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each pair and budget."""
    head = ("draft model", "budget", "without", "with", "difference", "shares")
    lines = [f"{head[0]:<16}{head[1]:>7}{head[2]:>9}{head[3]:>7}{head[4]:>15}{head[5]:>15}"]
    for pair, budgets in found["pairs"].items():
        for budget, row in budgets.items():
            gain = f"{row['gain']:+.2f} ±{row['half_width_95']:.2f}"
            shares = ", ".join(f"{row['shares'][arm]:.3f}" for arm in ARMS)
            lines.append(f"{pair:<16}{budget:>7}{row['without']:>9.2f}{row['with']:>7.2f}{gain:>15}{shares:>15}")
    return "\n".join(lines) + f"\n{found['questions']} questions\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 7], help="0: the bundled draft model")
    parser.add_argument("--cases", type=int, default=150, help="a family")
    parser.add_argument("--profiled", type=int, default=CASES, help="a family")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.4])
    parser.add_argument("--name", default="prompt_difficulty", help="of the result file")
    arguments = parser.parse_args()
    write(arguments.name, "bench.synera.prompt_difficulty", run(arguments), HELD_OUT_SEED)


if __name__ == "__main__":
    main()
