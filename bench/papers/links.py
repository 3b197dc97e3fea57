"""Measure PipeSD and its baselines beside drafts sent as ids, on PipeSD's four links (arXiv 2605.13319, Table 1).

    python -m bench.papers.links [--pair home] [--cases 3] [--budget 0.2] [--scenarios laptop phone iot changing]
                                 [--vocabulary 32000] [--pass-ms 60] [--round-trip-ms 20] [--processes 4]

The pair answers held-out questions of all families greedily, at the pace of a device (`testkit.processes.paced_pair`).
Every question is answered by each method in turn, each with a pair of its own; every scenario has a process of its own
by default. In the first table everything is verified: all replies are the verifier's own text. In the second one a
budget is kept.

Scenarios. The paper has a link of 20 Mbit/s up and 200 down for a laptop, a phone and an IoT device, and for the laptop
one that changes every 20 s, from 10 to 80 up and from 150 to 280 down. Here it changes with every question, so that all
methods have the same link. The paper slows the laptop down to clock rates of 2.5 and 1.2 GHz. By how much, and with
what round trip, is not in the descriptions that this is rebuilt from (`docs/evidence/papers.md`): 20 ms, and 30, 60 and
120 ms for a drafted token, are ours.

Methods, all with the pair's own draft model and verifier, by the names in the paper:

- `alone`: the draft model; nothing is verified, and nothing sent;
- `verifier`: the verifier, without drafts;
- `vanilla`: drafts of a fixed length, with the distributions of the whole draft in the request once it is complete;
- `hsl`: the same for drafts that end at an unsure token (Hybrid SLM and LLM, Hao et al. 2024);
- `edgellm`: the same for drafts that end when the product of confidences is below a threshold that adapts; while a
  verdict is awaited, drafting goes on (EdgeLLM, Xu et al., TMC 2025);
- `pipesd`: both triggers; drafting goes on, and what is drafted is uploaded meanwhile, in batches whose sizes are the
  best by dynamic programming (`bench.papers.pipesd`), over the same relay (`bench.papers.pipelined`);
- `ours`: this project. Ids travel alone, as verdicts need no distributions; drafting goes on behind several guesses;
- `default`: the same with what is on by default: copies, and no drafts where they do not pay.

A distribution has 4 bytes for each token of a vocabulary as large as that of the paper's models. The schedule is told
the link and the pace, which the paper estimates. One verdict is awaited at a time, where PipeSD may ask for the next
one meanwhile. The rivals' lengths and thresholds are tuned on other questions for each scenario, with a model of the
time. Under a budget, a draft of theirs is verified if its least confidence is low, by a threshold that follows the
budget (`bench.synera.baselines`); PipeSD then uploads what is drafted before it is known whether that is verified.

Columns, without the first round of each reply: tokens a second, the median over replies with the quartiles; time
between tokens at p50 and p95, which is 0 within a chunk; kilobytes up for each token, as the relay counts them; the
share of drafts and of tokens that were verified; the mean score in percent; and the replies that are the verifier's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.harness.figures import bar_groups
from bench.harness.report import write
from bench.harness.statistics import spread
from bench.papers.claims import LINKS
from bench.papers.pipelined import Pipeline, StrategicDrafter, Uploads, acknowledging, distributions
from bench.papers.pipesd import STRATEGIES, Cost, Strategy, Trace, traced, tuned
from bench.synera.baselines import hybrid_gate
from bench.synera.quality import profile_of
from bench.synera.stalls import timed
from edgellm.engine import Context, ContextSpec, Model
from edgellm.llm import LLM
from edgellm.services.client import verifier_client
from edgellm.services.client.connection import Timing
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import AlwaysGate, BudgetController, CountingGate, TailGate
from edgellm.spec.protocols import Gate
from edgellm.spec.state import GenerationState
from edgellm.storage import resolve
from models.home.corpus import HELD_OUT_SEED
from testkit.network.relay import Network, Relay
from testkit.processes.paced_pair import PASS, TOKEN, Paced, paced_pair, paced_verifier
from testkit.questions import MOST, Question, parsed_with_pair, questions

ALONE, VERIFIER, OURS, DEFAULT = "alone", "verifier", "ours", "default"
METHODS = (ALONE, VERIFIER, *STRATEGIES, OURS, DEFAULT)
TUNING_SEED = HELD_OUT_SEED + 1
CONTEXT = 1024
UP, DOWN = 20.0, 200.0
CHANGES = ((10.0, 80.0), (150.0, 280.0))
"""Megabits a second, up and down, between which the changing link is."""
SETTING = ("cases", "budget", "vocabulary", "pass_ms", "round_trip_ms")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Seconds for a drafted token, and megabits a second up and down, which take turns from question to question."""

    token: float
    rates: tuple[tuple[float, float], ...] = ((UP, DOWN),)

    def network(self, number: int, round_trip: float) -> Network:
        """Return the link while the question with this number is answered."""
        up, down = self.rates[number % len(self.rates)]
        return Network(up, round_trip, down)


