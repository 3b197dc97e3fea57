"""A home of three machines that are network namespaces: a and b share a network, c reaches a through a router."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testkit.network.home import Machine, no_namespaces

__all__ = ["Device", "household", "no_namespaces"]


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
