"""A home of three machines that are network namespaces: a and b share a network, c reaches a through a router."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Machine:
    """A namespace with a home folder of its own."""

    def __init__(self, name: str, home: Path) -> None:
        self.name, self.home = name, home

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", "-n", self.name, *words], check=True, capture_output=True)

    def start(self, *words: str) -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("EDGELLM_")}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-m", "edgellm", *words],
            cwd=ROOT,
            env=environment | {"EDGELLM_HOME": str(self.home), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def edge(self, *words: str) -> str:
        """Runs a command to its end; both streams."""
        out, err = self.start(*words).communicate(timeout=120)
        assert "Traceback" not in err, err
        return out + err

    def json(self, *words: str) -> Any:
        out, err = self.start(*words, "--json").communicate(timeout=120)
        assert "Traceback" not in err, err
        return json.loads(out)

    def doctor(self) -> list[tuple[str, str, str]]:
        """Topic, state and sentence of every finding."""
        return [(found["topic"], found["state"], found["what"]) for found in self.json("doctor")]

    @contextmanager
    def running(self, *words: str, until: str) -> Iterator[list[str]]:
        """A command in the background, from the line on that matches `until`; all it says on stderr."""
        process, said = self.start(*words), list[str]()
        news = threading.Condition()
        assert process.stderr is not None
        assert process.stdout is not None

        def read(lines: Any) -> None:
            for line in lines:
                with news:
                    said.append(line)
                    news.notify_all()

        readers = [threading.Thread(target=read, args=(pipe,)) for pipe in (process.stderr, process.stdout)]
        for reader in readers:
            reader.start()
        try:
            with news:
                assert news.wait_for(lambda: re.search(until, "".join(said)), 90), "".join(said)
            yield said
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            for reader in readers:
                reader.join()
            process.stdout.close()
            process.stderr.close()


def why_not() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "network namespaces need Linux and iproute2"
    name = f"edge-{os.getpid()}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return ""


@contextmanager
def household(folder: Path) -> Iterator[tuple[Machine, Machine, Machine]]:
    """The three machines, until the `with` ends."""
    a, b, c = (Machine(f"edge-{os.getpid()}-{letter}", folder / letter) for letter in "abc")
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
