"""One device (not paired in the last flood) floods a verifier that another device uses as usual."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from bench.robustness.attack.devices.flooder import KINDS
from bench.robustness.attack.harness import Attack, Found
from edgellm.engine import ContextSpec, Model
from edgellm.errors import VerifierLost
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk, Ids
from edgellm.storage.model_files import resolve
from edgellm.verifier.in_process import LocalVerifier
from testkit import ROOT
from testkit.processes.verifier import CONTEXT, PairedVerifierProcess, acquaint

SESSIONS = 8
ROUNDS = 12  # verdicts of a reply
GAMMA = 4
DRAFTING = 0.005  # seconds between a verdict and the next request
MEDIAN, WORST = 3.0, 10.0  # limits for a verdict's slowdown, at the median and at the 99th percentile
PROMPTS = (
    "The red mug is on the shelf in the kitchen. The blue one is in the box under the stairs. Where is the red mug?",
    "Alice has the key to the shed. Bob has the key to the house. Who has the key to the shed, and who to the house?",
    "On Monday we bake bread, on Tuesday we mend the roof, on Friday we rest. What do we do on Tuesday?",
)


def texts(model: Model) -> list[tuple[Ids, Ids]]:
    """Return prompts, and the verifier's text after each of them."""
    verifier = LocalVerifier(model, ContextSpec(n_ctx=CONTEXT, threads=1))
    with closing(verifier):
        made = []
        for prompt in map(model.tokenize, PROMPTS):
            session = verifier.open(GenerationState())
            text = session.submit(prompt, Chunk(), ROUNDS * (GAMMA + 1)).result().tokens
            made.append((prompt, text))
            session.close()
    return made


class Good:
    """A device with usual requests. `waits` are its verdicts' seconds, `alone` counts rounds without a verdict."""

    def __init__(self, remote: RemoteVerifier, work: list[tuple[Ids, Ids]]) -> None:
        self._remote, self._work = remote, work
        self._replies = 0
        self.wrong = 0

    def ask(self, seconds: float) -> tuple[list[float], list[float]]:
        """Return seconds of verdicts, and of waits after which it went on alone, within about `seconds`."""
        waits: list[float] = []
        alone: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            prompt, text = self._work[self._replies % len(self._work)]
            self._replies += 1
            session = self._remote.open(GenerationState())
            at = 0
            while at + GAMMA < len(text) and time.monotonic() < end:
                time.sleep(DRAFTING)
                if not session.ready():
                    continue
                began = time.monotonic()
                try:
                    chunk = Chunk(ids=text[at : at + GAMMA])
                    verdict = session.submit(np.concatenate((prompt, text[:at])), chunk).result()
                except VerifierLost:
                    alone.append(time.monotonic() - began)
                    continue
                waits.append(time.monotonic() - began)
                written = np.concatenate((chunk.ids[: verdict.accepted], verdict.tokens))
                self.wrong += not np.array_equal(written, text[at : at + len(written)])
                at += len(written)
            session.close()
        return waits, alone


@contextmanager
def flooding(port: int, home: Path, kind: str) -> Iterator[None]:
    """Run a flood in a process of its own."""
    command = [sys.executable, "-m", "bench.robustness.attack.devices.flooder", str(port), str(home), kind]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def floods(quick: bool) -> Found:
    """Measure an honest device's verdicts before and in each flood in turn."""
    seconds = 3.0 if quick else 8.0
    path = resolve("edgellm-verifier")
    wrong: list[str] = []
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, Model.load(path) as model:
        homes = [Path(folder, name) for name in ("host", "flooder", "good")]
        _, trust = acquaint(homes[0], homes[1:])
        work = texts(model)
        with (
            closing(PairedVerifierProcess(path, homes[0], SESSIONS)) as served,
            closing(served.connect(model.vocabulary, trust)) as line,
        ):
            good = Good(line, work)
            good.ask(1.0)
            for kind in KINDS:
                before, _ = good.ask(seconds)
                with flooding(served.port, homes[1], kind):
                    good.ask(0.5)  # until the flood is in full swing
                    during, alone = good.ask(seconds)
                time.sleep(0.5)
                if not served.alive():
                    return Found(len(KINDS), (f"{kind}: the verifier ended.",), figures)
                usual, flooded = (
                    np.percentile(1e3 * np.array(each or [np.inf]), (50, 99)) for each in (before, during)
                )
                figures |= {f"{kind}: alone": len(alone)}
                for name, one, other, most in zip(("p50", "p99"), usual, flooded, (MEDIAN, WORST), strict=True):
                    figures[f"{kind}: {name} ms"] = round(other, 1)
                    figures[f"{kind}: {name} times"] = round(other / one, 2)
                    if other > most * one:
                        wrong.append(f"{kind}: {name} {one:.1f} -> {other:.1f} ms, {len(alone)} times alone.")
            if good.wrong:
                wrong.append(f"{good.wrong} verdicts were not the verifier's own.")
    return Found(len(KINDS), tuple(wrong), figures)


ATTACKS = (Attack("floods", "nine kinds of floods by one device, while another one is served", floods),)
