"""Compare our gate with published ones, each at the same share of verified tokens (`rebuilt_gates.py` says how).

    python -m bench.papers.published_gates [--pair home] [--cases 50] [--budgets 0.01 0.05 0.1 0.2]

The pair answers held-out questions of all families greedily, in random order. Each gate has the same budget, the share
of drafted tokens that the verifier checks, and a controller holds it to that over all replies:

- `auto`: our gate, with the chunks of the pair's profile;
- `auto_1`: the same with chunks of one token, and a profile of such chunks;
- `pipesd`: drafts that end where their confidence falls below one of two thresholds (PipeSD);
- `confspec`: steps of a line or eight tokens that the draft model doubts most (ConfSpec);
- `r2r`: single tokens that a trained router expects to differ (R2R).

At one share, longer chunks take fewer passes of the verifier. So `pipesd_even` and `confspec_even` have a budget that
takes as many passes as `auto`.

What is fitted is fitted on the questions of profiles, which nothing else uses. PipeSD's thresholds are tuned and R2R's
router is trained with the right replies to them, which our gate does not see.

Columns: the share that was really checked, the verifier's passes for each token, the score of each family and their
mean in percent, the share of the gap between the draft model alone and everything verified that was won back, and the
leads of `auto` and of `auto_1` over that gate with the 95 % half-widths of paired differences. The last lines have the
papers' own numbers, RelayLLM's among them: its small model is trained to ask, by reinforcement, which a pair of models
as they are is not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.figures import pyplot
from bench.harness.report import machine, write
from bench.papers.claims import GATES, RELAY_RECOVERED, RELAY_SHARE
from bench.papers.rebuilt_gates import (
    BALANCES,
    Budget,
    Observations,
    PipeSDDrafter,
    PipeSDGate,
    RouterGate,
    StepDrafter,
    StepGate,
    TriggerCurve,
    WatchingGate,
    token_run,
)
from bench.synera.quality import POSITIONS, against, profile_of, profiled, remembering
from edgellm.engine import Context, ContextSpec, Ids, Model
from edgellm.llm import LLM
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.profiler import Run
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.stream import Reply
from edgellm.spec.types import Chunk
from edgellm.storage import resolve
from models.home.corpus import HELD_OUT_SEED
from models.profile import SEED
from testkit.questions import MOST, Answers, Question, Remembering, answered, parsed_with_pair, questions, reply_with

OURS = ("auto", "auto_1")
PUBLISHED = ("pipesd", "pipesd_even", "confspec", "confspec_even", "r2r")
BOUNDS = ("never", "always")
KEPT = 512
"""Replies that PipeSD's thresholds are taken from."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A pair with its own profile, its models, and a drafter of its own for the gates that choose their chunks."""

    pair: LLM
    small: Model
    big: Model
    verifier: Remembering
    drafter: Drafter

    @classmethod
    def of(cls, arguments: argparse.Namespace, closing: ExitStack) -> Opened:
        """Open the pair of `arguments`; `closing` closes it."""
        small, big = (
            closing.enter_context(Model.load(resolve(name))) for name in (arguments.draft, arguments.verifier)
        )
        profile_of(small.path, big.path, arguments.profile)  # a clear word where there is none
        verifier = remembering(big, closing)
        pair = closing.enter_context(LLM(big, draft=small, verifier=verifier, profile=arguments.profile))
        drafter = ModelDrafter(small, Context(small, ContextSpec(n_ctx=POSITIONS, threads=1)))
        closing.callback(drafter.close)
        return cls(pair, small, big, verifier, drafter)

    def steps(self) -> StepDrafter:
        """Return a drafter of steps."""
        return StepDrafter(self.drafter, self.small.piece)

    def counted(self, cases: Sequence[Question], answer: Callable[[Question, int], Reply]) -> Answers:
        """Return the answers to all questions, with the share of drafted tokens that the verifier checked."""
        before = self.verifier.checked
        answers = answered(cases, answer)
        answers.share = (self.verifier.checked - before) / answers.drafted
        return answers


def observations(opened: Opened, asked: Iterable[tuple[int, Question]]) -> list[tuple[Run, list[Chunk]]]:
    """Return what is observed of the pair on questions with their seeds: tokens along the verifier's reply to each, and
    the draft model's own reply."""
    pair, steps = opened.pair, opened.steps()
    found = []
    for seed, question in asked:
        own = reply_with(pair, gate="always")(question, seed)
        ids = np.array([token.id for token in own], dtype=np.int32)
        prompt, ended = pair.prompt_ids(question.messages), own.summary.finish_reason == "stop"
        matters = partial(worse, opened, question, prompt, ids)
        run = token_run(opened.drafter, opened.small.is_eog, prompt, ids, ended, matters)
        gate = WatchingGate()
        for _ in reply_with(pair, gate=gate, drafter=steps, gamma=MOST)(question, seed):
            pass
        found.append((run, gate.chunks))
    return found


