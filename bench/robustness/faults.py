"""Write a thousand replies over a faulty link: does each end in time, with every word from the model that it names?

    python -m bench.robustness.faults [REPLIES] [--seed 0]

A verifier in a process of its own (f32, mutual TLS), a device here, and `testkit.network.faulty_relay` between them. In
each reply one fault occurs, at a random moment between the first and the last token; the next reply begins when the
line is back.

Half of the replies are written by the decoding loop and judged as in `bench.robustness.kill_verifier`: no token is lost
or repeated, each is the most probable one under the model that its source names, and up to the fault the text is the
undisturbed one. The other half come from one `LLM` with the features of a user (retrieval, parallel inference, caches
kept from reply to reply), at budget 1.0: up to the first unchecked word they are the verifier's own text, and all of it
if nothing was lost. So a cache that an abandoned reply left damaged would show in later replies.

Columns, for each fault: replies; how many went on alone, and how many were verified again; how much longer they took,
at the median and at most. Exit code 1 if a word is wrong, or a reply takes DEADLINE longer than undisturbed. The
injected delay is left out, and so is the time that other programs took, which a sleeping thread measures.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.report import write
from bench.harness.statistics import spread
from bench.robustness.faults_setup import Scene, opened, strike
from bench.robustness.kill_verifier import Device
from edgellm.spec.types import Source
from testkit.traced_reply import TOKENS, Judge, Written

PROMPTS = 16
DEADLINE = 5.0  # seconds: a silence is noticed in one, and an attempt at a new connection has two
HANG = 60.0  # seconds after which a reply is given up
KINDS = {
    "none": 10, "delay": 10, "jitter": 10, "cut": 14, "half-open": 9, "stall": 9, "short stall": 8, "garbage": 12,
    "door closed": 6, "verifier killed": 6, "verifier hangs": 6, "reply abandoned": 10, "device killed": 2,
}  # fmt: skip
_UNCHECKED = (Source.DRAFT, Source.PARALLEL)
_TICK = 0.01  # seconds
DRAFTED = 1.0  # round trips a token at most, for the delay that a reply may take


class Clock:
    """Seconds that other programs took: those by which a thread that sleeps for a moment wakes up late."""

    def __init__(self) -> None:
        self.lost = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            began = time.perf_counter()
            time.sleep(_TICK)
            late = time.perf_counter() - began - _TICK
            if late > _TICK:  # a shorter wait was for another thread of this process
                self.lost += late


@dataclass
class Outcome:
    """The result of one fault."""

    kind: str
    way: str
    seconds: float
    longer: float  # than undisturbed, without the injected delay and other programs
    unchecked: int  # tokens that were not verified
    back: bool  # the verifier was used again before the end
    problems: list[str] = field(default_factory=list)


def traced(scene: Scene, number: int, kind: str, rng: random.Random) -> tuple[Written, float]:
    """Return a reply of the decoding loop, and its seconds."""
    device = Device(scene.small, scene.remote, parallel=bool(rng.getrandbits(1)))
    moment, after = threading.Event(), rng.randrange(1, TOKENS - 8)

    def hit() -> None:
        moment.wait()
        time.sleep(rng.uniform(0.0, 0.02))
        strike(scene, kind, rng)

    striker = threading.Thread(target=hit)
    striker.start()
    began = time.perf_counter()
    try:
        written = device.write(scene.prompt(number), 0.0, moment, after)
        return written, time.perf_counter() - began
    finally:
        moment.set()
        striker.join()


def paired(scene: Scene, number: int, kind: str, rng: random.Random) -> tuple[list[Any], float, list[str]]:
    """Return a reply of the pair: its tokens, its seconds, and its notices."""
    notices: list[str] = []
    tokens: list[Any] = []
    after = rng.randrange(1, max(2, len(scene.alone[number]) // 2))
    reply = scene.pair.reply(scene.talks[number], max_tokens=TOKENS, budget=1.0)
    reply.listen(on_notice=lambda notice: notices.append(notice.text))
    striker: threading.Thread | None = None
    began = time.perf_counter()
    for token in reply:
        tokens.append(token)
        if len(tokens) == after:
            if kind == "reply abandoned":
                reply.close() if rng.getrandbits(1) else reply.cancel()
                break
            striker = threading.Thread(target=strike, args=(scene, kind, rng))
            striker.start()
    seconds = time.perf_counter() - began
    if striker is not None:
        striker.join()
    return tokens, seconds, notices


def trial(scene: Scene, judge: Judge, number: int, kind: str, rng: random.Random, clock: Clock) -> Outcome:
    """Write one reply in which a fault occurs, and return the result."""
    scene.wait()
    lost = clock.lost
    if rng.getrandbits(1) and kind != "reply abandoned":
        written, seconds = traced(scene, number, kind, rng)
        before = scene.undisturbed[number]
        problems = judge.problems(written, before)
        unchecked = sum(token.source in _UNCHECKED for token in written.tokens)
        back = any("back" in notice.text for notice in written.notices)
        made = Outcome(kind, "loop", seconds, seconds - scene.usual["loop"], unchecked, back, problems)
    else:
        tokens, seconds, notices = paired(scene, number, kind, rng)
        own, ids = scene.alone[number], [token.id for token in tokens]
        free = next((i for i, token in enumerate(tokens) if token.source in _UNCHECKED), len(tokens))
        problems = [] if ids[:free] == own[:free] else ["what was checked is not the verifier's own text"]
        if free == len(tokens) and len(ids) != len(own) and kind != "reply abandoned":
            problems.append(f"{len(ids)} tokens, and the verifier writes {len(own)}")
        unchecked = len(tokens) - free
        back = any("back" in text for text in notices)
        made = Outcome(kind, "pair", seconds, seconds - scene.usual["pair"], unchecked, back, problems)
    made.longer -= clock.lost - lost
    if kind == "verifier hangs" and rng.getrandbits(1):
        scene.served.kill()
    if kind in ("delay", "jitter"):
        made.longer -= DRAFTED * TOKENS * 2 * 0.05
    scene.heal()
    return made


def run(
    kinds: list[str], seed: int, on_outcome: Callable[[Outcome], object] = lambda _: None, prompts: int = PROMPTS
) -> tuple[list[Outcome], dict[str, Any]]:
    """Return a trial of each of `kinds`, and the verifier's status at the end; call `on_outcome` with each trial."""
    rng = random.Random(seed)
    outcomes: list[Outcome] = []

    def work(scene: Scene) -> dict[str, Any]:
        judge, clock = Judge(scene.small, scene.big), Clock()
        for kind in kinds:
            faulthandler.dump_traceback_later(HANG, exit=True)  # if a reply hangs, print where, and exit
            outcomes.append(trial(scene, judge, rng.randrange(len(scene.talks)), kind, rng, clock))
            faulthandler.cancel_dump_traceback_later()
            on_outcome(outcomes[-1])
        end = time.monotonic() + 60
        while scene.served.status.get("sessions") != 0 and time.monotonic() < end:
            time.sleep(0.5)
        return dict(scene.served.status)

    with tempfile.TemporaryDirectory() as folder:
        left = opened(Path(folder), seed, prompts, work)
    return outcomes, left


