"""`edgellm serve` as a process of its own."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[2]
EDGELLM = ("-m", "edgellm")


class Server:
    """A running `edgellm serve`, once it has said `ready`, a pattern."""

    def __init__(self, *words: str, ready: str, program: Sequence[str] = EDGELLM) -> None:
        self._log = Path(tempfile.mkstemp()[1])
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=log, text=True,
            )  # fmt: skip
        self.address = self.wait_for(ready)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str) -> str:
        until = time.monotonic() + 90
        while True:
            ended = self.process.poll() is not None or time.monotonic() > until
            if match := re.search(pattern, self.said):
                return match[match.lastindex or 0]
            assert not ended, self.said
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        """Exit code and stdout."""
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out

    def close(self) -> None:
        """Ends it at once, if it still runs."""
        self.process.kill()
        self.end()
        self._log.unlink()


class Served(Server):
    """A running verifier, gateway or worker."""

    def __init__(self, *more: str, program: Sequence[str] = EDGELLM) -> None:
        address = r"(?:edgellm chat --(?:verifier|peer) |edgellm mesh run [^ ]+ PROMPT --peer )(127\.0\.0\.1:\d+)"
        own = ("--role", "verifier", "--port", "0", "--http-port", "0")
        super().__init__(*own, *more, ready=address, program=program)


Start: TypeAlias = Callable[..., tuple[Server, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `edgellm serve ...` and returns it with the address of its API."""
    running: list[Server] = []

    def call(*words: str) -> tuple[Server, str]:
        running.append(server := Server("--http-port", "0", *words, ready=r"OpenAI's API: (\S+)"))
        return server, server.address

    yield call
    for server in running:
        server.close()