def worse(opened: Opened, question: Question, prompt: Ids, reply: Ids, at: int, token: int) -> bool:
    """Return whether the verifier's `reply` scores less if it has another `token` at a place, and the verifier goes on
    behind that."""
    text = np.append(reply[:at], token).astype(np.int32)
    if not opened.small.is_eog(token) and len(text) < MOST:
        session = opened.verifier.open(GenerationState())
        rest = session.submit(np.concatenate((prompt, text)), Chunk(), MOST - len(text) - 1).result()
        text = np.concatenate((text, rest.tokens))
    return score(opened, question, text) < score(opened, question, reply)


def score(opened: Opened, question: Question, reply: Ids) -> float:
    """Return the score of a reply's tokens."""
    return question.score(opened.small.detokenize(reply).decode("utf-8", errors="replace"))


def pipesd(opened: Opened, curve: TriggerCurve, budget: Budget, cases: Sequence[Question]) -> Answers:
    """Answer all questions by PipeSD's trigger."""
    drafter = PipeSDDrafter(opened.drafter, curve, budget)
    gate = PipeSDGate(drafter, budget)
    return opened.counted(cases, reply_with(opened.pair, drafter=drafter, gate=gate, gamma=MOST))


def confspec(opened: Opened, seen: Observations, budget: Budget, cases: Sequence[Question]) -> Answers:
    """Answer all questions step by step."""
    gate = StepGate(seen.escalation(budget))
    return opened.counted(cases, reply_with(opened.pair, drafter=opened.steps(), gate=gate, gamma=MOST))


def r2r(opened: Opened, seen: Observations, budget: Budget, cases: Sequence[Question]) -> Answers:
    """Answer all questions with the tokens routed one by one."""
    threshold = seen.routing(budget)

    def answer(question: Question, seed: int) -> Reply:
        gate = RouterGate(seen.router, threshold)
        return reply_with(opened.pair, gate=gate, gamma=1)(question, seed)

    return opened.counted(cases, answer)


