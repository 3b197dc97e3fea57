"""Run 64 devices for half an hour: does the verifier's process grow, leak, or make a device wait?

    python -m bench.robustness.load [--minutes 30] [--devices 64] [--share 0.2] [--seed 0]

A verifier (f32, memory for 16 sessions) in a process of its own, and four processes of devices, over mutual TLS on
loopback. A device connects, writes one to six replies of twelve rounds with pauses in between, leaves one reply in ten
in the middle, disconnects and reconnects. Every minute one of three processes of devices is killed, with all its
connections, and started again. The pauses are so long that all processes together take `--share` of one core.

Every few seconds the memory, descriptors, threads and open sessions are sampled, of the verifier's process and of the
process of devices that is never killed. Columns: the first and the last sample, the growth, the minimum and maximum. A
verdict that is not the verifier's own text is wrong. Exit code 1 if one is wrong, if more than one in a thousand is
lost, if sessions or descriptors are left when all devices are gone, or if memory grows by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.engine.serve_throughput import scripts
from bench.harness.figures import pyplot
from bench.harness.report import write
from edgellm.engine import Ids, Model, to_f32
from edgellm.rpc.trust.trust import Trust
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk
from edgellm.storage import resolve
from testkit import ROOT
from testkit.processes.verifier import PairedVerifierProcess, acquaint

SESSIONS, PROCESSES, TEXTS = 16, 4, 16
EVERY = 5.0  # seconds between two samples
PACED = 12  # samples between two changes of the pace
KILLS = 60.0  # seconds between two killed processes of devices
WARM = 0.1  # share of the run before memory is compared
GROWTH = 0.05
LOST = 0.001  # share of the verdicts: on a busy machine a verifier may be silent for a second


class Household:
    """A process of devices that can be killed and restarted; it reports each reply to `tally`."""

    def __init__(self, run: list[str], tally: Tally) -> None:
        self._run, self._tally, self._times = run, tally, 0
        self._start()

    def _start(self) -> None:
        self._times += 1
        command = [*self._run[:-1], f"{self._run[-1]}/{self._times}", str(self._tally.pause)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "testkit.processes.devices", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        threading.Thread(target=self._tally.read, args=(self.process,), daemon=True).start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._start()

    def pause(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"pause": seconds}) + "\n")
        self.process.stdin.flush()

    def leave(self) -> None:
        """End the process after its current replies."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)


