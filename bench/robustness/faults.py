"""Write a thousand replies over a faulty link: does each end in time, and is every checked word the verifier's own?

A verifier in a process of its own (f32, mutual TLS), a pair here with the features of a user (retrieval, parallel
inference, caches kept from reply to reply), and `testkit.network.faulty_relay` between them. Everything is to be
verified. In each reply one fault occurs, at a random moment between the first and the last token; the next reply begins
when the line is back. Up to the first unchecked word the text is the verifier's own, and all of it if nothing was lost.
So a cache that an abandoned reply left damaged would show in later replies.

Columns, for each fault: replies; how many went on alone, and how many were verified again; how much longer they took,
at the median and at most. The run fails if a word is wrong, if a reply takes DEADLINE longer than undisturbed, or if a
session is left. The injected delay is left out, and so is the time that other programs took, which a sleeping thread
measures.
"""

import faulthandler
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import spread
from edgellm.engine import Message, Model
from edgellm.llm import LLM
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.spec.protocols import Elsewhere, GenerationState
from edgellm.spec.stream import Reply
from edgellm.spec.types import Source, Token
from edgellm.storage.model_files import resolve
from models.home.corpus import held_out
from models.home.families import FAMILIES
from testkit import ROOT
from testkit.gguf.changed import to_f32
from testkit.network.faulty_relay import FaultyRelay
from testkit.processes.verifier import PairedVerifierProcess, acquaint

TOKENS = 64
PROMPTS = 16
SESSIONS = 3
DEADLINE = 5.0  # seconds: a silence is noticed in one, and an attempt at a new connection has two
HANG = 60.0  # seconds after which a reply is given up
KINDS = {
    "none": 10, "delay": 10, "jitter": 10, "cut": 14, "half-open": 9, "stall": 9, "short stall": 8, "garbage": 12,
    "door closed": 6, "verifier killed": 6, "verifier hangs": 6, "reply abandoned": 10, "device killed": 2,
}  # fmt: skip
DELAYED = 0.05  # seconds at most
_UNCHECKED = (Source.DRAFT, Source.PARALLEL)
_TICK = 0.01  # seconds


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


@dataclass(frozen=True)
class Outcome:
    """The result of one fault."""

    kind: str
    seconds: float
    longer: float  # than undisturbed, without the injected delay and other programs
    unchecked: int  # tokens that were not verified
    back: bool  # the verifier was used again before the end
    problems: list[str] = field(default_factory=list)


