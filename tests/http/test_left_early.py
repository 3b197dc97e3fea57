"""A client that leaves while its prompt is still being read."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading

import pytest

from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.spec.stream import Reply
from tests.decodes import FEW, Watched
from tests.http.conftest import QUESTION, Ask, written

LONG = "The red mug is on the shelf in the kitchen. " * 60 + "\n\nWhere is the red mug?"
ABORTED = 2


@pytest.mark.parametrize("stream", [True, False])
def test_no_more_of_it_is_read_and_the_next_reply_is_whole(
    ask: Ask, server: HttpServer, own: LLM, pair: LLM, decodes: Watched, rows_are_cheap: None,
    monkeypatch: pytest.MonkeyPatch, stream: bool,
) -> None:  # fmt: skip
    def counted() -> tuple[float, ...]:
        text = ask("GET", "/metrics").body.decode()
        names = (r'edgellm_requests_total\{outcome="cancelled"\}', "edgellm_generation_tokens_total")
        return tuple(float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1]) for name in names)  # type: ignore[index]

    wanted = written(pair, max_tokens=8)
    written(own, max_tokens=1)  # has measured what it must
    seen, meanwhile = decodes
    before = counted()
    connection = http.client.HTTPConnection(server.address.host, server.address.port)
    reads, cancelled, closed = threading.Event(), threading.Event(), threading.Event()
    cancel, close = Reply.cancel, Reply.close

    def stands() -> None:
        reads.set()
        cancelled.wait(60)

    def cancels(reply: Reply) -> None:
        cancel(reply)
        cancelled.set()

    def closes(reply: Reply) -> None:
        close(reply)
        closed.set()

    monkeypatch.setattr(Reply, "cancel", cancels)
    monkeypatch.setattr(Reply, "close", closes)
    seen.clear()
    meanwhile.append(stands)
    body = {"messages": [{"role": "user", "content": LONG}], "stream": stream, "max_tokens": 8}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert reads.wait(60)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert cancelled.wait(60)
    assert closed.wait(60)
    assert [status for rows, status in seen if rows > FEW] == [ABORTED]
    said = ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8})
    assert said.json["choices"][0]["message"]["content"] == wanted
    assert counted() == (before[0] + 1, before[1] + said.json["usage"]["completion_tokens"])