def tuned(
    opened: Opened, seen: Observations, budget: Callable[[], Budget], share: float, cases: Sequence[Question]
) -> tuple[TriggerCurve, dict[str, float]]:
    """Return PipeSD's thresholds at the balance that answers `cases` best at a share, and what was found; `budget`
    returns a new budget of that share."""
    replies = seen.confidences[:: max(1, len(seen.replies) // KEPT)]
    curves = {balance: TriggerCurve(replies, balance, budget().cost) for balance in BALANCES}
    scores = {
        balance: float(np.mean(pipesd(opened, curve, budget(), cases).scores)) for balance, curve in curves.items()
    }
    best = max(scores, key=lambda balance: scores[balance])
    at = curves[best].at(share)
    return curves[best], {"score": scores[best], "balance": best, "product": at.sequence, "token": at.token}


def bounds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of nothing and of everything verified."""
    cases = questions(arguments.cases, pair=arguments.pair)
    with ExitStack() as closing:
        opened = Opened.of(arguments, closing)
        return {gate: opened.counted(cases, reply_with(opened.pair, gate=gate)).figures(cases) for gate in BOUNDS}


def observing(arguments: argparse.Namespace, parts: int, part: int) -> list[tuple[Run, list[Chunk]]]:
    """Return what is observed of the pair on every prompt of a profile whose number is `part`, modulo `parts`."""
    with ExitStack() as closing:
        opened = Opened.of(arguments, closing)
        asked = enumerate(questions(arguments.profiled, SEED, arguments.pair))
        return observations(opened, islice(asked, part, None, parts))


def at_one(arguments: argparse.Namespace, single: Path, seen: Observations, share: float) -> dict[str, Any]:
    """Return the figures of every gate at a budget of one share; `single` is a profile of chunks of one token."""
    cases, tuning = (
        questions(count, seed, arguments.pair)
        for count, seed in ((arguments.cases, HELD_OUT_SEED), (arguments.tuned, SEED))
    )
    with ExitStack() as closing:
        opened = Opened.of(arguments, closing)
        one = closing.enter_context(LLM(opened.big, draft=opened.small, verifier=opened.verifier, profile=single))
        answers = {
            name: opened.counted(cases, reply_with(pair, gate="auto", budget=share))
            for name, pair in zip(OURS, (opened.pair, one), strict=True)
        }
        thresholds = {}
        passes = answers["auto"].passes / answers["auto"].tokens
        for ending, budget, spent in (
            ("", partial(Budget, share), share),
            ("_even", partial(Budget, passes, of_passes=True), passes),
        ):
            curve, thresholds[f"pipesd{ending}"] = tuned(opened, seen, budget, spent, tuning)
            answers[f"pipesd{ending}"] = pipesd(opened, curve, budget(), cases)
            answers[f"confspec{ending}"] = confspec(opened, seen, budget(), cases)
        answers["r2r"] = r2r(opened, seen, Budget(share), cases)
    rows = {name: answers[name].figures(cases) for name in (*OURS, *PUBLISHED)}
    for name, row in rows.items():
        row["leads"] = {ours: against(answers[ours], answers[name], cases) for ours in OURS if ours != name}
        if name in thresholds:
            row["thresholds"] = thresholds[name]
    return rows


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all budgets, each in a process of its own, one process for each core at a time."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(machine()["cores"], multiprocessing.get_context("spawn")) as pool,
    ):
        single = pool.submit(
            profiled, arguments.pair, arguments.draft, arguments.verifier, arguments.profiled, Path(folder), 1,
            {"gamma": 1},
        )  # fmt: skip
        parts = machine()["cores"]
        observed = pool.map(partial(observing, arguments, parts), range(parts))
        ends = pool.submit(bounds, arguments)
        in_turn = [one for turn in zip_longest(*observed) for one in turn if one is not None]
        runs, replies = zip(*in_turn, strict=True)
        at = partial(at_one, arguments, single.result()[1], Observations.of(runs, replies))
        several = list(pool.map(at, arguments.budgets))
        found = ends.result()
    low, high = (found[name]["mean"] for name in BOUNDS)
    for row in (row for rows in several for row in rows.values()):
        row["recovered"] = (row["mean"] - low) / (high - low)
    return {
        "pair": arguments.pair,
        **{key: getattr(arguments, key) for key in ("cases", "profiled", "tuned")},
        "bounds": found,
        "budgets": dict(zip(map(str, arguments.budgets), several, strict=True)),
    }


def table(found: dict[str, Any]) -> str:
    """Return a line for each gate at each budget, and what the papers say."""
    families = list(found["bounds"]["never"]["families"])
    lines = [
        f"the {found['pair']} pair, {found['cases']} cases a family",
        f"budget  {'gate':14}{'share':>7}{'passes':>8}"
        + "".join(f"{family:>10}" for family in families)
        + f"{'mean':>8}{'of gap':>8}"
        + "".join(f"{f'{ours} above it':>18}" for ours in OURS),
    ]

    def line(budget: str, name: str, row: dict[str, Any]) -> str:
        scores = "".join(f"{row['families'][family]:10.1f}" for family in families)
        recovered = f"{row['recovered']:.0%}" if "recovered" in row else ""
        leads = (row.get("leads", {}).get(ours) for ours in OURS)
        shown = ("" if lead is None else f"{lead['mean']:+.2f} ±{lead['half_width_95']:.2f}" for lead in leads)
        start = f"{budget:>6}  {name:14}{row['share']:7.3f}{row['passes_per_token']:8.3f}"
        return (start + f"{scores}{row['mean']:8.2f}{recovered:>8}" + "".join(f"{one:>18}" for one in shown)).rstrip()

    tuned_to = []
    lines += [line("", name, found["bounds"][name]) for name in BOUNDS]
    for budget, rows in found["budgets"].items():
        lines += [line(budget, name, row) for name, row in rows.items()]
        for name, at in ((name, row["thresholds"]) for name, row in rows.items() if "thresholds" in row):
            tuned_to.append(
                f"{name} at {budget}: a product below {at['product']:.3g} or a token below {at['token']:.3g}"
            )
    return "\n".join([*lines, *tuned_to, GATES]) + "\n"


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw the share of the gap that is won back against the share of tokens, and against the verifier's passes."""
    plt = pyplot()
    if plt is None:
        return None
    figure, panels = plt.subplots(1, 2, figsize=(12.8, 4.6), sharey=True)
    for axes, key, label in (
        (panels[0], "share", "share of drafted tokens that are verified"),
        (panels[1], "passes_per_token", "verifier passes a token"),
    ):
        for name in (*OURS, *(name for name in PUBLISHED if not name.endswith("_even"))):
            names = (name, f"{name}_even") if key == "passes_per_token" else (name,)
            rows = [rows[one] for one in names for rows in found["budgets"].values() if one in rows]
            start = [] if name in OURS else [(0.0, 0.0)]  # with tokens of the context, ours begins higher up
            points = sorted([*start, *((row[key], 100.0 * row["recovered"]) for row in rows)])
            axes.plot(*zip(*points, strict=True), "-o" if name in OURS else "--.", label=name)
        axes.set(xlabel=label, ylabel="of the gap between the models, %", title=f"the {found['pair']} pair")
        axes.grid(alpha=0.3)
    relay = RELAY_SHARE, 100.0 * RELAY_RECOVERED
    panels[0].plot(*relay, "k*", markersize=10)
    panels[0].annotate("RelayLLM, its own models", relay, (8, -3), textcoords="offset points", fontsize="small")
    panels[1].legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=130)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50, help="a family")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.01, 0.05, 0.1, 0.2])
    parser.add_argument("--profile", type=Path, help="profile to use in place of the pair's own")
    parser.add_argument("--profiled", type=int, default=100, help="cases a family that gates are fitted on")
    parser.add_argument("--tuned", type=int, default=8, help="cases a family that PipeSD's thresholds are tuned on")
    parser.add_argument("--name", default="published_gates", help="of the result file")
    arguments = parsed_with_pair(parser)
    figures = run(arguments)
    sys.stdout.write(table(figures))
    written = write(arguments.name, "bench.papers.published_gates", figures, HELD_OUT_SEED, plot=plot)
    sys.stdout.write(f"written: {written}\n")


if __name__ == "__main__":
    main()
