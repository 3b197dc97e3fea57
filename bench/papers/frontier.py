"""Measure quality against latency, and against the verifier's cost, for Synera and its rivals (Synera, Fig. 11 and 12).

The pair answers held-out questions of all families greedily, at the pace of a device: 30 ms for a drafted token, 60 ms
for a pass of the verifier, and a network between the two (`testkit.processes.paced_pair`). Every question is answered
by each method in turn, each with a pair of its own. Every budget has a process of its own, and so have the two models
alone: they mostly sleep, and hardly slow each other down.

`hybrid` sends single tokens and waits for their verdicts. In `edgefm` the draft model writes a whole reply, and the
verifier writes it again if it looks bad; the budget is of replies, and the time of the draft counts.

Columns: the share that was verified; the mean score over all families in percent with its 95 % half-width; the time of
a token up to the end of the reply, without the first round, and as a multiple of the draft model's; and two measures of
the verifier's cost, which are 1 for the verifier alone, as the paper normalises:

- `passes`: the verifier's passes for each token of the reply. A pass over a few rows takes about as long as one over
  one row, so this is the verifier's computing time.
- `T x W`: the paper's estimate, c = T x W / Pf. T is the time between tokens, W the share of tokens that come from
  the verifier, and Pf, which stands for the size of the model, is the same in all rows.

The last lines have the paper's comparisons, here and there.
"""

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bench.harness.figures import pyplot
from bench.harness.progress import track
from bench.harness.results import Figures
from bench.papers.claims import COST, LATENCY
from bench.synera.baselines import ReplyRule, hybrid_options
from bench.synera.quality import half_width, profile_of
from bench.synera.stalls import NETWORK, Method, open_pair, timed
from edgellm.llm import LLM
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController
from edgellm.storage.model_files import HOME, resolve
from testkit.processes.paced_pair import PASS, paced_verifier
from testkit.questions import Question, by_family, questions

DRAFT, CLOUD = "draft alone", "verifier alone"
OURS, RIVALS = ("synera", "auto"), ("edgefm", "hybrid")
METHODS = (*OURS, *RIVALS)


class WholeReplies(Method):
    """EdgeFM as a method: the verifier `alone` writes a reply again where the rule says so."""

    def __init__(self, rule: ReplyRule, alone: LLM) -> None:
        super().__init__({"gate": "never"})
        self._rule, self._alone = rule, alone

    def answer(self, pair: LLM, question: Question, seed: int) -> None:
        """Answer a question; nobody reads the draft's tokens before it is known whether they stay."""
        draft = timed(pair, question, seed, self.options)
        if not self._rule.rewrites([token.confidence for token in draft.tokens]):
            final, later = draft, sum(token.round > 0 for token in draft.tokens)
        else:
            final = timed(self._alone, question, seed, {})
            later = len(final.tokens)  # all of them came after the draft's first
        if later:
            ended = final.summary.finish_reason == "stop"
            self.count(draft.times[0], final.times[-1], final.over, later, ended=ended)
        self.add(question, final.summary)


@dataclass(frozen=True, slots=True)
class Compared:
    """A method with its pair, and the controller of its budget where the pair does not keep it."""

    method: Method
    pair: LLM
    controller: BudgetController | None = None

    def figures(self, cases: list[Question]) -> dict[str, Any]:
        """Return score, time and cost of all replies."""
        method, scores = self.method, by_family(self.method.scores, cases)
        return {
            **scores,
            "mean_half_width_95": half_width(scores),
            "share": method.share if self.controller is None else self.controller.share,
            "between_ms": 1e3 * method.seconds / method.tokens,
            "to_the_end_ms": 1e3 * method.lasted / method.counted,
            "passes_per_token": method.passes / method.written,
            "from_verifier": method.from_verifier / method.written,
        }


def compared(budget: float | None, port: int, profile: Profile, closing: ExitStack) -> Iterator[tuple[str, Compared]]:
    """Yield all methods at a budget with their names; the models alone where it is None."""

    def pair(draft: str = HOME.draft) -> LLM:
        return closing.enter_context(open_pair(draft, port))

    if budget is None:
        yield DRAFT, Compared(Method({"gate": "never"}), pair())
        yield CLOUD, Compared(Method({}, drafted=False), pair("none"))
        return
    for gate in OURS:
        yield gate, Compared(Method({"gate": gate, "budget": budget}), pair())
    by_token, by_reply = BudgetController(), BudgetController()
    options = hybrid_options(profile, budget, by_token) | {"parallel": False}
    yield "hybrid", Compared(Method(options), pair(), by_token)
    yield "edgefm", Compared(WholeReplies(ReplyRule(profile, budget, by_reply), pair("none")), pair(), by_reply)


