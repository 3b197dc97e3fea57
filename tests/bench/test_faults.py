"""Replies over a link that goes wrong in every way. The long run is `python -m bench.robustness.faults`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.robustness import faults
from bench.robustness.faults import DEADLINE, KINDS, Outcome, figures_of, run, table
from bench.robustness.faults_setup import Scene
from edgellm.spec.types import Source
from testkit.network.faulty_relay import FaultyRelay


@pytest.mark.nightly
def test_every_word_is_what_it_says_whatever_goes_wrong() -> None:
    outcomes, left = run([*KINDS, "reply abandoned", "none"], seed=3, prompts=1)
    assert [(one.kind, one.way, one.problems) for one in outcomes if one.problems] == []
    assert any(one.unchecked for one in outcomes)  # some of it did go wrong
    assert left["sessions"] == 0
    found = {"faults": figures_of(outcomes), "replies": 15, "wrong": 0, "late": 0, "left": left}
    assert "0 with a wrong" in table(found)


def test_a_pair_that_says_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trial itself: a verified word that is not the verifier's, and a reply that is too short."""

    class Said:
        def __init__(self, token: int, source: Source = Source.ACCEPTED) -> None:
            self.id, self.source = token, source

    def outcome(*tokens: Said) -> Outcome:
        monkeypatch.setattr(faults, "paired", lambda *_: (list(tokens), 1.0, []))
        monkeypatch.setattr(Scene, "wait", lambda _self: None)
        monkeypatch.setattr(Scene, "heal", lambda _self: None)
        scene = replace(_nothing(), alone=[[1, 2, 3]], usual={"loop": 0.5, "pair": 0.5})
        return faults.trial(scene, None, 0, "none", _Tails(), faults.Clock())  # type: ignore[arg-type]

    assert outcome(Said(1), Said(2), Said(3)).problems == []
    assert outcome(Said(1), Said(2, Source.DRAFT), Said(9, Source.DRAFT)).problems == []
    assert outcome(Said(1), Said(9), Said(3)).problems == ["what was checked is not the verifier's own text"]
    assert outcome(Said(1), Said(2)).problems == ["2 tokens, and the verifier writes 3"]
    assert figures_of([replace(outcome(Said(1)), longer=DEADLINE + 1)])["none"]["late"] == 1


class _Tails:
    """Chance that always says no."""

    def getrandbits(self, _n: int) -> int:
        return 0


def _nothing() -> Scene:
    made: Any = Scene
    return cast(Scene, made(*([None] * 9), []))


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