@dataclass
class Scene:
    """The processes and the network that write a reply; the questions, and the verifier's own replies to them."""

    served: PairedVerifierProcess
    relay: FaultyRelay
    pair: LLM
    remote: RemoteVerifier
    other: Path  # home of another device
    talks: Sequence[Sequence[Message]]
    alone: Sequence[Sequence[int]]
    usual: float = 0.0  # median seconds of an undisturbed reply

    def wait(self) -> None:
        """Wait until the line is back."""
        end = time.monotonic() + HANG
        while not self.remote.open(GenerationState()).ready():
            if time.monotonic() > end:
                raise TimeoutError("the verifier does not come back")
            time.sleep(0.02)

    def reply(self, number: int) -> Reply:
        """Return a reply that is not written yet; without copies, as no fault would meet a reply of one chunk."""
        return self.pair.reply(self.talks[number], max_tokens=TOKENS, budget=1.0, retrieval="off")

    def strike(self, kind: str, rng: random.Random) -> None:
        """Cause a fault."""
        relay, served = self.relay, self.served
        match kind:
            case "delay":
                relay.delay(rng.choice((0.1, 0.4, 1.0)) * DELAYED)
            case "jitter":
                relay.delay(0.0, rng.choice((0.4, 1.0)) * DELAYED)
            case "cut":
                relay.cut()
            case "half-open":
                relay.half_open()
            case "stall":
                relay.stall()
            case "short stall":
                relay.stall()
                time.sleep(rng.uniform(0.05, 0.6))
                relay.heal()
            case "garbage":
                relay.garbage()
            case "door closed":
                relay.close_door()
            case "verifier killed":
                served.kill()
            case "verifier hangs":
                served.hang()
            case "device killed":
                self._kill_a_device(rng)

    def _kill_a_device(self, rng: random.Random) -> None:
        """Kill (SIGKILL) another device in the middle of its reply."""
        words = ("chat", "What is in the garden?", "--verifier", f"127.0.0.1:{self.served.port}", "--budget", "1")
        process = subprocess.Popen(
            [sys.executable, "-m", "edgellm", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd=ROOT, env=os.environ | {"EDGELLM_HOME": str(self.other)},
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.read(1)  # it is writing
        time.sleep(rng.uniform(0.0, 0.3))
        process.kill()
        process.communicate()

    def heal(self) -> None:
        """End all faults."""
        self.relay.heal()
        self.served.go_on()


def judged(kind: str, tokens: Sequence[Token], own: Sequence[int]) -> tuple[int, list[str]]:
    """Return how many tokens of a reply nobody has checked, and what is wrong with the others."""
    ids = [token.id for token in tokens]
    free = next((at for at, token in enumerate(tokens) if token.source in _UNCHECKED), len(tokens))
    problems = [] if ids[:free] == list(own[:free]) else ["what was checked is not the verifier's own text"]
    if free == len(tokens) and len(ids) != len(own) and kind != "reply abandoned":
        problems.append(f"{len(ids)} tokens, and the verifier writes {len(own)}")
    return len(tokens) - free, problems


def trial(scene: Scene, number: int, kind: str, rng: random.Random, clock: Clock) -> Outcome:
    """Write one reply in which a fault occurs, and return the result."""
    scene.wait()
    lost, notices, tokens = clock.lost, list[str](), list[Token]()
    after = rng.randrange(1, max(2, len(scene.alone[number]) // 2))
    reply, striker = scene.reply(number), threading.Thread(target=scene.strike, args=(kind, rng))
    reply.listen(on_notice=lambda notice: notices.append(notice.text))
    began = time.perf_counter()
    for token in reply:
        tokens.append(token)
        if len(tokens) == after:
            if kind == "reply abandoned":
                reply.close() if rng.getrandbits(1) else reply.cancel()
                break
            striker.start()
    seconds = time.perf_counter() - began
    if striker.is_alive():
        striker.join()
    unchecked, problems = judged(kind, tokens, scene.alone[number])
    if kind == "verifier hangs" and rng.getrandbits(1):
        scene.served.kill()
    scene.heal()
    on_purpose = TOKENS * 2 * DELAYED if kind in ("delay", "jitter") else 0.0
    longer = seconds - scene.usual - (clock.lost - lost) - on_purpose
    return Outcome(kind, seconds, longer, unchecked, any("back" in text for text in notices), problems)


@contextmanager
def opened(folder: Path, seed: int, prompts: int) -> Iterator[Scene]:
    """Start the processes, and write the undisturbed replies."""
    paths = folder / "draft.gguf", folder / "verifier.gguf"
    for name, path in zip(("edgellm-draft", "edgellm-verifier"), paths, strict=True):
        to_f32(resolve(name), path)
    trust, _ = acquaint(folder / "host", [folder / "device", folder / "other"])
    cases = [held_out(family, -(-prompts // len(FAMILIES))) for family in FAMILIES]
    mixed = [case for group in zip(*cases, strict=True) for case in group][:prompts]
    talks = [[Message(turn.role, turn.text) for turn in case.prompt] for case in mixed]
    with LLM.open("none", paths[1], threads=1) as own:
        alone = [[token.id for token in own.reply(talk, max_tokens=TOKENS)] for talk in talks]
    served = PairedVerifierProcess(paths[1], folder / "host", SESSIONS)
    try:
        with Model.load(paths[0]) as small, FaultyRelay(served.port, seed) as relay:
            remote = served.connect(small.vocabulary, trust, relay.port)
            remote.elsewhere, remote.extra = Elsewhere(lambda: remote.info.model_hash), 0
            with LLM(small, small, remote, threads=1) as pair:
                scene = Scene(served, relay, pair, remote, folder / "other", talks, alone)
                taken = []
                for number in range(len(talks)):
                    began = time.perf_counter()
                    list(scene.reply(number))
                    taken.append(time.perf_counter() - began)
                scene.usual = statistics.median(taken)
                yield scene
            remote.close()
    finally:
        served.go_on()
        served.close()


def run(kinds: Sequence[str], seed: int, prompts: int = PROMPTS) -> tuple[list[Outcome], Figures]:
    """Return a trial of each of `kinds`, and the verifier's status at the end."""
    rng, clock = random.Random(seed), Clock()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder), seed, prompts) as scene:
        for kind in track(kinds, "replies"):
            faulthandler.dump_traceback_later(HANG, exit=True)  # if a reply hangs, print where, and exit
            outcomes.append(trial(scene, rng.randrange(len(scene.talks)), kind, rng, clock))
            faulthandler.cancel_dump_traceback_later()
        end = time.monotonic() + HANG
        while scene.served.status.get("sessions") != 0 and time.monotonic() < end:
            time.sleep(0.5)
        return outcomes, dict(scene.served.status)


def figures_of(outcomes: Sequence[Outcome]) -> Figures:
    """Return the figures by kind of fault."""
    found: Figures = {}
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


def measure(replies: int = 1000, seed: int = 0) -> Figures:
    """Return the figures of all replies."""
    kinds = random.Random(seed).choices(list(KINDS), list(KINDS.values()), k=replies)
    outcomes, left = run(kinds, seed)
    return {
        "replies": len(outcomes), "wrong": sum(bool(one.problems) for one in outcomes),
        "late": sum(one.longer > DEADLINE for one in outcomes), "deadline": DEADLINE, "faults": figures_of(outcomes),
        "median_seconds": statistics.median(one.seconds for one in outcomes), "left": left,
    }  # fmt: skip


def failures(found: Figures) -> list[str]:
    """Return the promises that were broken."""
    broken = {"wrong": found["wrong"], "late": found["late"], "sessions left": found["left"].get("sessions")}
    return [f"{count} {what}" for what, count in broken.items() if count]


def table(found: Figures) -> str:
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