def _changing(seed: int = 0, count: int = 32) -> tuple[tuple[float, float], ...]:
    rng = random.Random(seed)
    return tuple((rng.uniform(*CHANGES[0]), rng.uniform(*CHANGES[1])) for _ in range(count))


SCENARIOS = {
    "laptop": Scenario(TOKEN),
    "phone": Scenario(2 * TOKEN),
    "iot": Scenario(4 * TOKEN),
    "changing": Scenario(TOKEN, _changing()),
}


@dataclass(slots=True)
class Measured:
    """What was measured of a method's replies."""

    rates: list[float] = field(default_factory=list)  # tokens a second of each reply
    gaps: list[float] = field(default_factory=list)  # milliseconds before each token
    scores: list[float] = field(default_factory=list)
    tokens: int = 0
    verified: float = 0.0
    up: int = 0
    same: int = 0

    def figures(self) -> dict[str, Any]:
        p50, p95 = np.percentile(self.gaps, (50.0, 95.0))
        return {
            "tokens_per_second": spread(self.rates),
            "between_p50_ms": float(p50),
            "between_p95_ms": float(p95),
            "bytes_up_per_token": self.up / self.tokens,
            "share_of_tokens_verified": self.verified / self.tokens,
            "score": sum(self.scores) / len(self.scores),
            "same_text": self.same,
            "replies": len(self.scores),
        }


@dataclass(slots=True)
class Method:
    """A method with its pair. `sends` is how many bytes a distribution has; `pipeline` uploads in advance."""

    pair: LLM
    options: dict[str, Any]
    sends: int = 0
    pipeline: Pipeline | None = None
    controller: BudgetController | None = None
    strategy: Strategy | None = None
    share: float | None = None
    measured: Measured = field(default_factory=Measured)

    def answer(self, question: Question, seed: int, relay: Relay, own: Sequence[int]) -> None:
        """Answer a question, whose answer by the verifier is `own`."""
        before, measured = relay.carried[0], self.measured
        with distributions(self.sends, self.pipeline) if self.sends else nullcontext():
            reply = timed(self.pair, question, seed, self.options)
        if self.pipeline is not None:
            self.pipeline.discard()
            self.pipeline.uploads.arrived.result()
        later = [at for at, token in zip(reply.times, reply.tokens, strict=True) if token.round > 0]
        if later:
            began = reply.times[len(reply.times) - len(later) - 1]
            measured.rates.append(len(later) / (later[-1] - began))
            measured.gaps += (1e3 * np.diff([began, *later])).tolist()
        measured.tokens += reply.summary.tokens
        measured.verified += (reply.summary.share_verified or 0.0) * reply.summary.tokens
        measured.up += relay.carried[0] - before
        measured.scores.append(question.score(reply.summary.text))
        measured.same += [token.id for token in reply.tokens] == list(own)
        self.share = reply.summary.share_offloaded if self.controller is None else self.controller.share

    def figures(self) -> dict[str, Any]:
        strategy = None if self.strategy is None else asdict(self.strategy.trigger)
        return {**self.measured.figures(), "share_of_drafts_verified": self.share, "trigger": strategy}


def cost_of(arguments: argparse.Namespace, token: float, megabits: float) -> Cost:
    """Return what drafting and a link of so many `megabits` up cost."""
    round_trip = 1e-3 * arguments.round_trip_ms
    per_token = 8e-6 * bytes_per_token(arguments) / megabits
    return Cost(token, round_trip, per_token, 1e-3 * arguments.pass_ms + round_trip)


def bytes_per_token(arguments: argparse.Namespace) -> int:
    """Return the bytes of a distribution."""
    return 4 * int(arguments.vocabulary)


