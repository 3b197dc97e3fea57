"""A conversation at a real pseudo-terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import segno

from edgellm.cli.chat_session import TOY
from edgellm.http.middleware import HttpConfig, page_key
from edgellm.http.running_servers import recorded
from edgellm.http.server import HttpServer
from edgellm.rpc.address import Address
from tests.cli.conftest import Edge
from tests.http.conftest import asker
from tests.storage.hub import REPO, Hub, pull

ROOT = Path(__file__).parents[2]
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])")


class Screen:
    """A program at a terminal of 100 columns. `shown` is all that it wrote, control sequences included."""

    def __init__(self, *words: str) -> None:
        self.own, other = pty.openpty()
        termios.tcsetwinsize(other, (40, 100))
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=ROOT, stdin=other, stdout=other, stderr=other, start_new_session=True,
            env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1"},  # nobody here answers where the cursor is
        )  # fmt: skip
        os.close(other)
        self.shown = ""
        self.seen = 0

    def type(self, keys: str) -> None:
        os.write(self.own, keys.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Reads until `text` appears behind what was waited for before; returns it and what came in between."""
        until = time.monotonic() + seconds
        while True:
            plain = ESCAPES.sub("", self.shown)
            if (at := plain.find(text, self.seen)) >= 0:
                came, self.seen = plain[self.seen : at + len(text)], at + len(text)
                return came
            assert time.monotonic() < until, f"no {text!r} in:\n{plain[self.seen :]}"
            assert self.read(), plain

    def read(self) -> bool:
        """Reads what is there, for at most half a second; returns False where the other end is closed."""
        if select.select([self.own], [], [], 0.5)[0]:
            try:
                self.shown += os.read(self.own, 65536).decode()
            except OSError:
                return False
        return True

    def end(self) -> int:
        """Its exit code, when it has ended by itself."""
        until = time.monotonic() + 120
        while self.process.poll() is None and time.monotonic() < until and self.read():
            pass
        return self.process.wait(timeout=60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.own)


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    opened: list[Screen] = []
    yield opened
    for screen in opened:
        screen.close()


def test_a_conversation(screens: list[Screen]) -> None:
    screens.append(screen := Screen("edgellm", "chat", "--max-tokens", "5"))
    screen.wait_for("type /help")
    for keys, *wanted in (
        ("/help\r", "Ctrl-C stops a reply"), ("/und", "take back the last question"),
        ("\t\r", "There is nothing to undo."), ("/colors\r", "written by the verifier alone"),
        ("/stats\r", "There is no reply yet"), ("Where is\\\rmy mug?\r", ". my mug?", "5 tokens"),
        ("/stats\r", "tokens of context are used"), ("/clear\r", "The next question starts a new conversation."),
        ("/nonsense\r", "There is no command /nonsense"), ('"""one\rtwo"""\r', "tokens"),
    ):  # fmt: skip
        if keys != "\t\r":
            screen.wait_for(">")
        screen.type(keys)
        for text in wanted:
            screen.wait_for(text)
    assert re.search(r"\x1b\[[0-9;]*m■ ", screen.shown)  # the legend is coloured
    screen.wait_for(">")
    screen.type("exit\r")
    assert screen.end() == 0


def test_a_phone_scans_the_code_of_a_servers_page(screens: list[Screen]) -> None:
    with (
        HttpServer(Address.parse("127.0.0.1:0"), HttpConfig(page_key=page_key())) as server,
        recorded("localhost", server.address.port, None),  # a name may be another machine's way to this one
    ):
        screens.append(screen := Screen("edgellm", "pair", "--port", "0"))
        shown = screen.wait_for("within 5 minutes")
        [link] = re.findall(r"http://localhost:\d+/#pair=\S+", shown)
        lines = [line for line in shown.splitlines() if re.fullmatch("[ ▀▄█]{30,}", line)]
        light = [[char in half for char in line[4:]] for line in lines for half in ("▀█", "▄█")]
        wanted = [
            [not module for module in row] for row in segno.make(link, error="l", micro=False).matrix_iter(border=2)
        ]
        assert light[: len(wanted)] == wanted
        body = {"code": link.partition("=")[2], "name": "iPhone"}
        assert asker(server)("POST", "/phones", body).status == 201
        screen.wait_for("paired with iPhone")
        assert screen.end() == 0


@pytest.mark.parametrize("switch", ["--no-history", "off"])
def test_nothing_typed_is_kept_without_history(screens: list[Screen], tmp_path: Path, switch: str, edge: Edge) -> None:
    more = [switch] if switch != "off" else []
    if not more:
        assert edge("history", "off").code == 0
    screens.append(screen := Screen("edgellm", "chat", "--max-tokens", "3", *more))
    screen.wait_for(">")
    screen.type("my word is quokka\r")
    screen.wait_for(" tokens")
    screen.wait_for(">")
    screen.type("\x1b[A")  # the arrow key brings it back all the same
    screen.wait_for("my word is quokka")
    screen.type("\x15\x04")
    assert screen.end() == 0
    files = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"quokka" in path.read_bytes()]


def test_the_bundled_pair_says_what_it_is_and_knows_what_it_is_told(screens: list[Screen]) -> None:
    told, asked = re.findall(r'"(.+?)"', TOY)
    assert max(map(len, TOY.splitlines())) <= 80
    screens.append(screen := Screen("edgellm", "chat"))
    screen.wait_for("This toy pair")
    screen.wait_for(">")
    screen.type(f"{told}\r")
    screen.wait_for("tokens/s")
    screen.wait_for(">")
    screen.type(f"{asked}\r")
    screen.wait_for("The film night is Friday at 20:00.")
    screen.wait_for("tokens/s")
    screen.wait_for(">")
    screen.type("\x04")
    assert screen.end() == 0
    for words in (("-c", "Who has the drill?"), ("-q", "Hello"), ("--json", "Hello")):
        screens.append(screen := Screen("edgellm", "chat", *words))
        assert screen.end() == 0
        assert "toy" not in screen.shown


def test_ctrl_c_stops_the_reply_and_not_the_program(screens: list[Screen]) -> None:
    screens.append(screen := Screen("tests.cli.endless", "chat"))
    screen.wait_for(">")
    screen.type("go\r")
    screen.wait_for("on on on ")
    screen.process.send_signal(signal.SIGINT)
    screen.wait_for("stopped")
    screen.wait_for(">")
    screen.type("/exit\r")
    assert screen.end() == 0


def test_rm_asks_first(screens: list[Screen], hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    path = pull(REPO).path
    for answer, code, stays in (("n", 1, True), ("y", 0, False)):
        screens.append(screen := Screen("edgellm", "rm", REPO))
        screen.wait_for(f"Remove {REPO}:Q4_K_M (200.1 kB)?")
        screen.type(f"{answer}\r")
        assert screen.end() == code
        assert path.exists() == stays
