"""`edgellm serve` as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[2]
EDGELLM = ("-m", "edgellm")


class Server:
    """A running `edgellm serve` and what it has said so far, once it has said `ready`, a pattern."""

    def __init__(self, *words: str, ready: str, program: Sequence[str] = EDGELLM) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.said: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.address = self.wait_for(ready)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.said.append(line)
                self._news.notify_all()

    def wait_for(self, pattern: str) -> str:
        def found() -> re.Match[str] | None:
            return re.search(pattern, "".join(self.said))

        with self._news:
            match = self._news.wait_for(lambda: found() or self.process.poll() is not None, timeout=90) and found()
        assert match, "".join(self.said)
        return match[match.lastindex or 0]

    def close(self) -> None:
        """Ends it at once, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.end()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()

    def end(self) -> tuple[int, str]:
        """Exit code and stdout."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        code = self.process.wait(timeout=60)
        self._reader.join()
        return code, out


class Served(Server):
    """A running verifier, gateway or worker."""

    def __init__(self, *more: str, program: Sequence[str] = EDGELLM) -> None:
        address = r"(?:edgellm chat --(?:verifier|peer) |computed at )(127\.0\.0\.1:\d+)"
        own = ("--role", "verifier", "--port", "0", "--http-port", "0")
        super().__init__(*own, *more, ready=address, program=program)


Start: TypeAlias = Callable[..., tuple[Server, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `edgellm serve ...` and returns it with the address of its API."""
    running: list[Server] = []

    def call(*words: str, program: Sequence[str] = EDGELLM) -> tuple[Server, str]:
        running.append(server := Server("--http-port", "0", *words, program=program, ready=r"OpenAI's API: (\S+)"))
        return server, server.address

    yield call
    for server in running:
        server.close()