def at_one(count: int, budget: float | None) -> Figures:
    """Return the figures of all methods at a budget, or those of the models alone."""
    cases, verifier = questions(count), resolve(HOME.verifier)
    profile = profile_of(resolve(HOME.draft), verifier, None)
    with ExitStack() as closing:
        relay = closing.enter_context(paced_verifier(verifier, PASS, NETWORK, sessions=len(METHODS) + 1))
        found = dict(compared(budget, relay.port, profile, closing))
        for seed, question in enumerate(cases):
            for one in found.values():
                one.method.answer(one.pair, question, seed)
        return {name: one.figures(cases) for name, one in found.items()}


def costs(row: Mapping[str, Any], cloud: Mapping[str, Any]) -> dict[str, float]:
    """Return the two costs of a method as shares of those of the verifier alone."""
    estimate = (row["between_ms"] * row["from_verifier"]) / (cloud["between_ms"] * cloud["from_verifier"])
    return {"cost_by_passes": row["passes_per_token"] / cloud["passes_per_token"], "cost_by_estimate": estimate}


def table(found: dict[str, Any]) -> str:
    """Return a line for each method at each budget, and what the paper says."""
    base = found["alone"][DRAFT]["to_the_end_ms"]
    lines = [
        f"budget  {'method':15}{'share':>7}{'mean score':>14}{'ms/token':>10}{'of alone':>9}{'passes':>8}{'T x W':>7}"
    ]
    for budget, rows in {"": found["alone"], **found["budgets"]}.items():
        for name, row in rows.items():
            share = "" if row["share"] is None or not budget else f"{row['share']:.3f}"
            score = f"{row['mean']:.2f} ±{row['mean_half_width_95']:.2f}"
            lines.append(
                f"{budget:>6}  {name:15}{share:>7}{score:>14}{row['to_the_end_ms']:10.1f}"
                f"{row['to_the_end_ms'] / base:9.3f}{row['cost_by_passes']:8.3f}{row['cost_by_estimate']:7.3f}"
            )
    lines += [_beside(name, budget, found) for budget in found["budgets"] for name in OURS]
    return "\n".join([*lines, LATENCY, COST]) + "\n"


def _beside(name: str, budget: str, found: dict[str, Any]) -> str:
    """Return how a method's latency and estimated cost differ from its rivals', in the paper's terms."""
    rows = found["budgets"][budget] | {CLOUD: found["alone"][CLOUD]}

    def apart(key: str, *rivals: str) -> str:
        some = [rival for rival in rivals if rows[rival][key]]  # with few cases one may send nothing
        return ", ".join(f"{rows[name][key] / rows[rival][key] - 1.0:+.0%} to {rival}" for rival in some)

    latency, cost = apart("to_the_end_ms", *RIVALS), apart("cost_by_estimate", CLOUD, *RIVALS)
    return f"here, {name} at {budget}: latency {latency}; cost (T x W) {cost}"


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw the mean score against the time of a token (Fig. 11) and against the verifier's cost (Fig. 12)."""
    plt = pyplot()
    if plt is None:
        return None
    figure, panels = plt.subplots(1, 2, figsize=(12.8, 4.6), sharey=True)
    for axes, key, label in (
        (panels[0], "to_the_end_ms", "time of a token, ms"),
        (panels[1], "cost_by_passes", "verifier passes a token, of those of the verifier alone"),
    ):
        for name, style in ((DRAFT, "ks"), (CLOUD, "k^")):
            axes.plot(found["alone"][name][key], found["alone"][name]["mean"], style, label=name)
        for name in METHODS:
            rows = [rows[name] for rows in found["budgets"].values()]
            axes.plot([row[key] for row in rows], [row["mean"] for row in rows], "-o", label=name)
            for budget, row in zip(found["budgets"], rows, strict=True):
                axes.annotate(budget, (row[key], row["mean"]), textcoords="offset points", xytext=(4, 4), fontsize=7)
        axes.set(xlabel=label, ylabel="mean score of all families, %", title="the bundled pair")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=130)
    plt.close(figure)
    return path


def measure(cases: Annotated[int, "a family"] = 12, budgets: Sequence[float] = (0.1, 0.2, 0.4)) -> Figures:
    """Return the figures of all budgets, each in a process of its own, with costs beside the verifier's alone."""
    asked = [None, *budgets]
    with ProcessPoolExecutor(len(asked), multiprocessing.get_context("spawn")) as pool:
        alone, *several = track(pool.map(partial(at_one, cases), asked), "budgets", len(asked))
    for found in (alone, *several):
        for row in found.values():
            row.update(costs(row, alone[CLOUD]))
    return {"alone": alone, "budgets": dict(zip(map(str, budgets), several, strict=True))}