def figures_of(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the figures by kind of fault."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        of = [one for one in outcomes if one.kind == kind]
        if of:
            found[kind] = {
                "replies": len(of),
                "unchecked_replies": sum(one.unchecked > 0 for one in of),
                "unchecked_tokens": sum(one.unchecked for one in of),
                "verified_again": sum(one.back for one in of),
                "seconds": spread([one.seconds for one in of]),
                "longer": spread([one.longer for one in of]),
                "problems": dict(Counter(problem for one in of for problem in one.problems)),
                "late": sum(one.longer > DEADLINE for one in of),
            }
    return found


def table(found: dict[str, Any]) -> str:
    """Return a line for each kind of fault."""
    head = f"{'fault':<17}{'replies':>8}{'went on alone':>15}{'checked again':>15}{'longer, median':>16}{'at most':>9}"
    lines = [f"{head}{'wrong':>7}{'late':>6}"]
    for kind, row in found["faults"].items():
        lines.append(
            f"{kind:<17}{row['replies']:>8}{row['unchecked_replies']:>15}{row['verified_again']:>15}"
            f"{max(0.0, row['longer']['median']):>14.2f} s{max(0.0, row['longer']['max']):>7.2f} s"
            f"{sum(row['problems'].values()):>7}{row['late']:>6}"
        )
    lines.append(
        f"{found['replies']:,} replies, {found['wrong']} with a wrong, lost or repeated word, {found['late']} late,"
        f" {found['left'].get('sessions', '?')} sessions left at the verifier"
    )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replies", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="faults", help="of the result file")
    arguments = parser.parse_args()
    began = time.monotonic()

    def show(one: Outcome) -> None:
        print(f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}: {one}", file=sys.stderr, flush=True)

    kinds = random.Random(arguments.seed).choices(list(KINDS), list(KINDS.values()), k=arguments.replies)
    outcomes, left = run(kinds, arguments.seed, show)
    wrong, late = sum(bool(one.problems) for one in outcomes), sum(one.longer > DEADLINE for one in outcomes)
    figures = {
        "replies": len(outcomes), "wrong": wrong, "late": late, "deadline": DEADLINE, "faults": figures_of(outcomes),
        "median_seconds": statistics.median(one.seconds for one in outcomes), "left": left,
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    path = write(arguments.name, "bench.robustness.faults", figures, arguments.seed)
    print(f"{table(figures)}written: {path}")
    sys.exit(1 if wrong or late or left.get("sessions") else 0)


if __name__ == "__main__":
    main()
