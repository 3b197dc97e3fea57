"""Replies over a link that goes wrong in every way. The long run is `python -m bench run robustness/faults`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from bench.robustness.faults import DEADLINE, KINDS, Outcome, failures, figures_of, judged, run, table
from edgellm.spec.types import Source, Token
from testkit.network.faulty_relay import FaultyRelay


@pytest.mark.nightly
def test_every_word_is_what_it_says_whatever_goes_wrong() -> None:
    outcomes, left = run([*KINDS, "reply abandoned", "none"], seed=3, prompts=1)
    assert [(one.kind, one.problems) for one in outcomes if one.problems] == []
    assert any(one.unchecked for one in outcomes)  # some of it did go wrong
    found = {"faults": figures_of(outcomes), "replies": 15, "wrong": 0, "late": 0, "left": left}
    assert failures(found) == []
    assert "0 with a wrong" in table(found)


def test_a_pair_that_says_something_else_is_found_out() -> None:
    def said(*tokens: tuple[int, Source]) -> tuple[int, list[str]]:
        return judged("none", [Token(token, b"", source) for token, source in tokens], [1, 2, 3])

    checked, draft = Source.ACCEPTED, Source.DRAFT
    assert said((1, checked), (2, checked), (3, checked)) == (0, [])
    assert said((1, checked), (2, draft), (9, draft)) == (2, [])
    assert said((1, checked), (9, checked), (3, checked))[1] == ["what was checked is not the verifier's own text"]
    assert said((1, checked), (2, checked))[1] == ["2 tokens, and the verifier writes 3"]
    assert figures_of([Outcome("none", 1.0, DEADLINE + 1, 0, back=False)])["none"]["late"] == 1


@pytest.fixture
def echo() -> Iterator[FaultyRelay]:
    """A relay before a server that says what it hears."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    end, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=repeat, args=(end,), daemon=True).start()

        def repeat(end: socket.socket) -> None:
            with end:
                try:
                    while data := end.recv(100):
                        end.sendall(data)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        with FaultyRelay(server.getsockname()[1]) as relay:
            yield relay
        server.shutdown(socket.SHUT_RDWR)


def connect(relay: FaultyRelay) -> socket.socket:
    end = socket.create_connection(("127.0.0.1", relay.port))
    end.settimeout(0.3)
    return end


def test_what_the_relay_does(echo: FaultyRelay) -> None:
    with connect(echo) as end:
        end.sendall(b"a")
        assert end.recv(10) == b"a"
        echo.stall()
        end.sendall(b"b")
        with pytest.raises(TimeoutError):
            end.recv(10)
        echo.heal()
        assert end.recv(10) == b"b"
        echo.garbage()
        end.sendall(b"c")
        said = end.recv(1000)
        assert len(said) > 1
        assert said.endswith(b"c")
        echo.half_open()
        end.sendall(b"d")
        with pytest.raises(TimeoutError):
            end.recv(10)
        echo.cut()
        with suppress(ConnectionResetError):
            assert end.recv(10) == b""
    echo.heal()
    echo.close_door()
    with connect(echo) as end:
        assert end.recv(10) == b""
    echo.heal()
    with connect(echo) as end:
        end.sendall(b"e")
        assert end.recv(10) == b"e"
