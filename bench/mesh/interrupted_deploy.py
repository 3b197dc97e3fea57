"""Interrupt the deployment of a model at random: how much is sent twice, and is every hash right?

    python -m bench.mesh.interrupted_deploy [--cuts 50] [--rounds 3]

At each of `--cuts` random places one of three things happens: the line is cut, the worker is killed (SIGKILL) and
started again, or the sender is, which then resumes from what the worker has. A relay between the two processes counts
the bytes; a deployment without interruptions shows how many of them are gRPC's own. In the end every piece is hashed
again.

A line for each round: the interruptions by kind, the bytes that were sent twice, those for each interruption beside the
window that is allowed, and pieces with a wrong hash. Exit code 1 if there is one, or if more is sent twice.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.harness import report
from edgellm.engine import ModelFile
from edgellm.rpc.layers.codec import WINDOW
from edgellm.storage.layers.manifest import Manifest, manifest_of
from edgellm.storage.layers.store import LayerStore
from testkit import ROOT
from testkit.gguf.random_model import SHAPES
from testkit.gguf.random_model import write as write_model
from testkit.network.relay import Network, Relay

KINDS = ("line", "worker", "sender")


class Worker:
    """A process that keeps layers."""

    def __init__(self, store: Path, port: int) -> None:
        self._words = ("testkit.processes.layer_worker", "--port", str(port), "--store", str(store))
        self.start()

    def start(self) -> None:
        self._process = started(*self._words, out=subprocess.PIPE)
        assert self._process.stdout is not None
        while "listening" not in (line := self._process.stdout.readline()):
            assert line, "the worker does not start"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def started(module: str, *words: str, out: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *words], cwd=ROOT, stdout=out, stderr=subprocess.DEVNULL, text=True
    )


def sender(model: Path, recipe: Manifest, port: int) -> subprocess.Popen[str]:
    return started("edgellm", "mesh", "deploy", str(model), "--split", f"127.0.0.1:{port}:1-{recipe.layers}")


def on_disk(store: Path) -> int:
    """Return the bytes of all pieces, complete or not."""
    size = 0
    for path in (store / "pieces").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # it has just been renamed
            size += path.stat().st_size
    return size


def wrong(store: Path, recipe: Manifest) -> list[str]:
    """Return pieces that are missing or have another hash."""
    keeper = LayerStore(store, 10**12)
    found = []
    for piece in recipe.pieces:
        path = keeper.find(piece)
        if path is None or hashlib.sha256(path.read_bytes()).hexdigest() != piece.sha256:
            found.append(str(piece))
    return found + [path.name for path in store.rglob("*.partial")]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


@dataclass
class Deployed:
    """A deployment: the sender's exit code, bytes up the line, and wrong pieces."""

    code: int
    carried: int
    seconds: float
    kinds: dict[str, int]
    connections: int
    wrong: list[str] = field(default_factory=list)
    twice: int = 0


def deployed(model: Path, recipe: Manifest, store: Path, network: Network, cuts: int, seed: int) -> Deployed:
    rng = random.Random(seed)
    places = sorted(rng.randrange(recipe.size) for _ in range(cuts))
    port, kinds = free_port(), Counter[str]()
    worker = Worker(store, port)
    began = time.perf_counter()
    with Relay(port, network) as relay:
        sending = sender(model, recipe, relay.port)
        for place in places:
            while on_disk(store) < place:
                if sending.poll() is not None:  # started while the worker was away: it says so and ends
                    kinds["asked again"] += 1
                    sending = sender(model, recipe, relay.port)
                time.sleep(0.002)
            kind = rng.choice(KINDS)
            kinds[kind] += 1
            if kind == "worker":
                worker.kill()
                relay.cut()
                worker.start()
            elif kind == "sender":
                sending.send_signal(signal.SIGKILL)
                sending.wait()
                sending = sender(model, recipe, relay.port)
            else:
                relay.cut()
        while sending.wait(timeout=600):
            kinds["asked again"] += 1
            sending = sender(model, recipe, relay.port)
        carried = relay.carried[0]
    seconds = time.perf_counter() - began
    worker.kill()
    return Deployed(
        sending.returncode, carried, round(seconds, 2), dict(kinds), relay.connections, wrong(store, recipe)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3, help="deployments, each with `--cuts` interruptions")
    parser.add_argument("--megabits", type=float, default=200.0)
    parser.add_argument("--round-trip", type=float, default=0.004, help="seconds")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="interrupted_deploy", help="of the result file")
    args = parser.parse_args()
    network = Network(args.megabits, args.round_trip)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["EDGELLM_HOME"] = str(folder / "home")
        model = folder / "model.gguf"
        shape = SHAPES["qwen2.5-0.5b"]
        write_model(model, replace(shape, n_layer=args.layers, n_vocab=8192), "Q4_0", args.seed)
        recipe = manifest_of(ModelFile.open(model))
        alone = deployed(model, recipe, folder / "alone", network, 0, args.seed)
        own = alone.carried - recipe.size
        rounds = []
        for number in range(args.rounds):
            done = deployed(model, recipe, folder / str(number), network, args.cuts, args.seed + number)
            done.twice = done.carried - recipe.size - own
            rounds.append(done)
            print(f"{number + 1} of {args.rounds}: {done.seconds} s", flush=True)
    each = [done.twice / args.cuts for done in rounds]
    good = all(not done.wrong and done.code == 0 for done in [alone, *rounds]) and max(each) <= WINDOW
    figures = {"model_bytes": recipe.size, "pieces": len(recipe.pieces), "window": WINDOW, "megabits": args.megabits,
         "round_trip": args.round_trip, "cuts": args.cuts, "alone": asdict(alone), "grpc_bytes": own,
         "rounds": [asdict(done) for done in rounds],
         "twice_each": each, "good": good}  # fmt: skip
    print(table(figures), end="")
    print(f"written: {report.write(args.name, 'bench.mesh.interrupted_deploy', figures, args.seed)}")
    sys.exit(not good)


def table(found: dict[str, Any]) -> str:
    """Return a line for each round: interruptions of each kind, and the bytes sent twice."""
    lines = [
        f"{found['cuts']} interruptions {row['kinds']}: {row['twice'] / 1e6:.2f} MB of"
        f" {found['model_bytes'] / 1e6:.1f} sent twice, {row['twice'] / found['cuts'] / 1024:.0f} KiB each"
        f" ({found['window'] // 1024} allowed), wrong: {row['wrong'] or 'none'}, {row['seconds']} s"
        for row in found["rounds"]
    ]
    median = statistics.median(found["twice_each"]) / 1024
    lines.append(
        f"uninterrupted {found['alone']['seconds']} s, {found['grpc_bytes'] / found['model_bytes']:.2%} of gRPC's own;"
        f" median {median:.0f} KiB twice"
    )
    lines.append(
        "every hash is right, and no more than a window is sent twice" if found["good"] else "NOT as it should be"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
