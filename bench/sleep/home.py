"""Measure what a reply goes through whose desktop, or whose own device, sleeps or comes into another network.

Laptop and desk are network namespaces in two networks, each with a bridge. In the middle of a reply one of the two is
stopped (SIGSTOP to all of its processes), its cards are down, or its addresses change; *asleep* is stopped and down.
On a stopped laptop the clock jumps, as in sleep on some systems. In the last row the desk is silent until each of its
cards has had a magic packet, and then begins to serve.

Columns, in seconds: *alone after*, from the loss to the first word that nobody checks; *linked after*, from the return
of the network or the process to the connection; *checked after*, to the next word that is checked. A laptop that sleeps
loses nothing before it is back. The last row counts from the command, and for the link from where the desk listens.
Medians, with the most in brackets. The run fails where a reply does not go on, or a link takes longer than LATE.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Annotated, Any

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.errors import InvalidOption
from edgellm.llm import AUTO
from edgellm.spec.params import ReplyOptions
from edgellm.spec.types import UNVERIFIED
from testkit.network.home import Machine, no_namespaces
from testkit.processes.paced_pair import paced_pair
from testkit.processes.verifier import acquaint

NETWORKS = ("10.80.0", "10.81.0")
LATE = 2.0  # seconds
BEFORE, AFTER = 3.0, 60.0  # seconds of a reply before it is disturbed, and to come back at most
TOKENS = 700  # of a reply, as the context holds no more
SERVE = ("serve", "--role", "verifier", "--host", "0.0.0.0", "-m", "edgellm-verifier")
CASES = ("stopped", "asleep", "down", "moved", "asleep moved")
WOKEN = "woken up"
CARD = f"""
import os, socket, sys
cards = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) for _ in {NETWORKS}]
for at, card in enumerate(cards):
    card.bind((f"lan{{at}}", 0))
print("sleeps", flush=True)
for network, card in zip({NETWORKS}, cards):
    magic, frame = b"\\xff" * 6 + 16 * card.getsockname()[4], b""
    while magic not in frame or frame[30:34] != socket.inet_aton(network + ".255"):
        frame = card.recv(2000)
for at, network in enumerate({NETWORKS}):
    os.system(f"ip addr add {{network}}.{{sys.argv[1]}}/24 broadcast + dev lan{{at}}")
