"""Devices at a stock server, directly and through a gateway: verified tokens a second, and what the gateway costs.

    python -m bench.upstream.gateway [--devices 1 16 64] [--repeats 5] [--pass-ms 30] [--drafting-ms 120] [--seed 0]
    python -m bench.upstream.gateway --url URL --server "llama-server b7000" --verifier GGUF [--name gateway_live]

Every device sends chunks of four along the verifier's own greedy text, three in ten of them with a wrong token, and
after each verdict drafts for `--drafting-ms`: the pace of a phone. The server is one of `testkit/upstream/paced.py`
with passes of `--pass-ms`, which knows the text by heart, so that a small machine can serve many devices; with `--url`
it is a real one with the model of `--verifier`, and its own pace. Directly, the same requests are sent by one plain
client over as many connections. Through the gateway, each device has its own connection to `edgellm serve --role
verifier --upstream`, a process of its own; devices, gateway and server share the machine's cores. `--before N` makes
each prompt N tokens long.

Columns: tokens accepted and written a second in both ways, in turns, and their ratio within a turn; the median time of
a request in both; the processor time that the gateway takes for a request (`own`), as a share of the median time of
a direct one (`cost`); the share of the prompts that the server had in its cache; and how often the gateway has told a
device to come back later.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, TypeAlias

import numpy as np
import psutil

from bench.engine.serve_throughput import TOKENS, Script, scripts
from bench.harness.report import write
from bench.harness.statistics import spread
from edgellm.engine import Model
from edgellm.errors import VerifierBusy
from edgellm.rpc.address import Address
from edgellm.services.client.connection import Timing
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import GREEDY, Chunk, Ids, Verdict
from edgellm.storage import resolve
from edgellm.upstream.opening import UpstreamOptions, open_upstream
from edgellm.upstream.verifier import UpstreamTiming, UpstreamVerifier
from testkit import ROOT
from testkit.upstream.paced import PacedProcess, until_open

MODULE = "bench.upstream.gateway"
PATIENT = UpstreamTiming(least=600.0)
DEVICE = Timing(least=600.0, silent_beats=2400)
HEAD = (
    f"{'devices':>7}{'direct':>10}{'gateway':>10}{'share':>8}{'direct ms':>11}{'gateway ms':>12}{'own ms':>8}"
    f"{'cost':>7}{'cached':>8}{'back':>6}"
)


class GatewayProcess:
    """A gateway to a server, in a process of its own."""

    def __init__(self, url: str, model: Path) -> None:
        """Start it, and return when it listens."""
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            self.port, web = one.getsockname()[1], other.getsockname()[1]
        words = ["--upstream", url, "-m", str(model), "--port", str(self.port), "--http-port", str(web)]
        command = [sys.executable, "-m", "edgellm", "serve", "--role", "verifier", *words]
        self._process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        until_open(self.port, self._process)
        self._watched = psutil.Process(self._process.pid)
        self._metrics = f"http://127.0.0.1:{web}/metrics"

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    def seconds(self) -> float:
        """Return the processor time that it has taken."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def prompts(self) -> tuple[float, float]:
        """Return how many tokens of prompts the server has had in its cache so far, and how many it was sent."""
        with urllib.request.urlopen(self._metrics) as answer:
            text = answer.read().decode()
        found = [
            re.search(rf"^edgellm_upstream_{name}_tokens_total{{.*}} (\S+)$", text, re.MULTILINE)
            for name in ("cached", "prefix")
        ]
        return float(found[0][1]) if found[0] else 0.0, float(found[1][1]) if found[1] else 0.0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Turn:
    """A turn of all devices: tokens a second, the seconds of each request, and how many were pushed back."""

    rate: float
    requests: Sequence[float]
    pushed_back: int


Ask: TypeAlias = Callable[[Ids, Chunk], Verdict]
"""Returns the verdict on a chunk behind a prefix."""


def drive(asks: Sequence[Ask], work: Sequence[Script], drafting: float) -> Turn:
    """Have each device ask until its text is verified; the prompts are in the cache before the clock starts."""
    requests: list[float] = []
    pushed_back: list[float] = []
    together = threading.Barrier(len(work) + 1)

    def one(device: int) -> int:
        script, ask = work[device], asks[device]
        ask(script.prompt, Chunk())
        together.wait()
        sleep(drafting * device / len(work))  # devices do not draft in step
        at = 1
        while at < TOKENS:
            sleep(drafting)
            began = perf_counter()
            try:
                verdict = ask(script.prefix(at), script.chunk(at))
            except VerifierBusy as busy:
                pushed_back.append(busy.seconds)
                sleep(busy.seconds)
                continue
            requests.append(perf_counter() - began)
            at += verdict.accepted + len(verdict.tokens)
        return at - 1

    with ThreadPoolExecutor(len(work)) as pool:
        running = [pool.submit(one, device) for device in range(len(work))]
        together.wait()
        began = perf_counter()
        written = sum(future.result() for future in running)
        return Turn(written / (perf_counter() - began), requests, len(pushed_back))


def directly(verifier: UpstreamVerifier, work: Sequence[Script], drafting: float) -> Turn:
    """Let a plain client send the requests."""

    def at_server() -> Ask:
        text = verifier.text(GREEDY)
        return lambda prefix, chunk: text.ask(prefix, chunk).result()

    return drive([at_server() for _ in work], work, drafting)