def written_alone(verifier: Path, cases: Sequence[Question]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts of all questions, and the verifier's own replies, as tokens."""
    with LLM.open("none", verifier, threads=1, history=False) as alone:
        prompts = [alone.prompt_ids(question.messages).tolist() for question in cases]
        return prompts, [
            [token.id for token in alone.reply(question.messages, max_tokens=MOST, retrieval="off")]
            for question in cases
        ]


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions, the verifier's own replies as tokens, and what is drafted along its replies to other questions."""

    cases: list[Question]
    own: list[list[int]]
    traces: list[Trace]


def asked(draft: Path, verifier: Path, cases: list[Question], others: list[Question]) -> Asked:
    """Let the verifier reply to the `cases`, and to the `others`, on which strategies are tuned."""
    _, own = written_alone(verifier, cases)
    with (
        Model.load(draft) as model,
        closing(ModelDrafter(model, Context(model, ContextSpec(n_ctx=CONTEXT, threads=1)))) as drafter,
    ):
        drafter.begin(GenerationState())
        traces = [
            traced(drafter, np.array(prompt, dtype=np.int32), np.array(reply, dtype=np.int32))
            for prompt, reply in zip(*written_alone(verifier, others), strict=True)
        ]
    return Asked(cases, own, traces)


def gate_for(budget: float | None, profile: Profile, controller: BudgetController) -> Gate:
    """Return the gate of a rival: everything is verified, or drafts with an unsure token as far as the budget goes."""
    if budget is None:
        return CountingGate(AlwaysGate(), controller)
    return TailGate(hybrid_gate(profile, budget, controller), controller)


def compared(
    arguments: argparse.Namespace, scenario: Scenario, budget: float | None, relay: Relay, sink: int, draft: Model,
    strategies: Mapping[str, Strategy], profile: Profile, stack: ExitStack,
) -> Iterator[tuple[str, Method]]:  # fmt: skip
    """Yield all methods under a budget, without one if it is None, with their names."""
    address = f"127.0.0.1:{relay.port}"

    def pair(draft: str = arguments.draft) -> LLM:
        profile = None if draft == "none" else arguments.profile
        return stack.enter_context(paced_pair(draft, address, scenario.token, profile, arguments.draft))

    yield ALONE, Method(pair(), {"gate": "never", "gamma": 1})
    yield VERIFIER, Method(pair("none"), {})
    for name, strategy in strategies.items():
        pipeline = None
        if strategy.pipelined:
            uploads = Uploads(sink, bytes_per_token(arguments))
            stack.callback(uploads.close)
            pipeline = Pipeline(uploads, cost_of(arguments, scenario.token, UP))
        context = Paced(draft, n_ctx=CONTEXT, threads=1, pace=scenario.token)
        drafter = StrategicDrafter(ModelDrafter(draft, context), strategy, draft.is_eog, pipeline)
        stack.callback(drafter.close)
        controller = BudgetController()
        options = {
            "drafter": drafter,
            "gate": gate_for(budget, profile, controller),
            "gamma": strategy.trigger.most,
        }
        yield name, Method(pair(), options, bytes_per_token(arguments), pipeline, controller, strategy)
    ours: dict[str, Any] = {"gate": "always"} if budget is None else {"budget": budget}
    yield OURS, Method(pair(), ours)
    if budget is None:  # under a budget nothing is copied
        yield DEFAULT, Method(pair(), {"retrieval": "auto"})


def at_one(arguments: argparse.Namespace, given: Asked, scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return the figures of all methods in a scenario, with everything verified and under the budget."""
    verifier, round_trip = resolve(arguments.verifier), 1e-3 * arguments.round_trip_ms
    profile = profile_of(resolve(arguments.draft), verifier, arguments.profile)
    usual = cost_of(arguments, scenario.token, float(np.mean([up for up, _ in scenario.rates])))
    strategies = {method: tuned(method, given.traces, usual) for method in STRATEGIES}
    patient = partial(Timing, silent_beats=80, least=20.0)  # a whole draft's distributions take seconds
    found: dict[str, dict[str, Any]] = {}
    with (
        Model.load(resolve(arguments.draft)) as draft,
        patch.object(verifier_client, "Timing", patient),
        paced_verifier(
            verifier, 1e-3 * arguments.pass_ms, scenario.network(0, round_trip), sessions=len(METHODS)
        ) as relay,
        acknowledging() as port,
    ):
        sink = relay.door(port)
        for label, budget in (("everything", None), ("budget", arguments.budget)):
            with ExitStack() as stack:
                methods = dict(compared(arguments, scenario, budget, relay, sink, draft, strategies, profile, stack))
                for number, (question, own) in enumerate(zip(given.cases, given.own, strict=True)):
                    network = scenario.network(number, round_trip)
                    relay.change(network)
                    for method in methods.values():
                        if method.pipeline is not None:
                            method.pipeline.cost = cost_of(arguments, scenario.token, network.megabits)
                        method.answer(question, number, relay, own)
                found[label] = {one: method.figures() for one, method in methods.items()}
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all scenarios."""
    cases, others = questions(arguments.cases, pair=arguments.pair), questions(1, TUNING_SEED, arguments.pair)
    given = asked(resolve(arguments.draft), resolve(arguments.verifier), cases, others)
    at, scenarios = partial(at_one, arguments, given), [SCENARIOS[name] for name in arguments.scenarios]
    if arguments.processes == 1:
        found = list(map(at, scenarios))
    else:
        with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(at, scenarios))
    return {
        "pair": arguments.pair,
        "setting": {key: getattr(arguments, key) for key in SETTING},
        "scenarios": dict(zip(arguments.scenarios, found, strict=True)),
    }


def table(found: Mapping[str, Any]) -> str:
    """Return a table for everything verified and one under the budget, with a line for each method on each link."""
    setting = found["setting"]
    lines = [f"the {found['pair']} pair, {setting['cases']} cases a family"]
    head = (
        f"{'':10}{'method':9}{'tok/s':>7}{'quartiles':>14}{'p50 ms':>8}{'p95 ms':>8}{'kB/tok up':>10}{'drafts':>8}"
        f"{'tokens':>8}{'score':>7}{'own text':>10}  trigger"
    )
    for label, title in (("everything", "everything is verified"), ("budget", f"a budget of {setting['budget']}")):
        lines += ["", title, head]
        for scenario, tables in found["scenarios"].items():
            lines += [_line(scenario, name, row) for name, row in tables[label].items()]
    return "\n".join([*lines, LINKS]) + "\n"


def _line(scenario: str, name: str, row: Mapping[str, Any]) -> str:
    rate, share = row["tokens_per_second"], row["share_of_drafts_verified"]
    quartiles = f"{rate['q1']:.1f}-{rate['q3']:.1f}"
    drafts = "" if share is None else f"{share:.2f}"
    same = f"{row['same_text']} of {row['replies']}"
    return (
        f"{scenario:10}{name:9}{rate['median']:7.1f}{quartiles:>14}{row['between_p50_ms']:8.1f}"
        f"{row['between_p95_ms']:8.1f}{1e-3 * row['bytes_up_per_token']:10.2f}{drafts:>8}"
        f"{row['share_of_tokens_verified']:8.2f}{row['score']:7.1f}{same:>10}  {_trigger(row['trigger'])}"
    ).rstrip()


def _trigger(found: Mapping[str, Any] | None) -> str:
    """Return when a draft is verified, as the paper writes it."""
    if found is None:
        return ""
    parts = {"N": found["most"], "R1": found["sequence"], "R2": found["token"]}
    return ", ".join(f"{name} {value:g}" for name, value in parts.items() if value)


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw tokens a second by link and method."""
    links = list(found["scenarios"])
    panels = {
        title: {
            name: [tables[label][name]["tokens_per_second"]["median"] for tables in found["scenarios"].values()]
            for name in next(iter(found["scenarios"].values()))[label]
        }
        for label, title in (
            ("everything", f"everything is verified, the {found['pair']} pair"),
            ("budget", f"a budget of {found['setting']['budget']}"),
        )
    }
    return bar_groups(path, panels, dict.fromkeys(panels, links), "tokens a second", base=None)


def lossless(found: Mapping[str, Any]) -> bool:
    """Return whether each method wrote the verifier's own text wherever everything was verified."""
    tables = [tables["everything"] for tables in found["scenarios"].values()]
    return all(row["same_text"] == row["replies"] for rows in tables for name, row in rows.items() if name != ALONE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3, help="a family")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--vocabulary", type=int, default=32_000, help="tokens of a distribution")
    parser.add_argument("--pass-ms", type=float, default=1e3 * PASS)
    parser.add_argument("--round-trip-ms", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=len(SCENARIOS), help="scenarios measured at once")
    parser.add_argument("--name", default="links", help="of the result file")
    arguments = parsed_with_pair(parser)
    found = run(arguments)
    sys.stdout.write(table(found))
    sys.stdout.write(f"written: {write(arguments.name, 'bench.papers.links', found, HELD_OUT_SEED, plot=plot)}\n")
    sys.exit(0 if lossless(found) else 1)


if __name__ == "__main__":
    main()
