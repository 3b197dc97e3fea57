"""Run HTTP clients for half an hour: does the server's process grow, leak, or give a wrong answer?

    python -m bench.robustness.http_load [--minutes 30] [--clients 16] [--share 0.2] [--seed 0]

`edgellm serve` with the bundled pair (f32) runs in a process of its own. Each client sends requests with pauses: for
whole replies and streams, greedy ones and sampled ones with a seed. Some leave in the middle of a stream, some send
invalid requests, some open the page, the health and the metrics. The pauses are so long that all processes together
take `--share` of one core.

Exit code 1 if a reply differs from an earlier one to the same question, if an answer has the wrong form, if descriptors
are left when all clients are gone, or if memory grows by more than 5 %.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.harness.report import write
from bench.robustness.load import EVERY, GROWTH, PACED, drift, look, quantiles
from edgellm.engine import to_f32
from edgellm.storage import resolve
from models.home.corpus import held_out
from testkit import ROOT

KINDS = {"whole": 8, "stream": 7, "sampled": 4, "left": 4, "refused": 1, "looked": 1}
"""The actions of clients, and their frequency."""
FAMILIES = ("summary", "qa", "command", "reply")
QUESTIONS, MOST = 24, 32
BUSY = 503


@dataclass
class Tally:
    """The answers that the clients got."""

    pause: float
    over: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    firsts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    texts: dict[tuple[int, bool], str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def written(self, question: int, sampled: bool, text: str) -> None:
        """Note a complete reply; the first one to a question is the one that all others must equal."""
        with self.lock:
            if self.texts.setdefault((question, sampled), text) != text:
                self.wrong["another text than before"] += 1


class Client:
    """A client that opens a connection for every request."""

    def __init__(self, port: int, questions: list[list[dict[str, str]]], tally: Tally, seed: int) -> None:
        self._port, self._questions, self._tally = port, questions, tally
        self._rng = random.Random(seed)

    def run(self) -> None:
        while not self._tally.over.wait(self._rng.expovariate(1.0 / self._tally.pause)):
            self.run_once(self._rng.choices(list(KINDS), list(KINDS.values()))[0])

    def run_once(self, kind: str) -> None:
        """Do one of `KINDS`."""
        try:
            getattr(self, f"_{kind}")()
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            with self._tally.lock:
                self._tally.wrong[f"{kind}: {error!r}"[:120]] += 1
        self._tally.count(kind)

    def _whole(self, sampled: bool = False) -> None:
        number = self._rng.randrange(len(self._questions))
        began = time.perf_counter()
        with self._asked(self._body(number, sampled)) as answer:
            data = json.loads(answer.read())
            if self._busy(answer):
                return
            self._tally.wholes.append(1e3 * (time.perf_counter() - began))
            self._tally.written(number, sampled, data["choices"][0]["message"]["content"])

    def _sampled(self) -> None:
        self._whole(sampled=True)

    def _stream(self, leaves: int | None = None) -> None:
        """Read a stream, with `leaves` only that number of events."""
        number = self._rng.randrange(len(self._questions))
        began, first, text, done = time.perf_counter(), 0.0, "", False
        with self._asked(self._body(number, False) | {"stream": True}) as answer:
            if self._busy(answer):
                return
            for events, line in enumerate(iter(answer.readline, b"")):
                if leaves is not None and events >= leaves:
                    return
                if not line.startswith(b"data: "):
                    continue
                if done := line.strip() == b"data: [DONE]":
                    break
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    first = first or (1e3 * (time.perf_counter() - began) if text else 0.0)
        if not done:
            raise ValueError("a stream without its end")
        self._tally.firsts.append(first)
        self._tally.written(number, False, text)

    def _left(self) -> None:
        self._stream(self._rng.randrange(1, 20))

    def _refused(self) -> None:
        with self._asked({"messages": [], "temperature": 9}) as answer:
            if answer.status != 400 or "message" not in json.loads(answer.read())["error"]:
                raise ValueError(f"nonsense is answered with {answer.status}")

    def _looked(self) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/"):
            with self._asked(None, path) as answer:
                answer.read()
                if answer.status != 200:
                    raise ValueError(f"{path} is answered with {answer.status}")

    def _busy(self, answer: http.client.HTTPResponse) -> bool:
        if answer.status == BUSY and answer.getheader("Retry-After"):
            self._tally.count("told to come later")
            return True
        if answer.status != 200:
            raise ValueError(f"a question is answered with {answer.status}")
        return False

    def _body(self, number: int, sampled: bool) -> dict[str, Any]:
        greedy = {"messages": self._questions[number], "max_tokens": MOST}
        return greedy | {"temperature": 0.8, "seed": number} if sampled else greedy

    @contextmanager
    def _asked(
        self, body: dict[str, Any] | None, path: str = "/v1/chat/completions"
    ) -> Iterator[http.client.HTTPResponse]:  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                yield answer
        finally:
            connection.close()


@contextmanager
def served(folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Run `edgellm serve` with a home of its own, and yield its process and port."""
    models = []
    for name in ("edgellm-draft", "edgellm-verifier"):
        models.append(folder / f"{name}.gguf")
        to_f32(resolve(name), models[-1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ("serve", "--draft", str(models[0]), "--verifier", str(models[1]), "--http-port", str(port))
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", *words], cwd=ROOT, stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=os.environ | {"EDGELLM_HOME": str(folder / "home")},
    )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("edgellm serve does not come up")
            time.sleep(0.2)
        yield psutil.Process(process.pid), port
    finally:
        process.terminate()
        process.wait(30)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything and return the figures."""
    cases = [held_out(family, QUESTIONS // len(FAMILIES), arguments.seed + 1) for family in FAMILIES]
    questions = [[{"role": turn.role, "content": turn.text} for turn in case.prompt] for some in cases for case in some]
    tally = Tally(pause=2.0)
    with served(folder) as (server, port):
        clients = [Client(port, questions, tally, arguments.seed + at) for at in range(arguments.clients)]
        clients[0].run_once("whole")  # files that the first reply opens stay open
        time.sleep(1.0)
        empty = look(server)
        threads = [threading.Thread(target=client.run) for client in clients]
        for thread in threads:
            thread.start()
        samples = _watch(arguments, server, tally)
        tally.over.set()
        for thread in threads:
            thread.join()
        until = time.monotonic() + 30
        while look(server)["fds"] > empty["fds"] and time.monotonic() < until:
            time.sleep(0.5)
        left = look(server)
    return {
        "clients": arguments.clients, "minutes": arguments.minutes, "share": arguments.share,
        "counts": dict(tally.counts), "wrong": dict(tally.wrong), "first_ms": quantiles(tally.firsts),
        "whole_ms": quantiles(tally.wholes), "server": {key: drift(samples, key) for key in ("rss", "fds", "threads")},
        "empty": empty, "left": left, "samples": samples, "load_average": os.getloadavg()[0],
    }  # fmt: skip


def _watch(arguments: argparse.Namespace, server: psutil.Process, tally: Tally) -> list[dict[str, float]]:
    """Sample and pace until the time is over."""
    began = since = time.monotonic()
    own = psutil.Process()
    spent = look(server)["seconds"] + look(own)["seconds"]
    samples: list[dict[str, float]] = []
    while (now := time.monotonic()) - began < 60 * arguments.minutes:
        time.sleep(EVERY)
        found, total, now = look(server), look(server)["seconds"] + look(own)["seconds"], time.monotonic()
        samples.append({"at": now - began, "busy": (total - spent) / (now - since), **found})
        spent, since = total, now
        if len(samples) % PACED == 0:
            lately = statistics.mean(one["busy"] for one in samples[-PACED:])
            tally.pause = max(0.05, tally.pause * max(0.7, min(1.4, (lately / arguments.share) ** 0.5)))
            print(f"{(now - began) / 60:.0f} min: {found['rss'] / 2**20:.0f} MiB, {found['fds']} descriptors,"
                  f" {lately:.2f} of a core, pause {tally.pause:.2f} s, {dict(tally.counts)} {dict(tally.wrong)}",
                  flush=True)  # fmt: skip
    return samples


def table(found: dict[str, Any]) -> str:
    """Return the clients' actions, the samples, and the waiting times."""
    counts = found["counts"]
    did = ", ".join(f"{counts.get(kind, 0):,} {kind}" for kind in KINDS)
    actions = f"{found['clients']} clients, {found['minutes']:g} minutes: {did}"
    lines = [
        f"{actions}; {counts.get('told to come later', 0)} told to come back later",
        f"{'':<16}{'start':>9}{'end':>9}{'growth':>9}{'min':>9}{'max':>9}",
    ]
    for key, what, unit in (("rss", "memory MiB", 2**20), ("fds", "descriptors", 1), ("threads", "threads", 1)):
        row = found["server"][key]
        growth = f"{row['growth']:+.1%}" if key == "rss" else ""
        lines.append(f"{what:<16}{row['first'] / unit:>9.1f}{row['last'] / unit:>9.1f}{growth:>9}"
                     f"{row['min'] / unit:>9.0f}{row['max'] / unit:>9.0f}")  # fmt: skip
    lines.append(f"after the first reply and after the last one: {found['empty']['fds']:.0f} and"
                 f" {found['left']['fds']:.0f} descriptors")  # fmt: skip
    for what, row in (("first text of a stream", found["first_ms"]), ("whole reply", found["whole_ms"])):
        lines.append(f"{what:<23}p50 {row['p50']:.1f} ms, p95 {row['p95']:.1f}, p99 {row['p99']:.1f},"
                     f" max {row['max']:.1f} (of {row['n']:,})")  # fmt: skip
    lines.append(f"wrong: {sum(found['wrong'].values())}" + "".join(f"; {what}" for what in found["wrong"]))
    return "\n".join(lines) + "\n"


def failures(found: dict[str, Any]) -> list[str]:
    """Return the promises that were broken."""
    checks = {
        "wrong answers": found["wrong"],
        "descriptors left": found["left"]["fds"] > found["empty"]["fds"],
        "memory grows": found["server"]["rss"]["growth"] > GROWTH,
    }
    return [what for what, bad in checks.items() if bad]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.2, help="of one core, for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="http_load", help="of the result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(arguments, Path(folder))
    print(f"{table(found)}written: {write(arguments.name, 'bench.robustness.http_load', found, arguments.seed)}")
    if bad := failures(found):
        sys.exit(f"broken: {', '.join(bad)}")


if __name__ == "__main__":
    main()