def through(gateway: GatewayProcess, model: Model, work: Sequence[Script], drafting: float) -> tuple[Turn, float]:
    """Let devices ask a gateway; return also its processor time by request."""
    with ExitStack() as closing:

        def at_gateway() -> Ask:
            remote = RemoteVerifier(gateway.address, model.vocabulary, timing=DEVICE)
            closing.callback(remote.close)
            session = remote.open(GenerationState())
            closing.callback(session.close)
            return lambda prefix, chunk: session.submit(prefix, chunk).result()

        asks = [at_gateway() for _ in work]
        before = gateway.seconds()
        turn = drive(asks, work, drafting)
        return turn, (gateway.seconds() - before) / (len(turn.requests) + len(work))


def longer(script: Script, tokens: int) -> Script:
    """Return a script whose prompt has at least so many tokens: itself again and again, the last of them its own."""
    before = np.resize(script.prompt, max(0, tokens - len(script.prompt)))
    return replace(script, prompt=np.concatenate((before, script.prompt)).astype(np.int32))


def measure(
    server: str, model: Model, path: Path, everything: Sequence[Script], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the figures for each number of devices."""
    rows = []
    options = UpstreamOptions(timing=PATIENT, connections=max(arguments.devices))
    with ExitStack() as closing:
        text = closing.enter_context(Model.load(path, text_only=True))
        plain = open_upstream(server, text, options).verifier
        closing.callback(plain.close)
        gateway = GatewayProcess(server, path)
        closing.callback(gateway.close)
        for devices in arguments.devices:
            work = everything[:devices]
            turns: list[tuple[Turn, Turn, float]] = []
            before = gateway.prompts()
            for number in range(arguments.repeats):
                first = directly(plain, work, arguments.drafting_ms / 1e3) if number % 2 == 0 else None
                other, own = through(gateway, model, work, arguments.drafting_ms / 1e3)
                turns.append((first or directly(plain, work, arguments.drafting_ms / 1e3), other, own))
            after = gateway.prompts()
            rows.append(row(devices, turns, (after[0] - before[0]) / (after[1] - before[1])))
            print(_line(rows[-1]), flush=True)
    return rows


def row(devices: int, turns: Sequence[tuple[Turn, Turn, float]], cached: float) -> dict[str, Any]:
    """Return the figures of `turns`: directly, through the gateway, and the gateway's own seconds by request."""
    direct, gateway, own = (list(each) for each in zip(*turns, strict=True))
    waits = [median(turn.requests) for turn in direct]
    return {
        "devices": devices,
        "direct": spread([turn.rate for turn in direct]),
        "gateway": spread([turn.rate for turn in gateway]),
        "share": spread([b.rate / a.rate for a, b in zip(direct, gateway, strict=True)]),
        "direct_ms": spread([1e3 * wait for wait in waits]),
        "gateway_ms": spread([1e3 * median(turn.requests) for turn in gateway]),
        "own_ms": spread([1e3 * seconds for seconds in own]),
        "cost": spread([seconds / wait for seconds, wait in zip(own, waits, strict=True)]),
        "cached": cached,
        "pushed_back": sum(turn.pushed_back for turn in gateway),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pass-ms", type=float, default=30.0)
    parser.add_argument("--drafting-ms", type=float, default=120.0)
    parser.add_argument("--before", type=int, default=0, help="tokens of a prompt, at least")
    parser.add_argument("--url", help="of a real server")
    parser.add_argument("--server", default="", help="its name and version")
    parser.add_argument("--verifier", default="edgellm-verifier", help="the model that it serves, as a GGUF")
    parser.add_argument("--name", default="gateway", help="of the result file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    path, most = Path(resolve(arguments.verifier)), max(arguments.devices)
    with Model.load(path) as model, ExitStack() as closing:
        everything = [longer(one, arguments.before) for one in scripts(model, most, None, arguments.seed)]
        url = arguments.url
        if url is None:
            texts = Path(closing.enter_context(tempfile.TemporaryDirectory())) / "texts.json"
            texts.write_text(json.dumps([[*one.prompt.tolist(), *one.text.tolist()] for one in everything]))
            paced = PacedProcess(texts, arguments.pass_ms / 1e3)
            closing.callback(paced.close)
            url = paced.url
        print(HEAD)
        rows = measure(url, model, path, everything, arguments)
    server = arguments.server or f"passes of {arguments.pass_ms:g} ms, known texts"
    figures = {
        "server": server,
        "model": path.name,
        "before": arguments.before,
        "rows": rows,
        "load_average": os.getloadavg()[0],
    }
    print(f"written: {write(arguments.name, MODULE, figures, arguments.seed)}")


def table(found: dict[str, Any]) -> str:
    """Return a line for each number of devices."""
    return "\n".join([f"server: {found['server']}", HEAD, *map(_line, found["rows"])]) + "\n"


def _line(found: dict[str, Any]) -> str:
    middle = {name: value["median"] for name, value in found.items() if isinstance(value, dict)}
    return (
        f"{found['devices']:>7}{middle['direct']:>10.0f}{middle['gateway']:>10.0f}{middle['share']:>8.3f}"
        f"{middle['direct_ms']:>11.1f}{middle['gateway_ms']:>12.1f}{middle['own_ms']:>8.2f}{middle['cost']:>7.1%}"
        f"{found['cached']:>8.0%}{found['pushed_back']:>6}"
    )


if __name__ == "__main__":
    main()
