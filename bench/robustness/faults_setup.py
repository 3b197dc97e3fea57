"""The processes of `bench.robustness.faults`: verifier, device and network."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.robustness.kill_verifier import Device
from edgellm.engine import Message, Model, to_f32
from edgellm.llm import LLM
from edgellm.rpc.trust.trust import Trust
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.storage import resolve
from models.home.corpus import held_out
from models.home.families import FAMILIES
from testkit import ROOT
from testkit.network.faulty_relay import FaultyRelay
from testkit.processes.verifier import PairedVerifierProcess, acquaint
from testkit.traced_reply import POSITIONS, TOKENS, Written

SESSIONS = 3


@dataclass
class Scene:
    """The models, processes and network that write a reply."""

    small: Model
    big: Model
    served: PairedVerifierProcess
    relay: FaultyRelay
    remote: RemoteVerifier
    pair: LLM
    trust: Trust
    folder: Path
    texts: Path
    talks: list[list[Message]]
    undisturbed: list[Written] = field(default_factory=list)
    alone: list[list[int]] = field(default_factory=list)
    usual: dict[str, float] = field(default_factory=dict)  # median seconds of a reply of either kind

    def prompt(self, number: int) -> Any:
        return self.small.chat_prompt(self.talks[number])[: POSITIONS - TOKENS]

    def wait(self) -> None:
        """Wait until the line is back."""
        Device(self.small, self.remote).wait()

    def heal(self) -> None:
        self.relay.heal()
        self.served.go_on()


def strike(scene: Scene, kind: str, rng: random.Random) -> None:
    """Cause the fault `kind` in the middle of a reply."""
    relay, served = scene.relay, scene.served
    match kind:
        case "delay":
            relay.delay(rng.choice((0.005, 0.02, 0.05)))
        case "jitter":
            relay.delay(0.0, rng.choice((0.02, 0.05)))
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
            _kill_a_device(scene, rng)


def _kill_a_device(scene: Scene, rng: random.Random) -> None:
    """Kill (SIGKILL) another device in the middle of its requests."""
    files = [str(scene.folder / "other"), str(scene.texts)]
    run = ["testkit.processes.devices", str(scene.served.port), *files, "1", "0", "0.01"]
    process = subprocess.Popen([sys.executable, "-m", *run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.readline()  # it is connected
    time.sleep(rng.uniform(0.0, 0.3))
    process.kill()
    process.communicate()


def opened(folder: Path, seed: int, prompts: int, work: Callable[[Scene], Any]) -> Any:
    """Set the scene, write the undisturbed replies, and return the result of `work`."""
    paths = folder / "draft.gguf", folder / "verifier.gguf"
    for name, path in zip(("edgellm-draft", "edgellm-verifier"), paths, strict=True):
        to_f32(resolve(name), path)
    trust, _ = acquaint(folder / "host", [folder / "device", folder / "other"])
    cases = [held_out(family, -(-prompts // len(FAMILIES))) for family in FAMILIES]
    mixed = [case for group in zip(*cases, strict=True) for case in group][:prompts]
    talks = [[Message(turn.role, turn.text) for turn in case.prompt] for case in mixed]
    served = PairedVerifierProcess(paths[1], folder / "host", SESSIONS)
    try:
        with Model.load(paths[0]) as small, Model.load(paths[1]) as big, FaultyRelay(served.port, seed) as relay:
            remote = served.line(small.vocabulary, trust, relay.port)
            with LLM(small, draft=small, verifier=remote, threads=1, model_hash=lambda: remote.info.model_hash) as pair:
                texts = folder / "texts.npz"
                scene = Scene(small, big, served, relay, remote, pair, trust, folder, texts, talks)
                _learn(scene, paths[1])
                done = work(scene)
            remote.close()
            return done
    finally:
        served.go_on()
        served.close()


def _learn(scene: Scene, verifier: Path) -> None:
    took = []
    with LLM.open("none", verifier, threads=1) as own:
        for number, talk in enumerate(scene.talks):
            scene.alone.append([token.id for token in own.reply(talk, max_tokens=TOKENS)])
            scene.undisturbed.append(Device(scene.small, scene.remote).write(scene.prompt(number)))
            began = time.perf_counter()
            list(scene.pair.reply(talk, max_tokens=TOKENS, budget=1.0))
            took.append(time.perf_counter() - began)
    loop = statistics.median(one.seconds for one in scene.undisturbed)
    scene.usual = {"loop": loop, "pair": statistics.median(took)}
    kept: dict[str, Any] = {}
    for number, one in enumerate(scene.undisturbed):
        kept |= {f"prompt{number}": scene.prompt(number), f"text{number}": one.ids}
    np.savez(scene.texts, **kept)