os.execv(sys.executable, (sys.executable, "-m", "edgellm", *{SERVE}))
"""
"""The network cards of a machine that sleeps without an address, until each has had its magic packet."""


class Sleeper(Machine):
    """A machine in all networks of a home, which may sleep and come back elsewhere."""

    def __init__(self, name: str, folder: Path, place: int) -> None:
        super().__init__(f"edge-{os.getpid()}-{name}", folder / name)
        self.place = place

    def address(self, at: int) -> None:
        """Set the only address of a card."""
        self.ip("addr", "flush", "dev", f"lan{at}", "scope", "global")
        self.ip("addr", "add", f"{NETWORKS[at]}.{self.place}/24", "broadcast", "+", "dev", f"lan{at}")

    def leave(self, how: str) -> None:
        """Fall asleep, or lose the network."""
        for at in range(len(NETWORKS)) if "asleep" in how or "down" in how else ():
            self.ip("link", "set", f"lan{at}", "down")
        self._signal(signal.SIGSTOP if "asleep" in how or "stopped" in how else None)

    def come_back(self, how: str) -> None:
        """Wake up, or get a network."""
        self.place += 10 if "moved" in how else 0
        for at in range(len(NETWORKS)):
            if "moved" in how:
                self.address(at)
            self.ip("link", "set", f"lan{at}", "up")
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals | None) -> None:
        pids = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True).stdout
        for pid in map(int, pids.split() if number else ()):
            os.kill(pid, number or 0)


@contextmanager
def home() -> Iterator[tuple[Sleeper, Sleeper]]:
    """Yield a laptop and a desk, which are paired."""
    with tempfile.TemporaryDirectory() as name:
        hub, folder = Machine(f"edge-{os.getpid()}-hub", Path(name)), Path(name)
        laptop, desk = Sleeper("laptop", folder, 1), Sleeper("desk", folder, 2)
        try:
            for machine in (hub, laptop, desk):
                subprocess.run(["ip", "netns", "add", machine.name], check=True, capture_output=True)
                machine.ip("link", "set", "lo", "up")
            for at in range(len(NETWORKS)):
                hub.ip("link", "add", f"home{at}", "type", "bridge")
                hub.ip("link", "set", f"home{at}", "up")
                for machine in (laptop, desk):
                    port = f"port{at}{machine.place}"
                    machine.ip("link", "add", f"lan{at}", "type", "veth", "peer", "name", port, "netns", hub.name)
                    machine.address(at)
                    machine.ip("link", "set", f"lan{at}", "up")
                    hub.ip("link", "set", port, "master", f"home{at}", "up")
            acquaint(desk.home, [laptop.home])
            yield laptop, desk
        finally:
            for machine in (hub, laptop, desk):
                subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)


def first(printed: Sequence[str], what: str, after: float, limit: float = AFTER) -> float | None:
    """Wait for an event of the writer, and return the seconds from `after` to it; None if it does not come."""
    while True:
        events = [json.loads(line) for line in list(printed) if line.startswith("[")]
        if found := [at - after for at, text in events if text == what and at > after]:
            return float(found[0])
        if monotonic() > after + limit or any(text == "ended" for _, text in events):
            return None
        sleep(0.05)


def disturbed(laptop: Sleeper, desk: Sleeper, who: str, how: str, seconds: float) -> Figures:
    """Return the figures of a reply in the middle of which a machine is away."""
    sleeper = desk if who == "desk" else laptop
    pace = (BEFORE + seconds + AFTER / 4) / TOKENS
    with laptop.running(f"{pace}", module="bench.sleep.home", until='"checked"') as printed:
        sleep(BEFORE)
        lost = monotonic()
        sleeper.leave(how)
        sleep(0.0 if how == "moved" else seconds)
        back = monotonic()
        sleeper.come_back(how)
        gone = first(printed, "unchecked", lost if sleeper is desk or how == "down" else back, seconds + LATE)
        if gone is None:  # it has been linked all the time
            return {"alone": None, "linked": 0.0, "checked": 0.0}
        return {"alone": gone, "linked": first(printed, "linked", back), "checked": first(printed, "checked", back)}


def woken(laptop: Sleeper, desk: Sleeper, pace: float) -> Figures:
    """Return the figures of a reply that wakes the desk up."""
    for at in range(len(NETWORKS)):
        desk.ip("addr", "flush", "dev", f"lan{at}", "scope", "global")
    with desk.running("-c", CARD, str(desk.place), program=(sys.executable,), until="sleeps") as served:
        began = monotonic()
        with laptop.running(f"{pace}", module="bench.sleep.home", until='"begun"') as printed:
            alone = first(printed, "unchecked", began)
            while "verifies at" not in "".join(served) and monotonic() < began + AFTER:
                sleep(0.02)
            linked = first(printed, "linked", monotonic())
            return {"alone": alone, "linked": linked, "checked": first(printed, "checked", began)}


def measure(
    seconds: Annotated[float, "away"] = 60.0, repeats: int = 3, cases: Sequence[str] = CASES
) -> Iterator[Figures]:
    """Yield the figures so far, after each reply."""
    if reason := no_namespaces():
        raise InvalidOption(f"No machines can be made here: {reason}.", "Run it on Linux, as root.")
    rows: dict[str, list[Figures]] = {}
    with home() as (laptop, desk):
        for _ in track(range(repeats), "turns"):
            for who in ("desk", "laptop"):
                for how in cases:
                    with desk.running(*SERVE, until="announced as"):
                        rows.setdefault(f"{who} {how}", []).append(disturbed(laptop, desk, who, how, seconds))
                    yield {"seconds": seconds, "rows": rows}
            rows.setdefault(f"desk {WOKEN}", []).append(woken(laptop, desk, 0.1))
            yield {"seconds": seconds, "rows": rows}


def failures(found: Mapping[str, Any]) -> list[str]:
    """Return the promises that were broken."""
    late = [name for name, row in found["rows"].items() for one in row if one["linked"] is None or one["linked"] > LATE]
    return [f"{name}: linked late" for name in late]


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each case."""
    lines = [f"away for {found['seconds']:<13g}{'alone after':>16}{'linked after':>16}{'checked after':>16}"]
    for name, row in found["rows"].items():
        cells = ""
        for column in ("alone", "linked", "checked"):
            times = [one[column] for one in row]
            none = "-" if column == "alone" else "never"
            cells += f"{none:>16}" if None in times else f"{median(times):>9.2f} ({max(times):.2f})"
        lines.append(f"{name:<22}{cells}")
    return "\n".join(lines) + "\n"


def say(what: str) -> None:
    """Print an event, and the time by a clock that all processes share."""
    sys.stdout.write(json.dumps([monotonic(), what]) + "\n")
    sys.stdout.flush()


def write(pace: float) -> None:
    """Write a reply that does not end by itself, as a process of its own, at `pace` seconds a token. Print whenever a
    verifier begins or ceases to check words, the link ends or is made again, or the user is told something."""
    say("begun")
    with paced_pair("edgellm-draft", AUTO, pace) as pair:

        def watch() -> None:
            linked = False
            while True:
                if pair.verifier_up is not None and pair.verifier_up() != linked:
                    linked = not linked
                    say("linked" if linked else "away")
                sleep(0.005)

        threading.Thread(target=watch, daemon=True).start()
        model, before = pair.prompt_writer.model, ""
        bias = dict.fromkeys(filter(model.is_eog, range(model.n_vocab)), -100.0)
        options = ReplyOptions(max_tokens=TOKENS, logit_bias=bias, gate="always", gamma=4, retrieval="off")
        reply = pair.reply("Tell a very long story about a mug.", options)
        reply.listen(on_notice=lambda notice: say(notice.text))
        for token in reply:
            if (now := "unchecked" if token.source in UNVERIFIED else "checked") != before:
                say(now)
            before = now
        say("ended")


if __name__ == "__main__":
    write(float(sys.argv[1]))
