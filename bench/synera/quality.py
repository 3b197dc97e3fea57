"""Measure the quality of each gate at a budget, by task family (Synera, Table 4 and Fig. 14).

The bundled pair answers held-out cases of all families greedily, in random order, with its own profile, which was made
on other cases. Every gate has the same budget of chunks and is held to it; those of `hybrid` and `edgefm` are of tokens
and of replies.

Columns: `share` is the share that was really verified, `passes` the verifier's passes for each token. Then the score of
each family in percent, which is exact match, or ROUGE-1 for free text, and the mean over all families. Half-widths are
those of 95 % confidence.

Chunks are as long as the profile's. With smaller chunks the same share takes more passes of the verifier. So some gates
also run with other lengths (`auto_1`, `auto_4`, `synera_4`), each with a profile of such chunks, and `hybrid_even` has
a budget that takes as many passes as that of `auto`. In `auto_no_lookup` the draft model does not look up the context,
and the profile matches that. `published` is the paper's gate with its chunks of four, which is not held to its budget.
The oracle knows the verdicts on the draft model's own chunks and the right replies. It verifies only rejected chunks,
where that raises the score most; in `oracle_lookup` the draft model looks up the context, too.
"""

import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from bench.harness.figures import pyplot
from bench.harness.progress import track
from bench.harness.results import Figures, cores
from bench.synera.baselines import edgefm, hybrid
from bench.synera.oracle_gate import Course, oracle, path
from edgellm.engine import Context, ContextSpec, Model
from edgellm.llm import LLM
from edgellm.llm.pair_stats import find_profile, read_profile
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import Rule
from edgellm.spec.gates.synera import above, i_th
from edgellm.spec.protocols import GenerationState
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.model_files import resolve
from edgellm.verifier.in_process import LocalVerifier
from models.pairs import PAIRS
from models.profile import prompts
from testkit.questions import (
    MOST,
    Answers,
    PairName,
    Question,
    Remembering,
    answered,
    by_family,
    pair_files,
    questions,
    reply_with,
)

POSITIONS = 1024
GATES = ("auto", "synera", "confidence", "importance", "random")
OTHERS = (("auto", 1), ("auto", 4), ("synera", 4))
NO_LOOKUP = "auto_no_lookup"
"""Our gate with a draft model that does not look up the context, and its own profile."""
PAPERS = 4
"""Tokens of the paper's chunks."""


def profile_of(draft: Path, verifier: Path, given: Path | None) -> Profile:
    """Return the pair's own profile, or the given one."""
    hashes = fingerprint(draft), fingerprint(verifier)
    found = find_profile(*hashes) if given is None else read_profile(given, *hashes)
    if found is None:
        raise SystemExit("The pair has no profile: make one with `edgellm profile`.")
    return found


def remembering(model: Model, closing: ExitStack) -> Remembering:
    """Return a verifier in this process that remembers its verdicts; `closing` closes what it uses."""
    local = LocalVerifier(model, ContextSpec(n_ctx=POSITIONS, threads=1))
    closing.callback(local.close)
    return Remembering(local)


def at_budget(
    pairs: Mapping[int, LLM], alone: LLM, profile: Profile, paper: Profile, cases: Sequence[Question], budget: float
) -> dict[str, Answers]:
    """Return the answers of every gate at one budget; `pairs` by the chunks of their profile, the pair's own first."""
    usual, own = next(iter(pairs.items()))
    found = {gate: answered(cases, reply_with(own, gate=gate, budget=budget)) for gate in GATES}
    found["hybrid"] = hybrid(own, profile, budget, cases)
    found["edgefm"] = edgefm(own, alone, profile, budget, cases)
    found["hybrid_even"] = hybrid(own, profile, budget / usual, cases)
    for gate, gamma in OTHERS:
        found[f"{gate}_{gamma}"] = answered(cases, reply_with(pairs[gamma], gate=gate, budget=budget))
    found[NO_LOOKUP] = answered(cases, reply_with(pairs[0], gate="auto", budget=budget, context_lookup=False))
    threshold = i_th(paper, budget)
    found["published"] = answered(cases, lambda question, seed: own.reply(
        question.messages, max_tokens=MOST, gamma=PAPERS, gate=Published(paper, threshold, seed)
    ))  # fmt: skip
    return found


