"""`edgellm serve` as a process of its own, asked by `edgellm chat`."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import Done

Edge = Callable[..., Done]
ROOT = Path(__file__).parents[2]


class Server:
    """A running `edgellm serve` and what it has said so far, once it has said `ready`, a pattern."""

    def __init__(self, *words: str, ready: str, program: Sequence[str] = ("-m", "edgellm")) -> None:
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

    def __init__(self, *more: str, program: Sequence[str] = ("-m", "edgellm")) -> None:
        address = r"(?:edgellm chat --(?:verifier|peer) |computed at )(127\.0\.0\.1:\d+)"
        own = ("--role", "verifier", "--port", "0", "--http-port", "0")
        super().__init__(*own, *more, ready=address, program=program)


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_verifies_tells_what_happens_and_stops_politely(edge: Edge, served: Served, number: signal.Signals) -> None:
    words = ("chat", "--json", "Where is my mug?", "--max-tokens", "6")
    far = edge(*words, "--verifier", served.address).lines
    near = edge(*words).lines
    assert [row["id"] for row in far[:-1]] == [row["id"] for row in near[:-1]]
    assert far[-1]["summary"]["bytes_up"] > 0
    assert near[-1]["summary"]["bytes_up"] == 0
    served.wait_for("ends")
    served.process.send_signal(number)
    assert served.end() == (0, "")
    said = "".join(served.said)
    assert "has stopped" in said
    assert "mug" not in said
    assert "Traceback" not in said


WITH_LITTLE_MEMORY = """
import sys
from edgellm.cli import main
from edgellm.engine import memory_fit
free = int(sys.argv[1])
memory_fit._PLENTY, memory_fit.free_memory = 0.0, lambda: free
sys.argv = ["edgellm", *sys.argv[2:]]
main()
"""


def test_it_serves_and_stops_where_nobody_reads_what_it_says(edge: Edge) -> None:
    """As behind `| head -1`, or where the terminal was closed: what it says is said by the way."""
    words = [sys.executable, "-m", "edgellm", "serve", "--role", "verifier", "--port", "0", "--no-http"]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while (match := re.search(r"--verifier (\S+:\d+)", said)) is None:
                line = process.stderr.readline()
                assert line, said
                said += line
            while "Ctrl-C" not in said:
                said += process.stderr.readline()
            process.stderr.close()
            for _ in range(2):  # each of which it tells of
                done = edge("chat", "--json", "Where is my mug?", "--max-tokens", "6", "--verifier", match[1])
                assert done.lines[-1]["summary"]["share_verified"] == 1.0
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()


def test_a_taken_port_is_told(edge: Edge) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = edge("serve", "--role", "verifier", "--no-http", "--port", port)
    assert done.code == 1
    assert port in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--host", "0.0.0.0"), 1, "air the devices first"),
        (("--host", "192.168.1.2"), 1, "air the devices first"),
        (("--port", "70000"), 2, "70000"),
        (("-m", "none.gguf"), 1, "There is no file none.gguf"),
        (("--draft", "edgellm-draft"), 2, "edgellm-draft is no EAGLE-3 head"),
        (("--sessions", "0"), 2, "--sessions"),
        (("--role", "pair", "--sessions", "2"), 2, "--sessions belongs to the role verifier"),
        (("--upstream", "http://127.0.0.1:9", "-m", "edgellm-draft", "--sessions", "2"), 2, "has no meaning"),
    ],
)
def test_what_cannot_be_served(edge: Edge, words: tuple[str, ...], code: int, says: str) -> None:
    done = edge("serve", "--role", "verifier", "--no-http", *words)
    assert done.code == code
    assert says in done.err
    assert done.err.count("\n") == 1