class Tally:
    """The reports of the devices."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.waits: list[float] = []
        self.connects: list[float] = []
        self._lock = threading.Lock()

    def read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            try:
                report = json.loads(line)
            except ValueError:  # it was killed in the middle of a line
                continue
            with self._lock:
                if "connected" in report:
                    self.connects.append(report["connected"])
                    continue
                if report.get("error"):
                    self.errors[report["error"][:120]] += 1
                if "waits" in report:
                    self.waits += report["waits"]
                    self.counts["replies"] += 1
                    self.counts["left"] += report["left"]
                    self.counts["wrong"] += report["wrong"]


def look(process: psutil.Process) -> dict[str, float]:
    """Return the memory, descriptors, threads and processor seconds of a process."""
    times = process.cpu_times()
    with process.oneshot():
        return {
            "rss": process.memory_info().rss, "fds": process.num_fds(), "threads": process.num_threads(),
            "seconds": times.user + times.system,
        }  # fmt: skip


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = np.sort(np.array(values or [0.0]))
    found = {f"p{share:g}": float(np.percentile(ordered, share)) for share in (50, 95, 99, 99.9)}
    return {**found, "max": float(ordered[-1]), "n": len(values)}


def drift(samples: list[dict[str, float]], key: str) -> dict[str, float]:
    """Return the change of a figure from the first tenth after the warm-up to the last tenth, and its extremes."""
    warm = [one[key] for one in samples[int(WARM * len(samples)) :]]
    tenth = max(1, len(samples) // 10)
    first, last = statistics.mean(warm[:tenth]), statistics.mean(warm[-tenth:])
    growth = last / first - 1.0 if first else 0.0  # avoids dividing by zero
    return {"first": first, "last": last, "growth": growth, "min": min(warm), "max": max(warm)}


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything and return the figures."""
    model = folder / "verifier.gguf"
    to_f32(resolve("edgellm-verifier"), model)
    texts = folder / "texts.npz"
    with Model.load(model) as loaded:
        work = scripts(loaded, TEXTS, 1, arguments.seed)
    kept: dict[str, Any] = {}
    for number, one in enumerate(work):
        kept |= {f"prompt{number}": one.prompt, f"text{number}": one.text}
    np.savez(texts, **kept)
    homes = [folder / f"home-{i}" for i in range(PROCESSES)]
    trusts = acquaint(folder / "host", homes)
    tally, rng = Tally(arguments.devices * 0.75), random.Random(arguments.seed)
    served = PairedVerifierProcess(model, folder / "host", SESSIONS)
    while not served.status:
        time.sleep(0.1)
    server = psutil.Process(served.pid)
    first_verdict(served, trusts[0], work[0].prompt)
    empty = look(server)
    each = str(arguments.devices // PROCESSES)
    households = [
        Household([str(served.port), str(home), str(texts), each, f"{arguments.seed}/{i}"], tally)
        for i, home in enumerate(homes)
    ]
    try:
        samples = _watch(arguments, served, server, households, tally, rng)
        for household in households:
            household.leave()
        end = time.monotonic() + 60  # keepalive finds those that were killed
        while (served.status["sessions"] or look(server)["fds"] > empty["fds"]) and time.monotonic() < end:
            time.sleep(1.0)
        left = {**look(server), "sessions": served.status["sessions"]}
        counters = dict(served.status)
    finally:
        for household in households:
            household.process.kill()
        served.close()
    return {
        "devices": arguments.devices, "minutes": arguments.minutes, "share": arguments.share,
        "counts": dict(tally.counts), "errors": dict(tally.errors), "counters": counters,
        "verdict_ms": quantiles(tally.waits), "connect_ms": quantiles(tally.connects),
        "server": {key: drift(samples, key) for key in ("rss", "fds", "threads", "sessions")},
        "device": {key: drift(samples, f"device_{key}") for key in ("rss", "fds", "threads")},
        "empty": empty, "left": left, "samples": samples, "load_average": os.getloadavg()[0],
    }  # fmt: skip


def first_verdict(served: PairedVerifierProcess, trust: Trust, prompt: Ids) -> None:
    """Have the verifier decode once, as files that it opens for that stay open."""
    with Model.load(resolve("edgellm-draft")) as draft:
        verifier = RemoteVerifier(f"127.0.0.1:{served.port}", draft.vocabulary, trust=trust)
        session = verifier.open(GenerationState())
        session.submit(prompt, Chunk()).result()
        session.close()
        verifier.close()
    while served.status["sessions"]:
        time.sleep(0.1)


def _spent(server: psutil.Process, households: list[Household]) -> float:
    """Return the processor seconds of all processes."""
    devices = (psutil.Process(one.process.pid) for one in households)
    return sum(look(process)["seconds"] for process in (server, *devices))


def _watch(
    arguments: argparse.Namespace, served: PairedVerifierProcess, server: psutil.Process, households: list[Household],
    tally: Tally, rng: random.Random,
) -> list[dict[str, float]]:  # fmt: skip
    """Sample, kill and pace until the time is over; return the samples."""
    began = time.monotonic()
    samples: list[dict[str, float]] = []
    kept, killed, spent, since = psutil.Process(households[0].process.pid), began, 0.0, began
    while (now := time.monotonic()) - began < 60 * arguments.minutes:
        time.sleep(EVERY)
        own, device, total = look(server), look(kept), _spent(server, households)
        now = time.monotonic()
        busy = (total - spent) / (now - since)
        samples.append({"at": now - began, **own, "sessions": served.status["sessions"], "busy": busy,
                        **{f"device_{key}": value for key, value in device.items()}})  # fmt: skip
        spent, since = total, now
        if len(samples) % PACED == 0:  # loading is over; approach the right pace step by step
            lately = statistics.mean(one["busy"] for one in samples[-PACED:])
            tally.pause *= max(0.7, min(1.4, (lately / arguments.share) ** 0.5))
            for household in households:
                household.pause(tally.pause)
        if now - killed > KILLS:
            killed = now
            households[rng.randrange(1, len(households))].kill()
            tally.counts["killed"] += 1
            spent = _spent(server, households)
        if int(now - began) // 60 != int(samples[-2]["at"] if len(samples) > 1 else 0) // 60:
            print(f"{(now - began) / 60:.0f} min: {own['rss'] / 2**20:.0f} MiB, {own['fds']} descriptors,"
                  f" {served.status['sessions']} sessions, {busy:.2f} of a core, pause {tally.pause:.1f} s,"
                  f" {dict(tally.counts)} {dict(tally.errors)}", flush=True)  # fmt: skip
    return samples


def table(found: dict[str, Any]) -> str:
    """Return the samples, and the waiting times of devices."""
    server, device, counts = found["server"], found["device"], found["counts"]
    lines = [
        (
            f"{found['devices']} devices, {found['minutes']:g} minutes: {counts['replies']:,} replies,"
            f" {counts['left']:,} of them left in the middle; {found['connect_ms']['n']:,} connections,"
            f" {counts.get('killed', 0)} processes of devices killed"
        ),
        f"{'':<26}{'start':>9}{'end':>9}{'growth':>9}{'min':>9}{'max':>9}",
    ]
    for name, rows in (("verifier", server), ("16 devices", device)):
        row = {key: value / 2**20 if key != "growth" else value for key, value in rows["rss"].items()}
        lines.append(f"{name + ', memory MiB':<26}{row['first']:>9.1f}{row['last']:>9.1f}{row['growth']:>+9.1%}"
                     f"{row['min']:>9.1f}{row['max']:>9.1f}")  # fmt: skip
        for key, what in (("fds", "descriptors"), ("threads", "threads"), ("sessions", "open sessions")):
            if key in rows:
                row = rows[key]
                lines.append(f"{name + ', ' + what:<26}{row['first']:>9.1f}{row['last']:>9.1f}{'':>9}"
                             f"{row['min']:>9.0f}{row['max']:>9.0f}")  # fmt: skip
    lines.append(
        f"before the first device and after the last one: {found['empty']['fds']:.0f} and {found['left']['fds']:.0f}"
        f" descriptors, {found['empty']['threads']:.0f} and {found['left']['threads']:.0f} threads,"
        f" {found['left']['sessions']:.0f} sessions left"
    )
    for what, row in (("verdict", found["verdict_ms"]), ("connection", found["connect_ms"])):
        lines.append(f"{what:<11}p50 {row['p50']:.1f} ms, p95 {row['p95']:.1f}, p99 {row['p99']:.1f},"
                     f" p99.9 {row['p99.9']:.1f}, max {row['max']:.1f} (of {row['n']:,})")  # fmt: skip
    lines.append(f"wrong verdicts: {counts['wrong']}; lost ones: {sum(found['errors'].values())}")
    return "\n".join(lines) + "\n"


def failures(found: dict[str, Any]) -> list[str]:
    """Return the promises that were broken."""
    checks = {
        "wrong verdicts": found["counts"]["wrong"],
        "verdicts lost": sum(found["errors"].values()) > LOST * found["verdict_ms"]["n"],
        "sessions left": found["left"]["sessions"],
        "descriptors left": found["left"]["fds"] > found["empty"]["fds"],
        "the verifier's memory grows": found["server"]["rss"]["growth"] > GROWTH,
        "the devices' memory grows": found["device"]["rss"]["growth"] > GROWTH,
    }
    return [what for what, bad in checks.items() if bad]


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw memory, descriptors and open sessions over time, of a verifier whose devices come and go."""
    plt = pyplot()
    if plt is None:
        return None
    figure, (memory, counts) = plt.subplots(1, 2, figsize=(12.8, 4.2))
    minutes = [one["at"] / 60 for one in found["samples"]]
    for key, name in (("rss", "verifier"), ("device_rss", f"{found['devices'] // 4} devices")):
        memory.plot(minutes, [one[key] / 2**20 for one in found["samples"]], label=name)
    for key, style, name in (("fds", "-", "descriptors"), ("sessions", ":", "sessions"), ("threads", "--", "threads")):
        counts.plot(minutes, [one[key] for one in found["samples"]], style, label=name)
    memory.set(title=f"{found['devices']} devices come and go", xlabel="minutes", ylabel="memory, MiB", ylim=(0, None))
    counts.set(title="The verifier's process", xlabel="minutes", ylabel="open", ylim=(0, None))
    for axes in (memory, counts):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=130)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.2, help="of one core, for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="load", help="of the result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(arguments, Path(folder))
    path = write(arguments.name, "bench.robustness.load", found, arguments.seed, plot=plot)
    print(f"{table(found)}written: {path}")
    if bad := failures(found):
        sys.exit(f"broken: {', '.join(bad)}")


if __name__ == "__main__":
    main()
