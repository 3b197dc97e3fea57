"""What each gate makes of a budget: quality by task family, beside baselines and an oracle (Synera, Table 4, Fig. 14).

    python -m bench.synera_quality [--cases 300] [--profiled 300] [--budgets 0.1 0.2 0.4] [--profile FILE]

Greedy replies of the bundled pair to held-out cases of all families in random order, with the pair's own profile, which
was made on other cases. Exact match, and ROUGE-1 for free text, in percent. Every gate is asked for the same share of
chunks (of tokens, replies for `hybrid` and `edgefm`) and held to it; what it really spent stands beside its score.
Chunks are as long as the profile's. A share of smaller chunks takes more passes of the verifier, so some gates are
there with chunks of other lengths too (`auto_1`, `auto_4`, `synera_4`, each with a profile of such chunks), and
`hybrid_even` has a budget that takes as many passes as that of `auto`, and for `auto_unheeded` the draft model does not
heed the context, with a profile to match. `published` is the paper's gate, with its chunks of four and nothing that
holds it to its budget. The oracle knows the verdicts on the draft model's own chunks and the right replies: it verifies
rejected chunks only, where that changes the score most; with `oracle_heeded` the draft model heeds the context, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.answers import MOST, Answers, Question, Remembering, answered, by_family, questions, reply_with
from bench.oracle import Course, oracle, path
from bench.report import machine, write
from edgellm.engine import Context, Model
from edgellm.llm import Pair
from edgellm.llm.pair_stats import find_profile, read_profile
from edgellm.spec.context_pool import ContextPool
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import SyneraGate
from edgellm.spec.state import GenerationState
from edgellm.storage import fingerprint, resolve
from edgellm.verifier.in_process import LocalVerifier
from models.corpus import HELD_OUT_SEED
from models.families import FAMILIES
from models.profile import CASES, prompts

POSITIONS = 1024
GATES = ("auto", "synera", "confidence", "importance", "random", "hybrid", "edgefm")
OTHERS = (("auto", 1), ("auto", 4), ("synera", 4))
UNHEEDED = "auto_unheeded"
"""Ours where the draft model does not heed the context, with a profile of its own."""
PAPERS = 4
"""Tokens of the paper's chunks."""


def profile_of(draft: Model, verifier: Model, given: Path | None) -> Profile:
    """The pair's own profile, or the given one."""
    hashes = fingerprint(draft.path), fingerprint(verifier.path)
    found = find_profile(*hashes) if given is None else read_profile(given, *hashes)
    if found is None:
        raise SystemExit("The pair has no profile: make one with `edgellm profile`.")
    return found


def at_budget(
    pairs: Mapping[int, Pair], paper: Profile, asked: Sequence[Question], budget: float
) -> dict[str, Answers]:
    """Every gate at one budget; `pairs` by the chunks of their profile, of which the first is the pair's own."""
    usual, own = next(iter(pairs.items()))
    found = {gate: answered(asked, reply_with(own, gate=gate, budget=budget)) for gate in GATES}
    found["hybrid_even"] = answered(asked, reply_with(own, gate="hybrid", budget=budget / usual))
    for gate, gamma in OTHERS:
        found[f"{gate}_{gamma}"] = answered(asked, reply_with(pairs[gamma], gate=gate, budget=budget))
    found[UNHEEDED] = answered(asked, reply_with(pairs[0], gate="auto", budget=budget, precedents=False))
    i_th = paper.i_th(budget)
    found["published"] = answered(asked, lambda question, seed: own.reply(
        question.messages, max_tokens=MOST, gamma=PAPERS, gate=Published(paper, i_th, seed)
    ))  # fmt: skip
    return found


def profiles(pool: Executor, arguments: argparse.Namespace, folder: Path) -> dict[int, Path]:
    """Profiles of the pair with chunks of other lengths, and at 0 one for which the context was not asked, on prompts
    that nothing else uses."""
    wanted: dict[int, dict[str, Any]] = {gamma: {"gamma": gamma} for gamma in {gamma for _, gamma in OTHERS} | {PAPERS}}
    wanted[0] = {"precedents": False}
    made = partial(profiled, arguments.draft, arguments.verifier, arguments.profiled, folder)
    return dict(pool.map(made, wanted.keys(), wanted.values()))


def profiled(
    draft: str, verifier: str, cases: int, folder: Path, number: int, options: dict[str, Any]
) -> tuple[int, Path]:
    """One profile, made with these options on so many cases of each family."""
    file = folder / f"{number}.json"
    with Pair.open(draft, verifier, threads=1) as pair:
        pair.profile(prompts(cases), **options).save(file)
    return number, file


class Published(SyneraGate):
    """The paper's gate, held to its budget by nothing but its thresholds."""

    def __init__(self, profile: Profile, i_th: float, seed: int) -> None:
        super().__init__(profile.c_th, i_th, seed, profile.usual_importance)
        self.layers = profile.layers


def against(ours: Answers, other: Answers, asked: Sequence[Question]) -> dict[str, Any]:
    """How far we are above another gate: on average with the 95 % half-width of paired differences, and where."""
    apart = by_family([a - b for a, b in zip(ours.scores, other.scores, strict=True)], asked)
    width = float(np.linalg.norm(list(apart["half_width_95"].values())) / len(FAMILIES))
    return {
        "mean": apart["mean"],
        "half_width_95": width,
        "above_on": sum(value > 0 for value in apart["families"].values()),
        "below_on": sum(value < 0 for value in apart["families"].values()),
    }


