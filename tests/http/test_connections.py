"""Strangers who connect, and then take their time: none of them holds the door."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from edgellm.http import server as porch
from edgellm.http.server import Credentials, HttpServer
from edgellm.rpc.trust.identity import web_certificate
from tests.http.conftest import HOME, asker

SOON = 0.3
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    """A door with little patience, behind which nobody writes."""
    for name in ("HEAD_SECONDS", "NEXT_SECONDS", "TAKE_SECONDS"):
        monkeypatch.setattr(porch, name, SOON)
    with HttpServer(HOME, key="k" * 43) as door:
        door.rest("Nobody writes here.")
        yield door


def knock(door: HttpServer) -> socket.socket:
    return socket.create_connection((door.address.host, door.address.port), timeout=120)


def drips(line: socket.socket, data: bytes = b"X-Slow: 1\r\n") -> None:
    """Sends byte after byte, for ever: returns when the other side has hung up."""
    line.settimeout(0.02)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            for byte in data:
                line.sendall(bytes([byte]))
                if line.recv(65536) == b"":
                    return
        except TimeoutError:
            continue
        except OSError:
            return
    pytest.fail("nobody hung up")


def test_a_head_that_drips_is_hung_up_on(hasty: HttpServer) -> None:
    with knock(hasty) as line:
        line.sendall(HEAD)
        drips(line)


def test_so_is_who_says_nothing(hasty: HttpServer) -> None:
    with knock(hasty) as line:
        assert line.recv(1) == b""


def test_so_is_the_head_of_a_later_request(hasty: HttpServer) -> None:
    with knock(hasty) as line:
        line.sendall(HEAD + b"\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 200 ")
        line.sendall(HEAD)
        drips(line)


def test_so_is_a_body_that_drips_behind_its_refusal(hasty: HttpServer) -> None:
    """Without the key; nobody reads it any more, and each byte would begin uvicorn's patience anew."""
    with knock(hasty) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 401 ")
        drips(line, b"a")


def test_so_is_who_asks_and_asks_and_reads_nothing(hasty: HttpServer) -> None:
    """Seen at the door: with its own window full, the client's system hears of the end when it next probes, which on a
    busy machine can take minutes."""
    asks = b"GET /page/chat.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    porches = hasty._server._porches if hasty._server is not None else []
    end, came = time.monotonic() + 120, False
    with knock(hasty) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(0.05)
        left = asks
        while not came or any(porch._here for porch in porches):
            assert time.monotonic() < end, "nobody hung up"
            came = came or any(porch._here for porch in porches)
            try:
                left = left[line.send(left) :] or asks
            except TimeoutError:
                continue
            except ConnectionError:
                return


def test_an_answer_may_take_its_time(hasty: HttpServer) -> None:
    """What is being answered owes nothing."""
    app = hasty._app._app

    async def slow(scope: object, receive: object, send: object) -> None:
        time.sleep(2 * SOON)
        await app(scope, receive, send)  # type: ignore[arg-type]

    hasty._app._app = slow
    assert asker(hasty)("GET", "/health").status == 200


def test_a_handshake_that_is_not_begun_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(porch, "HEAD_SECONDS", SOON)
    certificate, key = web_certificate(tmp_path, ["127.0.0.1"])
    with HttpServer(HOME, lock=Credentials("k" * 43, certificate, key)) as door, knock(door) as line:
        door.rest("Nobody writes here.")
        assert line.recv(1) == b""
        context = ssl.create_default_context(cafile=certificate)
        connection = http.client.HTTPSConnection(door.address.host, door.address.port, timeout=60, context=context)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


@pytest.mark.parametrize("first", [b"", HEAD])
def test_however_many_are_silent_who_asks_is_answered(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr(porch, "MOST", 8)
    with HttpServer(HOME) as door, ExitStack() as lines:
        door.rest("Nobody writes here.")
        held = []
        for _ in range(30):
            held.append(line := lines.enter_context(knock(door)))
            line.sendall(first)
        assert asker(door)("GET", "/health").status == 200
        for line in held[:20]:  # who was silent for longest has made room
            _until(lambda line=line: _closed(line))  # type: ignore[misc]


def _closed(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except ConnectionError:
        return True


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_who_is_being_served_is_not_hung_up_on_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(porch, "MOST", 2)
    with HttpServer(HOME) as door:
        door.rest("Nobody writes here.")
        app, go, inside = door._app._app, threading.Event(), threading.Semaphore(0)

        async def stands(scope: object, receive: object, send: object) -> None:
            import asyncio

            inside.release()
            while not go.is_set():
                await asyncio.sleep(0.01)
            await app(scope, receive, send)  # type: ignore[arg-type]

        door._app._app = stands
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(asker(door)("GET", "/health").status)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
            inside.acquire()
        with knock(door) as line:
            assert _closed(line)
        go.set()
        for thread in threads:
            thread.join()
        assert found == [200, 200]
        door._app._app = app
        assert asker(door)("GET", "/health").status == 200


def test_nothing_is_left_of_whoever_came_and_went(hasty: HttpServer) -> None:
    """Descriptors, threads and tasks: of those who asked, of those who left in the middle, and of those hung up on."""
    process, ask = psutil.Process(), asker(hasty)

    def visits(count: int) -> None:
        for _ in range(count):
            with knock(hasty) as asks, knock(hasty) as leaves, knock(hasty) as stays:
                asks.sendall(HEAD + b"Connection: close\r\n\r\n")
                while asks.recv(65536):
                    pass
                leaves.sendall(HEAD)
                stays.settimeout(60)
                assert stays.recv(1) == b""

    visits(2)
    before = process.num_fds(), process.num_threads()
    visits(10)
    assert ask("GET", "/health").status == 200
    _until(lambda: (process.num_fds(), process.num_threads()) <= before)
    porches = hasty._server._porches if hasty._server is not None else []
    _until(lambda: all(len(one._here) == len(one._silent) == len(one._greeted) == 0 for one in porches))
