"""Run HTTP clients for half an hour: does the server's process grow, leak, or give a wrong answer?

`edgellm serve` with the bundled pair (f32) runs in a process of its own. Each client sends requests with pauses: for
whole replies and streams, greedy ones and sampled ones with a seed. Some leave in the middle of a stream, some send
invalid requests, some open the page, the health and the metrics.

The run fails if a reply differs from an earlier one to the same question, if an answer has the wrong form, if
descriptors are left when all clients are gone, or if memory grows by more than 5 %: from the tenth of the run after the
warm-up to the last one.
"""

import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from bench.harness.progress import track
from bench.harness.results import Figures
from models.home.corpus import held_out
from testkit.processes.http_server import serving_pair

KINDS = {"whole": 8, "stream": 7, "sampled": 4, "left": 4, "refused": 1, "looked": 1}
"""The actions of clients, and their frequency."""
FAMILIES = ("summary", "qa", "command", "reply")
QUESTIONS, MOST = 24, 32
PAUSE = 4.0  # seconds between two requests of a client, in the mean
EVERY = 5.0  # seconds between two samples
WARM = 0.1  # share of the run before memory is compared
GROWTH = 0.05
BUSY = 503
CHAT = "/v1/chat/completions"


@dataclass
class Tally:
    """What clients did, what was wrong, and the texts so far, of which each question has one."""

    over: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    wholes: list[float] = field(default_factory=list)
    texts: dict[tuple[int, bool], str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self, kind: str, trouble: str = "") -> None:
        """Count an action, and what was wrong with it."""
        with self.lock:
            self.counts[kind] += 1
            if trouble:
                self.wrong[f"{kind}: {trouble}"[:120]] += 1

    def written(self, question: int, sampled: bool, text: str) -> None:
        """Note a complete reply; the first one to a question is the one that all others must equal."""
        with self.lock:
            if self.texts.setdefault((question, sampled), text) != text:
                self.wrong["another text than before"] += 1


class Client:
    """A client that opens a connection for every request."""

    def __init__(self, url: str, questions: Sequence[Any], tally: Tally, seed: int) -> None:
        self._url, self._questions, self._tally = url, questions, tally
        self._rng = random.Random(seed)

    def run(self) -> None:
        """Act until it is over."""
        while not self._tally.over.wait(self._rng.expovariate(1.0 / PAUSE)):
            self.act(self._rng.choices(list(KINDS), list(KINDS.values()))[0])

    def act(self, kind: str) -> None:
        """Do one of `KINDS`."""
        trouble = ""
        try:
            with httpx.Client(base_url=self._url, timeout=120.0) as http:
                match kind:
                    case "refused":
                        answer = http.post(CHAT, json={"messages": [], "temperature": 9})
                        trouble = (
                            "" if answer.status_code == 400 and "message" in answer.json()["error"] else answer.text
                        )
                    case "looked":
                        for path in ("/health", "/metrics", "/v1/models", "/"):
                            http.get(path).raise_for_status()
                    case "stream" | "left":
                        self._stream(http, leaves=kind == "left")
                    case _:
                        self._whole(http, sampled=kind == "sampled")
        except (httpx.HTTPError, ValueError, LookupError) as error:
            trouble = repr(error)
        self._tally.done(kind, trouble)

    def _body(self, number: int, sampled: bool) -> dict[str, Any]:
        greedy = {"messages": self._questions[number], "max_tokens": MOST}
        return greedy | {"temperature": 0.8, "seed": number} if sampled else greedy

    def _whole(self, http: httpx.Client, *, sampled: bool) -> None:
        number = self._rng.randrange(len(self._questions))
        began = time.perf_counter()
        answer = http.post(CHAT, json=self._body(number, sampled))
        if answer.status_code == BUSY and "Retry-After" in answer.headers:
            return
        self._tally.wholes.append(1e3 * (time.perf_counter() - began))
        self._tally.written(number, sampled, answer.raise_for_status().json()["choices"][0]["message"]["content"])

    def _stream(self, http: httpx.Client, *, leaves: bool) -> None:
        number, text = self._rng.randrange(len(self._questions)), ""
        left = self._rng.randrange(1, 20) if leaves else None
        with http.stream("POST", CHAT, json=self._body(number, False) | {"stream": True}) as answer:
            if answer.status_code == BUSY:
                return
            for events, line in enumerate(answer.raise_for_status().iter_lines()):
                if left is not None and events >= left:
                    return
                if line == "data: [DONE]":
                    self._tally.written(number, False, text)
                    return
                if line.startswith("data: "):
                    found = httpx.Response(200, content=line[6:]).json()["choices"]
                    text += "".join(choice["delta"].get("content") or "" for choice in found)
        raise ValueError("a stream without its end")


