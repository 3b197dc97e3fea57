"""One paired device sends prompts that another may have sent, and measures the time of the verdict."""

import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np

from bench.robustness.attack.harness import Attack, Found
from edgellm.engine import Model
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk, Ids
from edgellm.storage.model_files import resolve
from testkit.processes.verifier import PairedVerifierProcess, acquaint

LENGTH = 200  # tokens of a prompt
CLOSE = 0.6  # a time below this share of another one reveals something


def _seconds(line: RemoteVerifier, prompt: Ids) -> float:
    """Return the verifier's computing time, by its own account."""
    session = line.open(GenerationState())
    seconds = session.submit(prompt, Chunk()).result().seconds
    session.close()
    return seconds


def prefixes(quick: bool) -> Found:
    """Compare the times of prompts that the other device has sent with those of new ones."""
    trials = 8 if quick else 40
    rng = np.random.default_rng(18)
    path = resolve("edgellm-verifier")
    repeated, fresh, own = [], [], []
    with tempfile.TemporaryDirectory() as folder, Model.load(path) as model:
        homes = [Path(folder, name) for name in ("host", "victim", "spy")]
        trusts = acquaint(homes[0], homes[1:])
        with (
            closing(PairedVerifierProcess(path, homes[0], 8)) as served,
            closing(served.connect(model.vocabulary, trusts[0])) as victim,
            closing(served.connect(model.vocabulary, trusts[1])) as spy,
        ):
            for _ in range(trials):
                known, other = (rng.integers(300, 2000, LENGTH).astype(np.int32) for _ in range(2))
                _seconds(victim, known)
                repeated.append(_seconds(spy, known))
                fresh.append(_seconds(spy, other))
                own.append(_seconds(spy, other))
    middle = {name: float(np.median(times)) for name, times in (("asked", repeated), ("fresh", fresh), ("own", own))}
    figures = {f"{name} ms": round(1e3 * seconds, 2) for name, seconds in middle.items()}
    leaks = sum(one < CLOSE * middle["fresh"] for one in repeated) - sum(one < CLOSE * middle["fresh"] for one in fresh)
    wrong = [f"{leaks} of {trials} prompts of the other device were revealed."] if leaks > trials // 8 else []
    return Found(trials, tuple(wrong), figures)


ATTACKS = (Attack("prefix-timing", "one device sends the prompts of another one, and measures the time", prefixes),)
