"""Who is blamed for silence behind an order over RPC, and when nobody is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from edgellm.mesh.ggml_rpc import hang_watch
from edgellm.mesh.ggml_rpc.hang_watch import HangWatch
from edgellm.services.rpc_tunnel import StreamTraffic

BEAT = 0.01


class Watched:
    """A watch over two servers, and whom it has blamed."""

    def __init__(self) -> None:
        self.servers = [StreamTraffic(), StreamTraffic()]
        self.blamed: list[int | None] = []
        self.hung = threading.Event()
        self.watch = HangWatch(self._blame, BEAT)

    def _blame(self, number: int | None, seconds: float) -> None:
        assert seconds > 0
        self.blamed.append(number)
        self.hung.set()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    for name in ("LOAD_SECONDS", "LEAST_SECONDS"):
        monkeypatch.setattr(hang_watch, name, 20 * BEAT)
    monkeypatch.setattr("edgellm.spec.patience.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("edgellm.spec.patience.UNKNOWN_PASS", BEAT)
    found = Watched()
    yield found
    found.watch.close()


@pytest.mark.parametrize(("answered", "blamed"), [(False, 1), (True, 0)])
def test_the_server_that_was_asked_last_and_owes_an_answer_is_blamed(
    watched: Watched, answered: bool, blamed: int
) -> None:
    a, b = watched.servers
    with watched.watch.load(watched.servers):
        a.sent(100)
        time.sleep(0.001)
        b.sent(10)
        if answered:
            b.received(1)
        assert watched.hung.wait(60)
    assert watched.blamed == [blamed]


def test_the_process_is_blamed_where_no_server_owes_an_answer(watched: Watched) -> None:
    with watched.watch.load(watched.servers):
        pass
    with watched.watch.decode(1):
        watched.servers[0].sent(1)
        watched.servers[0].received(1)
        assert watched.hung.wait(60)
    assert watched.blamed == [None]


@pytest.mark.parametrize("life", ["up", "down", "report"])
def test_a_byte_or_a_report_is_a_sign_of_life(watched: Watched, life: str) -> None:
    server = watched.servers[1]
    signs = {"up": lambda: server.sent(1), "down": lambda: server.received(1), "report": watched.watch.report}
    with watched.watch.load(watched.servers):
        server.sent(1)
        beats = threading.Event()
        for _ in range(60):  # three times as long as a silence may be
            signs[life]()
            beats.wait(BEAT)
    assert not watched.blamed


def test_nobody_is_blamed_while_nothing_is_asked(watched: Watched) -> None:
    with watched.watch.load(watched.servers):
        watched.servers[0].sent(1)
    assert not watched.hung.wait(60 * BEAT)


def test_a_prompt_may_take_longer_than_the_passes_that_were_seen(watched: Watched) -> None:
    with watched.watch.load(watched.servers):
        pass
    with watched.watch.decode(1):
        time.sleep(BEAT)
    with watched.watch.decode(1000):
        watched.servers[0].sent(1)
        assert not watched.hung.wait(60 * BEAT)  # of five times a thousand passes
