"""Clients that connect and then take their time: none of them keeps others out."""

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from edgellm.http import server as server_module
from edgellm.http.server import HttpServer
from edgellm.rpc.trust.identity import web_certificate
from edgellm.spec.stats import Summary
from edgellm.spec.types import Event
from tests.http.conftest import HOME, asker, configured, conversation
from tests.http.test_streaming import opened, said, waiting
from tests.waiting import until

SOON = 0.3
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    """A server with short limits of time, and without a model."""
    monkeypatch.setattr(server_module, "CLIENT_SECONDS", SOON)
    with configured(key="k" * 43) as server:
        server.models.open_without_model("There is no model.")
        yield server


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection((server.address.host, server.address.port), timeout=120)


def drip(client: socket.socket, data: bytes) -> None:
    """Send byte after byte until the server closes the connection."""
    client.settimeout(0.02)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            for byte in data:
                client.sendall(bytes([byte]))
                if client.recv(65536) == b"":
                    return
        except TimeoutError:
            continue
        except OSError:
            return
    pytest.fail("the connection stays open")


BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "answer", "then", "dripped"),
    [
        (b"", b"", b"", b""),
        (HEAD, b"", b"", b"X-Slow: 1\r\n"),
        (HEAD + b"\r\n", b"HTTP/1.1 200 ", HEAD, b"X-Slow: 1\r\n"),
        (BODY, b"HTTP/1.1 401 ", b"", b"a"),  # not read without a key, and each byte would restart uvicorn's own timer
    ],
    ids=["silence", "a head", "a later head", "a refused body"],
)
def test_what_comes_slowly_closes_the_connection(
    impatient: HttpServer, first: bytes, answer: bytes, then: bytes, dripped: bytes
) -> None:
    with connect(impatient) as client:
        client.sendall(first)
        assert not answer or client.recv(65536).startswith(answer)
        client.sendall(then)
        if dripped:
            drip(client, dripped)
        else:
            assert client.recv(1) == b""


def test_a_stream_that_is_not_read_ends_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLIENT_SECONDS", SOON)
    cancelled = threading.Event()

    def script(_stats: Summary, stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        try:
            while not stopped():
                time.sleep(0.005)
                yield from said(b"a" * 100_000)  # soon neither system takes any more
        finally:  # a reply that is cancelled between two tokens closes its writer
            cancelled.set()

    with opened(script) as server, connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(stream_request())
        assert cancelled.wait(120)


def stream_request(head: str = "") -> bytes:
    body = json.dumps(conversation(stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{head}"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def test_a_response_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests that arrive together, uvicorn begins the second while the first returns. No connection is idle
    while a request is being served."""
    monkeypatch.setattr(server_module, "CLIENT_SECONDS", SOON)
    seconds = iter((0.0, 3 * SOON))

    def script(_stats: Summary, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        time.sleep(next(seconds))
        yield from said(b"a")

    with opened(script) as server, connect(server) as client:
        client.sendall(stream_request() + stream_request("Connection: close\r\n"))
        answers = b""
        while data := client.recv(65536):
            answers += data
        assert answers.count(b"[DONE]") == 2


def test_a_handshake_that_is_not_begun_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLIENT_SECONDS", SOON)
    certificate, key = web_certificate(tmp_path, ["127.0.0.1"])
    with configured(tls=(certificate, key), key="k" * 43) as server, connect(server) as client:
        server.models.open_without_model("There is no model.")
        assert client.recv(1) == b""
        context = ssl.create_default_context(cafile=certificate)
        connection = http.client.HTTPSConnection(server.address.host, server.address.port, timeout=60, context=context)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


@pytest.mark.parametrize("first", [b"", HEAD])
def test_those_idle_for_longest_make_room(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 8)
    with HttpServer(HOME) as server, ExitStack() as clients:
        server.models.open_without_model("There is no model.")
        idle = []
        for _ in range(30):
            idle.append(client := clients.enter_context(connect(server)))
            client.sendall(first)
        assert asker(server)("GET", "/health").status == 200
        for client in idle[:20]:
            until(lambda client=client: _closed(client))  # type: ignore[misc]


def _closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_requests_being_served_are_not_cut_off_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
    go, being_served = threading.Event(), threading.Semaphore(0)

    def script(stats: Summary, stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        being_served.release()
        yield from waiting(go)(stats, stopped)

    with opened(script, replies=2) as server, ThreadPoolExecutor() as threads:
        ask = asker(server)
        served = [threads.submit(ask, "POST", "/v1/chat/completions", conversation()) for _ in range(2)]
        for _ in served:
            assert being_served.acquire(timeout=60)
        with connect(server) as client:
            assert _closed(client)
        go.set()
        assert [one.result().status for one in served] == [200, 200]
        assert ask("GET", "/health").status == 200


def test_closed_connections_leave_nothing_behind(impatient: HttpServer) -> None:
    """Neither descriptors nor threads nor tasks: of clients that were served, that left early, and that were silent."""
    process, ask = psutil.Process(), asker(impatient)

    def come_and_go(count: int) -> None:
        for _ in range(count):
            with connect(impatient) as served, connect(impatient) as leaves, connect(impatient) as silent:
                served.sendall(HEAD + b"Connection: close\r\n\r\n")
                while served.recv(65536):
                    pass
                leaves.sendall(HEAD)
                silent.settimeout(60)
                assert silent.recv(1) == b""

    come_and_go(2)
    before = process.num_fds(), process.num_threads()
    come_and_go(10)
    assert ask("GET", "/health").status == 200
    until(lambda: (process.num_fds(), process.num_threads()) <= before)
    until(lambda: not impatient._server.server_state.connections)  # type: ignore[union-attr]