def figures_at(
    found: dict[str, Answers], best: dict[str, list[float]], never: Answers, always: Answers, asked: Sequence[Question]
) -> dict[str, Any]:
    """One budget: every gate, the oracles, and how our gate compares."""
    rows = {name: answers.figures(asked) for name, answers in found.items()}
    rows |= {name: by_family(scores, asked) for name, scores in best.items()}
    low, high = (by_family(each.scores, asked)["mean"] for each in (never, always))
    ours = rows["auto"]["mean"]
    return {
        "gates": rows,
        "ours_above": {name: against(found["auto"], other, asked) for name, other in found.items() if name != "auto"},
        **{f"recovered_of_{name}": (ours - low) / (rows[name]["mean"] - low) for name in best},
        "recovered_of_gap": (ours - low) / (high - low),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All budgets, each in a process of its own, as many at a time as there are cores."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(machine()["cores"], multiprocessing.get_context("spawn")) as pool,
    ):
        others = profiles(pool, arguments, Path(folder))
        several = list(pool.map(partial(at_one, arguments, others), arguments.budgets))
    figures = several[0]
    for found in several:
        figures["budgets"] |= found["budgets"]
    for budget in figures["budgets"]:
        sys.stdout.write(table(figures, budget))
    return figures


def at_one(arguments: argparse.Namespace, others: Mapping[int, Path], budget: float) -> dict[str, Any]:
    """One budget, with what it is compared with; `others` as `profiles` makes them."""
    asked = questions(arguments.cases)
    with ExitStack() as closing:
        small, big = (
            closing.enter_context(Model.load(resolve(name))) for name in (arguments.draft, arguments.verifier)
        )
        profile = profile_of(small, big, arguments.profile)
        local = LocalVerifier(big, ContextPool(lambda: Context(big, n_ctx=POSITIONS, threads=1)), POSITIONS)
        closing.callback(local.close)
        verifier = Remembering(local)
        pair = closing.enter_context(Pair(big, draft=small, verifier=verifier, profile=arguments.profile))
        pairs = {profile.gamma: pair} | {
            gamma: closing.enter_context(Pair(big, draft=small, verifier=verifier, profile=file))
            for gamma, file in others.items()
        }
        paper = read_profile(others[PAPERS], fingerprint(small.path), fingerprint(big.path))
        never = answered(asked, reply_with(pair, gate="never"))
        always = answered(asked, reply_with(pair, gate="always"))
        drafter = ModelDrafter(small, Context(small, n_ctx=POSITIONS, threads=1))
        closing.callback(drafter.close)
        session = verifier.open(GenerationState())
        paths: dict[str, list[Course]] = {}
        for name, hesitates in (("oracle", 0.0), ("oracle_heeded", profile.hesitates)):
            paths[name] = [
                path(
                    pair.prompt_ids(question.messages), question.score, alphabet=small, drafter=drafter,
                    session=session, gamma=profile.gamma, most=MOST, lookup_below=hesitates,
                )
                for question in asked
            ]  # fmt: skip
        found = at_budget(pairs, paper, asked, budget)
        best = {name: oracle(each, budget) for name, each in paths.items()}
        return {
            "cases": arguments.cases, "gamma": profile.gamma, "evidence": profile.evidence, "alpha": profile.alpha,
            "c_th": profile.c_th, "never": never.figures(asked), "always": always.figures(asked),
            "budgets": {str(budget): figures_at(found, best, never, always, asked)},
        }  # fmt: skip


def table(figures: dict[str, Any], budget: str) -> str:
    """One budget's table."""
    at = figures["budgets"][budget]
    lines = [
        f"budget {budget}",
        f"{'gate':11}{'share':>7}{'passes':>8}" + "".join(f"{family:>10}" for family in FAMILIES) + f"{'mean':>8}",
    ]
    for name, row in {"never": figures["never"], **at["gates"], "always": figures["always"]}.items():
        share, passes = (row.get(key) for key in ("share", "passes_per_token"))
        cells = "".join(f"{row['families'][family]:10.1f}" for family in FAMILIES)
        spent = "".join("" if value is None else f"{value:.3f}" for value in (share,)).rjust(7)
        lines.append(f"{name:11}{spent}{'' if passes is None else f'{passes:.3f}':>8}{cells}{row['mean']:8.2f}")
    above = ", ".join(
        f"{name} {found['mean']:+.2f} ±{found['half_width_95']:.2f} (above on {found['above_on']},"
        f" below on {found['below_on']})"
        for name, found in at["ours_above"].items()
    )
    lines.append(f"auto against {above}")
    lines.append(
        f"auto recovers {at['recovered_of_oracle']:.0%} of what the oracle does"
        f" ({at['recovered_of_oracle_heeded']:.0%} of what it does where its draft model heeds the context), and"
        f" {at['recovered_of_gap']:.0%} of the gap between the models"
    )
    return "\n".join(lines) + "\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="a family")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.4])
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--verifier", default="edgellm-verifier")
    parser.add_argument("--profile", type=Path, help="another than the pair's own")
    parser.add_argument("--profiled", type=int, default=CASES, help="cases a family, for profiles other than the own")
    parser.add_argument("--name", default="synera_quality", help="of the result file")
    arguments = parser.parse_args()
    write(arguments.name, "bench.synera_quality", run(arguments), HELD_OUT_SEED)


if __name__ == "__main__":
    main()
