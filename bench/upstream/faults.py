"""Kill, stop or spoil a stock server in the middle of replies: is a token lost, and how long does a device wait?

    python -m bench.upstream.faults [REPLIES] [--kinds vllm-score llama-server ollama] [--seed 0]
                                    [--draft PATH] [--verifier PATH]

Each reply is written twice: undisturbed, and with a fault at a random moment between the first and the last token. Of
six replies one each is hit by SIGKILL (the server is started again at once), SIGSTOP, a stall of all answers, and
garbage of three kinds; the kinds of garbage and of servers alternate. The server is `testkit/upstream`'s, in a process
of its own, over f32 copies of the pair. In every second turn of six the device is slowed down and a fault ends after
half a second, so that the server is back before the reply ends. Replies go on beyond the end of the turn.

Each reply must have all its tokens. Every round must begin with exactly the text of the rounds before it, and together
they are the reply; each token is the most probable next one under the model that its source names; up to the fault it
is the undisturbed reply. Exit code 1 if anything fails, or if a gap between two tokens is longer than 5 s.
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
from bench.robustness.kill_verifier import MOST_GAP, PACE, Device
from edgellm.engine import Message, Model, to_f32
from edgellm.storage import resolve
from edgellm.upstream.opening import open_upstream
from models.home.corpus import held_out
from models.home.families import FAMILIES
from testkit.traced_reply import POSITIONS, TOKENS, Gap, Judge
from testkit.upstream.process import KINDS, UpstreamProcess
from testkit.upstream.server import Fault

MODULE = "bench.upstream.faults"
GARBAGE = (
    Fault.GARBAGE, Fault.FOREIGN, Fault.TRUNCATED, Fault.DROPPED, Fault.HUGE, Fault.NAN, Fault.STRANGE, Fault.BUSY,
    Fault.FAILED,
)  # fmt: skip
SHORT = 0.5  # seconds of a fault that ends within a reply


@dataclass(frozen=True)
class Outcome:
    """The result of one fault."""

    server: str
    fault: str
    problems: tuple[str, ...]
    hit: bool
    back: bool
    undisturbed: float  # seconds, the deliberate slowness left out
    gap: Gap  # the longest of the reply that was hit
    usual: float  # seconds, the longest gap of the undisturbed reply


def faults(number: int) -> str:
    """Return the fault of a reply."""
    turn, place = divmod(number, 6)
    return (
        ("kill", "stop", "stall")[place] if place < 3 else GARBAGE[(3 * turn + place - 3) % len(GARBAGE)].name.lower()
    )


def strike(server: UpstreamProcess, fault: str) -> None:
    """Make the server fail."""
    if fault == "kill":
        server.kill()
    elif fault == "stop":
        server.hang()
    else:
        server.fail(Fault.STALLED if fault == "stall" else Fault[fault.upper()])


def mend(server: UpstreamProcess, fault: str) -> None:
    """Let the server answer again."""
    if fault == "stop":
        server.go_on()
    elif fault != "kill":
        server.fail(None)


def run(
    draft: Path, verifier: Path, replies: int, kinds: list[str], seed: int,
    on_outcome: Callable[[Outcome], object] = lambda _outcome: None,
) -> list[Outcome]:  # fmt: skip
    """Run all trials, on f32 model files; call `on_outcome` with each."""
    rng = random.Random(seed)
    cases = [held_out(family, -(-replies // len(FAMILIES))) for family in FAMILIES]
    prompts = [case.prompt for group in zip(*cases, strict=True) for case in group][:replies]
    outcomes = []
    with Model.load(draft) as small, Model.load(verifier) as big:
        judge = Judge(small, big)
        for at, kind in enumerate(kinds):
            server = UpstreamProcess(kind, verifier)
            try:
                server.wait()
                opened = open_upstream(server.url, small)
                device = Device(small, opened.verifier)
                for number in range(at, replies, len(kinds)):
                    turns = [Message(turn.role, turn.text) for turn in prompts[number]]
                    prompt = small.chat_prompt(turns)[: POSITIONS - TOKENS]
                    outcomes.append(trial(server, device, judge, prompt, number // len(kinds), kind, rng))
                    on_outcome(outcomes[-1])
                opened.verifier.close()
            finally:
                server.close()
    return outcomes


def trial(
    server: UpstreamProcess, device: Device, judge: Judge, prompt: Any, number: int, kind: str, rng: random.Random
) -> Outcome:
    """Write one reply, undisturbed and hit, and return the result."""
    fault, short = faults(number), number // 6 % 2 == 1
    pace = PACE if short else 0.0
    device.wait()
    undisturbed = device.write(prompt, pace)
    moment, after = threading.Event(), rng.randrange(1, TOKENS - 8)
    delay = rng.uniform(0.0, 4 * undisturbed.seconds / TOKENS)

    def hit_at_the_moment() -> None:
        moment.wait()
        time.sleep(delay)
        strike(server, fault)
        if short:
            time.sleep(SHORT)
            mend(server, fault)

    striker = threading.Thread(target=hit_at_the_moment)
    striker.start()
    try:
        hit = device.write(prompt, pace, moment, after)
    finally:
        moment.set()
        striker.join()
        mend(server, fault)
    server.wait()
    return Outcome(
        kind,
        fault,
        tuple(judge.problems(hit, undisturbed)),
        hit=hit.lost_at is not None,
        back=any("verified again" in notice.text for notice in hit.notices),
        undisturbed=undisturbed.seconds,
        gap=hit.gap,
        usual=undisturbed.gap.seconds,
    )


def table(found: dict[str, Any]) -> str:
    """Return a line for each kind of fault."""
    lines = [
        f"{found['replies']} replies with a fault each, by {', '.join(found['servers'])}",
        f"{'fault':12}{'replies':>8}{'went on alone':>15}{'verified again':>16}{'longest gap: median, most':>28}",
    ]
    for fault, row in found["faults"].items():
        gap = row["longest_gap"]
        lines.append(
            f"{fault:12}{row['replies']:>8}{row['went_on_unverified']:>15}{row['verified_again_before_the_end']:>16}"
            f"{gap['median']:>17.2f} s, {gap['max']:.2f} s"
        )
    lines.append(f"{found['gaps_over_5_s']} gaps over 5 s")
    lines.append(f"tokens lost, repeated or not the named model's: {sum(found['problems'].values())}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replies", type=int, nargs="?", default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["vllm-score", "llama-server", "ollama"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="faults", help="of the result file")
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--verifier", default="edgellm-verifier")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        draft, verifier = Path(folder) / "draft.gguf", Path(folder) / "verifier.gguf"
        to_f32(resolve(arguments.draft), draft)
        to_f32(resolve(arguments.verifier), verifier)
        outcomes = run(
            draft, verifier, arguments.replies, arguments.kinds, arguments.seed,
            partial(print, file=sys.stderr, flush=True),
        )  # fmt: skip
    problems = Counter(problem for outcome in outcomes for problem in outcome.problems)
    figures: dict[str, Any] = {
        "replies": len(outcomes), "servers": arguments.kinds, "load_average": os.getloadavg()[0],
        "gaps_over_5_s": sum(outcome.gap.seconds > MOST_GAP for outcome in outcomes),
        "longest_gaps": [
            asdict(outcome.gap) | {"rest": outcome.gap.rest, "server": outcome.server, "fault": outcome.fault}
            for outcome in sorted(outcomes, key=lambda one: -one.gap.seconds)[:5]
        ],
        "longest_gap_undisturbed": spread([outcome.usual for outcome in outcomes]),
        "faults": {}, "problems": dict(problems),
    }  # fmt: skip
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        of = [outcome for outcome in outcomes if outcome.fault == name]
        figures["faults"][name] = {
            "replies": len(of),
            "went_on_unverified": sum(outcome.hit for outcome in of),
            "verified_again_before_the_end": sum(outcome.back for outcome in of),
            "longest_gap": spread([outcome.gap.seconds for outcome in of]),
        }
    path = write(arguments.name, MODULE, figures, arguments.seed)
    sys.stdout.write(f"{table(figures)}written: {path}\n")
    sys.exit(1 if problems or figures["gaps_over_5_s"] else 0)


if __name__ == "__main__":
    main()
