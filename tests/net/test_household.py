"""Three machines of a home: found by multicast where it passes, by address where it does not, and told apart by doctor.

Real processes in network namespaces; what one machine announces really crosses to the other.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree

import pytest

from testkit.network.home import Machine, no_namespaces


class Device(Machine):
    """A machine that can be asked what is wrong with it."""

    def doctor(self) -> list[tuple[str, str, str]]:
        """Topic, state and sentence of every finding."""
        return [(found["topic"], found["state"], found["what"]) for found in self.json("doctor")]


@contextmanager
def household(folder: Path) -> Iterator[tuple[Device, Device, Device]]:
    """The three machines, until the `with` ends."""
    a, b, c = (Device(f"edge-{os.getpid()}-{letter}", folder / letter) for letter in "abc")
    try:
        for machine in (a, b, c):
            subprocess.run(["ip", "netns", "add", machine.name], check=True, capture_output=True)
            machine.ip("link", "set", "lo", "up")
        for other, name, network in ((b, "lan0", "10.77.0"), (c, "wan0", "10.78.0")):
            a.ip("link", "add", name, "type", "veth", "peer", "name", name, "netns", other.name)
            for machine, host in ((a, 1), (other, 2)):
                machine.ip("addr", "add", f"{network}.{host}/24", "dev", name)
                machine.ip("link", "set", name, "up")
        c.ip("route", "add", "10.77.0.0/24", "via", "10.78.0.1")
        yield a, b, c
    finally:
        for machine in (a, b, c):
            subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)


SERVE = ("serve", "--role", "verifier", "--host")
BRIEF = ("Hello", "--max-tokens", "4", "--retrieval", "off")
UP = "announced as"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, curves: Path) -> Iterator[tuple[Device, Device, Device]]:
    if reason := no_namespaces():
        pytest.skip(reason)
    with household(tmp_path_factory.mktemp("household")) as machines:
        for machine in machines:
            copytree(curves, machine.home / "cache" / "curves")
        yield machines


def shown_code(said: list[str]) -> str:
    found = re.search(r"edgellm pair (\d+-[a-z]+-[a-z]+)", "".join(said))
    assert found
    return found[1]


@pytest.fixture(scope="module")
def paired(home: tuple[Device, Device, Device]) -> tuple[Device, Device, Device]:
    """b finds a's code by multicast; to c, behind a router, its address must be said."""
    a, b, c = home
    with a.running("pair", "--name", "desk", until="Ctrl-C") as said:
        assert "paired with desk" in b.edge("pair", shown_code(said), "--name", "phone")
    with a.running("pair", "--name", "desk", until="Ctrl-C") as said:
        assert "paired with desk" in c.edge("pair", "10.78.0.1", shown_code(said), "--name", "tablet")
    return a, b, c


def findings(found: list[tuple[str, str, str]], topic: str, state: str) -> str:
    return " ".join(what for one, bad, what in found if (one, bad) == (topic, state))


@pytest.mark.nightly
def test_what_is_served_is_found_by_itself_and_verifies(paired: tuple[Device, Device, Device]) -> None:
    a, b, _ = paired
    with a.running(*SERVE, "0.0.0.0", "--port", "50999", until=UP) as said:  # a port that nobody was told
        (row,) = b.json("peers")
        assert (row["name"], row["there"], row["address"]) == ("desk", True, "10.77.0.1:50999")
        assert "desk (" in b.edge("chat", "--verifier", "auto", *BRIEF)
    assert "Session 1 from ipv4:10.77.0.2" in "".join(said)
    assert "edgellm chat --peer 10.78.0.1:50999" in "".join(said)


@pytest.mark.nightly
def test_a_worker_is_found_by_itself_and_computes_for_who_may(paired: tuple[Device, Device, Device]) -> None:
    a, b, _ = paired
    serve = ("serve", "--role", "worker", "-m", "edgellm-verifier", "--host", "10.77.0.1", "--port", "50998")
    run = ("mesh", "run", "edgellm-verifier", "Where is my mug?", "--split", "here:1-6,desk:7-12", "--max-tokens", "8")
    with a.running(*serve, until=UP) as said:
        assert "does not allow this device to have layers computed" in b.edge(*run)
        a.edge("peers", "grant", "phone", "compute")
        done = b.edge(*run)
        assert re.search(r"^desk +7-12 ", done, re.MULTILINE), done
        assert "A device was lost" not in done
    assert "Loading layers 7-12" in "".join(said)


@pytest.mark.nightly
def test_doctor_tells_multicast_from_tcp(paired: tuple[Device, Device, Device]) -> None:
    a, b, c = paired
    with a.running(*SERVE, "10.77.0.1", until=UP):
        sound = b.doctor()
        assert not [what for _, state, what in sound if state == "problem"]
        assert "desk answers at 10.77.0.1:50151" in findings(sound, "peers", "ok")
        assert "desk verifies with" in findings(sound, "vocabulary", "ok")
        # through the router TCP passes and multicast does not
        assert "10.77.0.1:50151" in c.edge("chat", "--peer", "10.77.0.1:50151", *BRIEF)
        assert "announcements do not arrive" in findings(c.doctor(), "multicast", "note")
        # what a sends to b alone is lost, as behind a firewall; what it sends to all still comes
        a.ip("route", "add", "blackhole", "10.77.0.2/32")
        assert "that port does not answer TCP connections" in findings(b.doctor(), "firewall", "problem")
        a.ip("route", "del", "blackhole", "10.77.0.2/32")
    a.ip("link", "set", "lan0", "down")
    assert "desk does not answer" in findings(b.doctor(), "peers", "note")
    a.ip("link", "set", "lan0", "up")


@pytest.mark.nightly
def test_a_copied_identity_is_found(paired: tuple[Device, Device, Device], tmp_path: Path) -> None:
    a, b, _ = paired
    copy = Device(b.name, tmp_path / "copy")
    copytree(a.home, copy.home)
    with copy.running(*SERVE, "10.77.0.2", until=UP):
        assert "10.77.0.2 announces the identity" in findings(a.doctor(), "identity", "problem")
        assert "has this device's identity" in a.edge("chat", "--peer", "10.77.0.2:50151", "Hello")