def profiles(pool: Executor, pair: PairName, cases: int, folder: Path) -> dict[int, Path]:
    """Return profiles by length of chunks, and at 0 one without context lookup, on prompts that nothing else uses."""
    lengths = {gamma for _, gamma in OTHERS} | {PAPERS}
    options: dict[int, dict[str, Any]] = {gamma: {"gamma": gamma} for gamma in lengths}
    options[0] = {"context_lookup": False}
    made = partial(profiled, pair, cases, folder)
    return dict(pool.map(made, options.keys(), options.values()))


def profiled(made: PairName, cases: int, folder: Path, number: int, options: dict[str, Any]) -> tuple[int, Path]:
    """Make one profile with these options on `cases` cases of each family; return its number and file."""
    file = folder / f"{number}.json"
    files = pair_files(made)
    with LLM.open(files.draft, files.verifier, threads=1) as pair:
        pair.profile(prompts(PAIRS[made], cases), **options).save(file)
    return number, file


class Published(Rule):
    """The paper's gate, whose thresholds alone keep its budget."""

    def __init__(self, profile: Profile, threshold: float, seed: int) -> None:
        super().__init__(above(profile, threshold), seed, profile.usual_importance)
        self.layers = profile.terms.layers


def half_width(found: Mapping[str, Any]) -> float:
    """Return the 95 % half-width of a mean over families, as returned by `by_family`."""
    return float(np.linalg.norm(list(found["half_width_95"].values())) / len(found["families"]))


def against(ours: Answers, other: Answers, cases: Sequence[Question]) -> dict[str, Any]:
    """Return our lead over another gate: the mean with the 95 % half-width of paired differences, and by family."""
    apart = by_family([a - b for a, b in zip(ours.scores, other.scores, strict=True)], cases)
    return {
        "mean": apart["mean"],
        "half_width_95": half_width(apart),
        "above_on": sum(value > 0 for value in apart["families"].values()),
        "below_on": sum(value < 0 for value in apart["families"].values()),
    }


def figures_at(
    found: dict[str, Answers], best: dict[str, list[float]], never: Answers, always: Answers, cases: Sequence[Question]
) -> dict[str, Any]:
    """Return the figures of one budget: every gate, the oracles, and the comparison with our gate."""
    rows = {name: answers.figures(cases) for name, answers in found.items()}
    rows |= {name: by_family(scores, cases) for name, scores in best.items()}
    low, high = (by_family(each.scores, cases)["mean"] for each in (never, always))
    ours = rows["auto"]["mean"]
    return {
        "gates": rows,
        "ours_above": {name: against(found["auto"], other, cases) for name, other in found.items() if name != "auto"},
        **{f"recovered_of_{name}": (ours - low) / (rows[name]["mean"] - low) for name in best},
        "recovered_of_gap": (ours - low) / (high - low),
    }


