"""Progress is shown where something takes long, and nowhere else."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from edgellm.cli.views import progress
from edgellm.cli.views.progress import Loading, PromptBar
from edgellm.spec.types import PromptProgress


class Terminal(io.StringIO):
    """A terminal; `shown` is set once it shows `wanted`."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self.wanted, self.shown = wanted, threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.wanted in text:
            self.shown.set()
        return super().write(text)


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(progress, "time", ticking := Clock())
    return ticking


def test_what_is_waited_for_is_shown_at_a_terminal_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal("reading the prompt"))
    bar = PromptBar()
    assert screen.shown.wait(60.0)
    bar.stop()
    assert screen.getvalue().endswith("\x1b[2K")


def test_a_bar_shows_the_tokens_their_speed_and_the_time_left(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 3600.0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal("512 of 4,096 tokens, 256/s, about 14 s left"))
    bar = PromptBar()
    bar(PromptProgress("veri\x1bfier", 0, 4096))
    clock.now = 2.0
    bar._show()
    bar(PromptProgress("veri\x1bfier", 512, 4096))
    assert screen.shown.wait(60.0)
    bar.say("The budget is spent.")
    bar.stop()
    assert "The budget is spent." in screen.getvalue()
    assert "veri␛fier" in screen.getvalue()


@pytest.mark.parametrize(
    ("at", "printed"),
    [
        (2.0, "reading the prompt with verifier: 512 of 4,096 tokens, 256/s, about 14 s left\n"),
        (0.5, ""),  # it is not known yet that it will take long
    ],
)
def test_elsewhere_a_line_tells_of_a_long_wait(
    at: float, printed: str, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    bar = PromptBar()
    bar(PromptProgress("verifier", 0, 4096))
    clock.now = at
    bar(PromptProgress("verifier", 512, 4096))
    bar(PromptProgress("verifier", 512, 4096))
    bar.stop()
    bar(PromptProgress("draft", 0, 4096))  # begins to read once the verifier has written the first word
    clock.now += 2.0
    bar(PromptProgress("draft", 512, 4096))
    assert capsys.readouterr().err == printed


def test_what_a_verifier_had_read_before_does_not_count_as_speed(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    bar = PromptBar()
    clock.now = 10.0
    bar(PromptProgress("verifier", 2000, 4000))
    clock.now = 12.0
    bar(PromptProgress("verifier", 2200, 4000))
    bar.stop()
    assert "100/s, about 18 s left" in capsys.readouterr().err


def test_a_slow_one_is_told_once_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    with Loading() as loading:
        for share in (0.1, 0.2, 1.0):
            loading("draft.gguf", share)
        loading("verifier.gguf", 0.1)
    assert capsys.readouterr().err == "loading draft.gguf\nloading verifier.gguf\n"


def test_a_slow_one_has_a_bar_at_a_terminal_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal(""))
    with Loading() as loading:
        loading("dra\x1bft.gguf", 0.25)
        loading("dra\x1bft.gguf", 0.5)
    shown = screen.getvalue()
    assert "loading dra␛ft.gguf" in shown
    assert "50%" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared
