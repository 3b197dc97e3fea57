"""What a daemon logs: nothing unless it is asked to, and never what was said in it."""

from __future__ import annotations

import http.client
import json
import logging
import re
import signal
from pathlib import Path

import pytest

from edgellm.cli.commands.serve import log_to_stderr
from tests.cli.test_serve_http import Start, start

__all__ = ["start"]

SECRET, KEY = "xylophone", "k" * 40


def logged(start: Start, tmp_path: Path, *options: str) -> str:
    """What a pair behind HTTP says that is asked with a key and with a wrong one."""
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    server, url = start("--api-key-file", str(key), *options)
    port = int(url.rpartition(":")[2].partition("/")[0])
    assert ask(port, "/v1/chat/completions") == 200
    assert ask(port, f"/v1/chat/completions?key={KEY}", key="wrong") == 401
    server.process.send_signal(signal.SIGTERM)
    server.end()
    return "".join(server.said)


def ask(port: int, path: str, key: str = KEY) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"messages": [{"role": "user", "content": f"Where is my {SECRET}?"}], "max_tokens": 4})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def test_requests_and_replies_are_logged_and_nothing_of_what_they_say(start: Start, tmp_path: Path) -> None:
    log = logged(start, tmp_path, "--log-level", "debug")
    assert re.search(r"INFO +edgellm\.http\.middleware: POST '/v1/chat/completions' 200 in \d+ ms", log), log
    assert re.search(r"WARNING +edgellm\.http\.middleware: POST '/v1/chat/completions' refused: 401", log), log
    assert re.search(r"INFO +edgellm\.llm\.replies\.generation: reply of 4 tokens to a prompt of \d+: length", log), log
    assert re.search(r"DEBUG +edgellm\.llm\.replies\.generation: ", log), log
    assert SECRET not in log
    assert KEY not in log
    assert "wrong" not in log


def test_nobody_forges_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    root, own = logging.getLogger(), logging.getLogger("edgellm")
    before = root.level, root.handlers[:], own.level, logging.root.manager.disable
    try:
        root.handlers = []
        log_to_stderr("info")
        logging.getLogger("edgellm.test").warning("lost: %s", "a device\n2026-01-01 INFO edgellm: all is well\x1b[2J")
        logging.getLogger("edgellm.test").debug("not this")
        logging.getLogger("another").info("nor that")
    finally:
        root.level, root.handlers, own.level, _ = before
        logging.disable(before[3])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "\\n2026" in lines[0]
    assert "\x1b" not in lines[0]