def at_one(made: PairName, count: int, others: Mapping[int, Path], budget: float) -> Figures:
    """Return the figures of one budget, with those of its references; `others` as returned by `profiles`."""
    cases, files = questions(count, pair=made), pair_files(made)
    with ExitStack() as closing:
        small, big = (closing.enter_context(Model.load(resolve(name))) for name in (files.draft, files.verifier))
        profile = profile_of(small.path, big.path, files.profile)
        verifier = remembering(big, closing)
        pair = closing.enter_context(LLM(big, draft=small, verifier=verifier, profile=files.profile))
        alone = closing.enter_context(LLM(big, verifier=verifier))
        pairs = {profile.terms.gamma: pair} | {
            gamma: closing.enter_context(LLM(big, draft=small, verifier=verifier, profile=file))
            for gamma, file in others.items()
        }
        paper = read_profile(others[PAPERS], fingerprint(small.path), fingerprint(big.path))
        never = answered(cases, reply_with(pair, gate="never"))
        always = answered(cases, reply_with(pair, gate="always"))
        drafter = ModelDrafter(small, Context(small, ContextSpec(n_ctx=POSITIONS, threads=1)))
        closing.callback(drafter.close)
        session = verifier.open(GenerationState())
        paths: dict[str, list[Course]] = {}
        for name, hesitates in (("oracle", 0.0), ("oracle_lookup", profile.hesitates)):
            paths[name] = [
                path(
                    pair.prompt_writer.ids(question.messages), question.score, alphabet=small, drafter=drafter,
                    session=session, gamma=profile.terms.gamma, most=MOST, lookup_below=hesitates,
                )
                for question in cases
            ]  # fmt: skip
        found = at_budget(pairs, alone, profile, paper, cases, budget)
        best = {name: oracle(each, budget) for name, each in paths.items()}
        return {
            "cases": count, "gamma": profile.terms.gamma, "evidence": profile.evidence, "alpha": profile.alpha,
            "c_th": profile.c_th, "never": never.figures(cases), "always": always.figures(cases),
            "budgets": {str(budget): figures_at(found, best, never, always, cases)},
        }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Return a table for each budget."""
    return "\n".join(_at_budget(found, budget) for budget in found["budgets"])


def _at_budget(figures: dict[str, Any], budget: str) -> str:
    """Return one budget's table."""
    at = figures["budgets"][budget]
    lines = [
        f"budget {budget}",
        f"{'gate':11}{'share':>7}{'passes':>8}"
        + "".join(f"{family:>10}" for family in figures["never"]["families"])
        + f"{'mean':>8}",
    ]
    for name, row in {"never": figures["never"], **at["gates"], "always": figures["always"]}.items():
        share, passes = (row.get(key) for key in ("share", "passes_per_token"))
        cells = "".join(f"{score:10.1f}" for score in row["families"].values())
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
        f" ({at['recovered_of_oracle_lookup']:.0%} of what it does if its draft model looks up the context), and"
        f" {at['recovered_of_gap']:.0%} of the gap between the models"
    )
    return "\n".join(lines) + "\n\n"


_OF_OTHER_CHUNKS = ("hybrid_even", "auto_1", "auto_4", "synera_4", "published")
"""Gates whose shares are of other chunks than `auto`'s, and which are therefore compared by cost."""


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw the mean score against the verified share, and against its cost, a line for each gate (Fig. 14)."""
    plt = pyplot()
    if plt is None:
        return None
    budgets = sorted(found["budgets"], key=float)
    gates = found["budgets"][budgets[0]]["gates"]
    figure, panels = plt.subplots(1, 2, figsize=(12.8, 4.6), sharey=True)
    for axes, title, kind, label in (
        (panels[0], "What a budget buys", "share", "share of chunks verified"),
        (panels[1], "What that costs", "passes_per_token", "verifier passes a token"),
    ):
        axes.set_prop_cycle(color=[*plt.get_cmap("tab20").colors[::2], "black", "gold"])
        ends = [found["never"], found["always"]] if kind == "share" else [found["never"]]
        for name in gates:
            rows = [found["budgets"][budget]["gates"][name] for budget in budgets]
            if kind not in rows[0] or name == "hybrid_even" or (kind == "share" and name in _OF_OTHER_CHUNKS):
                continue
            points = sorted((row[kind] or 0.0, row["mean"]) for row in [*rows, *ends])
            label_of = name.replace("_no_lookup", ", no context lookup").replace("_", ", chunks of ")
            axes.plot(*zip(*points, strict=True), {"auto": "-o"}.get(name, "--."), label=label_of)
        axes.set(xlabel=label, ylabel="mean score of all families, %", title=title)
        axes.grid(alpha=0.3)
    for name, style in (("oracle", ":k"), ("oracle_lookup", "-.k")):
        best = [found["budgets"][budget]["gates"][name]["mean"] for budget in budgets]
        panels[0].plot([float(budget) for budget in budgets], best, style, label=name.replace("_", ", context "))
    for axes in panels:
        axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, bbox_inches="tight", dpi=130)
    plt.close(figure)
    return path


def measure(
    pair: PairName = "home",
    cases: Annotated[int, "a family"] = 50,
    profiled_cases: Annotated[int, "cases a family, for other profiles"] = 25,
    budgets: Sequence[float] = (0.1, 0.2, 0.4),
) -> Figures:
    """Return the figures of all budgets, each in a process of its own, one process for each core at a time."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool,
    ):
        others = profiles(pool, pair, profiled_cases, Path(folder))
        each = pool.map(partial(at_one, pair, cases, others), budgets)
        several = list(track(each, "budgets", len(budgets)))
    figures = several[0]
    for found in several:
        figures["budgets"] |= found["budgets"]
    return figures
