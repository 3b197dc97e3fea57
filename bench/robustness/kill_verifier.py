"""Kill or stop a verifier in the middle of replies: is a token lost, and how long does a device wait?

    python -m bench.robustness.kill_verifier [REPLIES] [--budget 1.0] [--parallel] [--temperature 0] [--busy 0]
                                             [--seed 0] [--draft PATH] [--verifier PATH]

Each reply is written twice: undisturbed, and with the verifier's process hit by SIGKILL (in every fifth reply by
SIGSTOP) at a random moment between the first and the last token, and started again at once. In every fourth reply the
device is slowed down, so that the verifier is back before the reply ends. F32 copies of the pair, held-out prompts, and
replies that go on beyond the end of the turn up to TOKENS tokens. Every chunk is verified; with a `--budget` below 1
that share of them, drawn at random. With `--parallel` the device drafts on meanwhile. With `--busy N`, N other
processes keep the cores busy.

Each reply must have TOKENS tokens. Every round must begin with exactly the text of the rounds before it, and together
they are the reply; each token is the most probable next one under the model that its source names; up to the hit it is
the undisturbed reply. With a `--temperature` above 0 (top-k 40, top-p 0.95), each token is one that this model can have
drawn, and every verdict follows again from its drafts, the verifier's logits and the seed.

The longest gap between two tokens of each reply is noted with its parts: drafting, waiting for the verifier (and how
long that computed), and the rest. Exit code 1 if anything fails, if a gap is longer than 5 s, or, without `--busy`, if
a reply takes 2 s longer.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.report import write
from bench.harness.statistics import spread
from bench.robustness.busy import busy
from edgellm.engine import Context, ContextSpec, Message, Model, to_f32
from edgellm.spec.drafters.acceptance import Acceptance
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.parallel import MAX_AHEAD, ParallelDrafter
from edgellm.spec.drafters.verdict_prediction import BRANCHES
from edgellm.spec.gates.rules import AlwaysGate, RandomGate
from edgellm.spec.loop import generate
from edgellm.spec.state import GenerationLimits, GenerationState
from edgellm.spec.stats import Stats
from edgellm.spec.types import GREEDY, Ids, Notice, Sampling, Token
from edgellm.spec.verifier import Verifier
from edgellm.storage import resolve
from models.home.corpus import held_out
from models.home.families import FAMILIES
from testkit.processes.verifier import VerifierProcess
from testkit.traced_reply import (
    POSITIONS,
    TOKENS,
    Endless,
    Gap,
    Judge,
    Traced,
    TracedRound,
    TracedVerifier,
    Written,
    longest_gap,
)

MOST_GAP = 5.0  # seconds between two tokens, even on a busy machine
PACE = 0.08  # seconds that a slowed-down device waits before each request


class Device:
    """Writes replies with the draft model here and the verifier there."""

    def __init__(self, draft: Model, verifier: Verifier, budget: float = 1.0, parallel: bool = False) -> None:
        self._draft, self._verifier = draft, verifier
        self._budget, self._parallel = budget, parallel

    def wait(self) -> None:
        """Wait until the verifier is back."""
        end = time.monotonic() + 60
        while not self._verifier.open(GenerationState()).ready():
            if time.monotonic() > end:
                raise TimeoutError("the verifier does not come back")
            time.sleep(0.02)

    def write(
        self,
        prompt: Ids,
        pace: float = 0.0,
        hit: threading.Event | None = None,
        after: int = 0,
        sampling: Sampling = GREEDY,
    ) -> Written:
        """Write one reply; set `hit` when `after` tokens are there."""
        drafter = self._drafter()
        written, rounds = Written(prompt, sampling=sampling), list[TracedRound]()
        traced = TracedVerifier(self._verifier, pace, rounds)
        moments: list[tuple[float, int]] = []
        began = time.perf_counter()
        events = generate(
            GenerationState(prompt, sampling, GenerationLimits(TOKENS, POSITIONS)),
            vocabulary=Endless(self._draft),
            drafter=Traced(drafter, rounds),
            gate=AlwaysGate() if self._budget >= 1.0 else RandomGate(self._budget, seed=len(prompt)),
            verifier=traced,
            stats=Stats(),
        )
        for event in events:
            if isinstance(event, Token):
                written.tokens.append(event)
                moments.append((time.perf_counter() - traced.slept, event.round))
                if hit is not None and len(written.tokens) == after:
                    hit.set()
            elif isinstance(event, Notice):
                written.notices.append(event)
        written.seconds = time.perf_counter() - began - traced.slept
        drafter.close()
        written.rounds, written.lost_at = rounds, traced.lost_at
        written.gap = longest_gap(moments, rounds)
        return written

    def _drafter(self) -> ModelDrafter | ParallelDrafter:
        branches = BRANCHES if self._parallel else 0
        spare = branches * (MAX_AHEAD + 2)
        context = Context(self._draft, ContextSpec(n_ctx=POSITIONS, n_seq=1 + branches, spare=spare, threads=1))
        own = ModelDrafter(self._draft, context, keeps_logits=bool(branches))
        return ParallelDrafter(own, is_eog=self._draft.is_eog, rejection=Acceptance().rejection) if branches else own


@dataclass(frozen=True)
class Outcome:
    """The result of one hit."""

    kind: str
    problems: tuple[str, ...]
    hit: bool
    back: bool
    false_alarm: bool  # the verifier seemed away in the undisturbed reply: the machine stood still for a second
    undisturbed: float  # seconds, the deliberate slowness left out
    longer: float  # seconds, against the undisturbed reply
    gap: Gap  # the longest of the reply that was hit
    usual: float  # seconds, the longest gap of the undisturbed reply


def trial(
    served: VerifierProcess, device: Device, judge: Judge, prompt: Ids, number: int, rng: random.Random,
    sampling: Sampling = GREEDY,
) -> Outcome:  # fmt: skip
    """Write one reply, undisturbed and hit, and return the result."""
    kind, pace = "hang" if number % 5 == 4 else "kill", PACE if number % 4 == 3 else 0.0
    device.wait()
    undisturbed = device.write(prompt, pace, sampling=sampling)
    moment, after = threading.Event(), rng.randrange(1, TOKENS - 8)
    delay = rng.uniform(0.0, 4 * undisturbed.seconds / TOKENS)

    def strike() -> None:
        moment.wait()
        time.sleep(delay)
        served.hang() if kind == "hang" else served.kill()

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        hit = device.write(prompt, pace, moment, after, sampling)
    finally:
        moment.set()
        striker.join()
    if kind == "hang":
        served.go_on() if number % 2 else served.kill()
    return Outcome(
        kind,
        tuple(judge.problems(hit, undisturbed)),
        hit=hit.lost_at is not None,
        back=any("back" in notice.text for notice in hit.notices),
        false_alarm=undisturbed.lost_at is not None,
        undisturbed=undisturbed.seconds,
        longer=hit.seconds - undisturbed.seconds,
        gap=hit.gap,
        usual=undisturbed.gap.seconds,
    )


def run(
    draft: Path,
    verifier: Path,
    replies: int,
    seed: int,
    on_outcome: Callable[[Outcome], object] = lambda _outcome: None,
    *,
    budget: float = 1.0,
    parallel: bool = False,
    temperature: float = 0.0,
) -> list[Outcome]:
    """Run all trials, on f32 model files; call `on_outcome` with each."""
    rng = random.Random(seed)
    cases = [held_out(family, -(-replies // len(FAMILIES))) for family in FAMILIES]
    prompts = [case.prompt for group in zip(*cases, strict=True) for case in group][:replies]
    served = VerifierProcess(verifier)
    try:
        with Model.load(draft) as small, Model.load(verifier) as big:
            remote = served.connect(small)
            device, judge = Device(small, remote, budget, parallel), Judge(small, big)
            outcomes = []
            for number, turns in enumerate(prompts):
                prompt = small.chat_prompt([Message(turn.role, turn.text) for turn in turns])[: POSITIONS - TOKENS]
                sampling = Sampling(temperature, seed=seed + number)
                outcomes.append(trial(served, device, judge, prompt, number, rng, sampling))
                on_outcome(outcomes[-1])
            remote.close()
            return outcomes
    finally:
        served.close()


def table(found: dict[str, Any]) -> str:
    """Return a summary of the replies."""
    how = "everything verified" if found["budget"] >= 1.0 else f"budget {found['budget']:g}"
    lines = [f"{found['replies']} replies, {how}{', drafting on meanwhile' if found['parallel'] else ''}"]
    for kind in ("kill", "hang"):
        if (row := found.get(kind)) is not None:
            longer = row["seconds_longer"]
            lines.append(
                f"{kind}: {row['replies']} replies, {row['went_on_unverified']} went on alone,"
                f" {row['verified_again_before_the_end']} were verified again before the end;"
                f" {longer['median']:.2f} s longer in the median, {longer['max']:.2f} s at most"
            )
    if (gap := found.get("longest_gap")) is not None:
        lines.append(
            f"longest gap between two tokens: {gap['median']:.2f} s in the median, {gap['max']:.2f} s at most,"
            f" {found['gaps_over_5_s']} over 5 s"
        )
    lines.append(f"tokens lost, repeated or not the named model's: {sum(found['problems'].values())}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replies", type=int, nargs="?", default=100)
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--parallel", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute beside it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="kill_verifier", help="of the result file")
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--verifier", default="edgellm-verifier")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, busy(arguments.busy):
        draft, verifier = Path(folder) / "draft.gguf", Path(folder) / "verifier.gguf"
        to_f32(resolve(arguments.draft), draft)
        to_f32(resolve(arguments.verifier), verifier)
        outcomes = run(
            draft, verifier, arguments.replies, arguments.seed, partial(print, file=sys.stderr, flush=True),
            budget=arguments.budget, parallel=arguments.parallel, temperature=arguments.temperature,
        )  # fmt: skip
    figures: dict[str, Any] = {
        "replies": len(outcomes), "budget": arguments.budget, "parallel": arguments.parallel,
        "temperature": arguments.temperature, "busy": arguments.busy, "load_average": os.getloadavg()[0],
        "longest_gap": spread([outcome.gap.seconds for outcome in outcomes]),
        "longest_gap_undisturbed": spread([outcome.usual for outcome in outcomes]),
        "gaps_over_5_s": sum(outcome.gap.seconds > MOST_GAP for outcome in outcomes),
        "longest_gaps": [
            asdict(outcome.gap) | {"rest": outcome.gap.rest, "kind": outcome.kind}
            for outcome in sorted(outcomes, key=lambda one: -one.gap.seconds)[:5]
        ],
    }  # fmt: skip
    for kind in ("kill", "hang"):
        of = [outcome for outcome in outcomes if outcome.kind == kind]
        if of:
            figures[kind] = {
                "replies": len(of),
                "went_on_unverified": sum(outcome.hit for outcome in of),
                "verified_again_before_the_end": sum(outcome.back for outcome in of),
                "false_alarms": sum(outcome.false_alarm for outcome in of),
                "seconds_undisturbed": spread([outcome.undisturbed for outcome in of]),
                "seconds_longer": spread([outcome.longer for outcome in of]),
            }
    problems = Counter(problem for outcome in outcomes for problem in outcome.problems)
    figures["problems"] = dict(problems)
    path = write(arguments.name, "bench.robustness.kill_verifier", figures, arguments.seed)
    print(f"{table(figures)}written: {path}")
    slow = any(outcome.longer > 2.0 for outcome in outcomes) and not arguments.busy
    sys.exit(1 if problems or slow or figures["gaps_over_5_s"] else 0)


if __name__ == "__main__":
    main()