def look(process: psutil.Process) -> dict[str, float]:
    """Return the memory, descriptors and threads of a process."""
    with process.oneshot():
        return {"rss": process.memory_info().rss, "fds": process.num_fds(), "threads": process.num_threads()}


def drift(samples: Sequence[dict[str, float]], key: str) -> dict[str, float]:
    """Return the change of a figure from the first tenth after the warm-up to the last tenth, and its extremes."""
    warm = [one[key] for one in samples[int(WARM * len(samples)) :]]
    tenth = max(1, len(samples) // 10)
    first, last = statistics.mean(warm[:tenth]), statistics.mean(warm[-tenth:])
    return {"first": first, "last": last, "growth": last / first - 1.0, "min": min(warm), "max": max(warm)}


def sampled(server: psutil.Process, minutes: float) -> Iterator[dict[str, float]]:
    """Yield samples of the server until the time is over."""
    for _ in track(range(max(1, round(60 * minutes / EVERY))), "samples"):
        time.sleep(EVERY)
        yield look(server)


def measure(minutes: float = 30.0, clients: int = 16, seed: int = 0) -> Figures:
    """Run everything and return the figures."""
    cases = [held_out(family, QUESTIONS // len(FAMILIES), seed + 1) for family in FAMILIES]
    questions = [[{"role": turn.role, "content": turn.text} for turn in case.prompt] for some in cases for case in some]
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder, serving_pair(Path(folder)) as (server, url):
        asking = [Client(url, questions, tally, seed + at) for at in range(clients)]
        for kind in KINDS:  # files that the first requests open stay open
            asking[0].act(kind)
        time.sleep(1.0)
        empty = look(server)
        threads = [threading.Thread(target=client.run) for client in asking]
        for thread in threads:
            thread.start()
        samples = list(sampled(server, minutes))
        tally.over.set()
        for thread in threads:
            thread.join()
        until = time.monotonic() + 30
        while look(server)["fds"] > empty["fds"] and time.monotonic() < until:
            time.sleep(0.5)
        left = look(server)
    shares = {f"p{share}": float(np.percentile(tally.wholes or [0.0], share)) for share in (50, 95, 99)}
    return {
        "clients": clients, "minutes": minutes, "counts": dict(tally.counts), "wrong": dict(tally.wrong),
        "whole_ms": {**shares, "max": max(tally.wholes, default=0.0), "n": len(tally.wholes)},
        "server": {key: drift(samples, key) for key in empty}, "empty": empty, "left": left,
    }  # fmt: skip


def table(found: Figures) -> str:
    """Return the clients' actions, the samples, and the waiting times."""
    did = ", ".join(f"{found['counts'].get(kind, 0):,} {kind}" for kind in KINDS)
    lines = [f"{found['clients']} clients, {found['minutes']:g} minutes: {did}"]
    lines.append(f"{'':<16}{'start':>9}{'end':>9}{'growth':>9}{'min':>9}{'max':>9}")
    for key, what, unit in (("rss", "memory MiB", 2**20), ("fds", "descriptors", 1), ("threads", "threads", 1)):
        row = found["server"][key]
        growth = f"{row['growth']:+.1%}" if key == "rss" else ""
        lines.append(f"{what:<16}{row['first'] / unit:>9.1f}{row['last'] / unit:>9.1f}{growth:>9}"
                     f"{row['min'] / unit:>9.0f}{row['max'] / unit:>9.0f}")  # fmt: skip
    lines.append(f"after the first reply and after the last one: {found['empty']['fds']:.0f} and"
                 f" {found['left']['fds']:.0f} descriptors")  # fmt: skip
    row = found["whole_ms"]
    lines.append(f"a whole reply: p50 {row['p50']:.1f} ms, p95 {row['p95']:.1f}, p99 {row['p99']:.1f},"
                 f" max {row['max']:.1f} (of {row['n']:,})")  # fmt: skip
    lines.append(f"wrong: {sum(found['wrong'].values())}" + "".join(f"; {what}" for what in found["wrong"]))
    return "\n".join(lines) + "\n"


def failures(found: Figures) -> list[str]:
    """Return the promises that were broken."""
    checks = {
        "wrong answers": found["wrong"],
        "descriptors left": found["left"]["fds"] > found["empty"]["fds"],
        "memory grows": found["server"]["rss"]["growth"] > GROWTH,
    }
    return [what for what, bad in checks.items() if bad]
