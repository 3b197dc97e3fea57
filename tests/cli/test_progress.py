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


def test_a_wait_is_shown_at_a_terminal_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal("reading the prompt"))
    with PromptBar():
        assert screen.shown.wait(60.0)
    assert screen.getvalue().endswith("\x1b[2K"), "the line is cleared"
    monkeypatch.setattr(sys, "stderr", screen := Terminal("loading dra␛ft.gguf"))
    with Loading() as loading:
        loading("dra\x1bft.gguf", 0.25)
        loading("dra\x1bft.gguf", 0.5)
        assert screen.shown.wait(60.0)
    assert "50%" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


def test_a_bar_shows_the_tokens_their_speed_and_the_time_left(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal("512 of 4,096 tokens, 256/s, about 14 s left"))
    with PromptBar() as bar:
        bar.hear(PromptProgress("verifier", 0, 4096))
        clock.now = 2.0
        bar.hear(PromptProgress("verifier", 512, 4096))
        assert screen.shown.wait(60.0)
        bar.say("The budget is spent.")
    assert "The budget is spent." in screen.getvalue()


@pytest.mark.parametrize(
    ("before", "at", "printed"),
    [
        (0, 2.0, "reading the prompt with verifier: 512 of 4,096 tokens, 256/s, about 14 s left\n"),
        (312, 2.0, "reading the prompt with verifier: 512 of 4,096 tokens, 100/s, about 36 s left\n"),  # read before
        (0, 0.5, ""),  # it is not known yet that it will take long
    ],
)
def test_elsewhere_a_line_tells_of_a_long_wait(
    before: int, at: float, printed: str, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with PromptBar() as bar:
        bar.hear(PromptProgress("verifier", before, 4096))
        clock.now = at
        bar.hear(PromptProgress("verifier", 512, 4096))
        bar.hear(PromptProgress("verifier", 512, 4096))
    bar.hear(PromptProgress("draft", 0, 4096))  # begins to read once the verifier has written the first word
    clock.now += 2.0
    bar.hear(PromptProgress("draft", 512, 4096))
    assert capsys.readouterr().err == printed


def test_each_slow_model_is_told_once_where_nobody_watches(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with Loading() as loading:
        for name in ("draft.gguf", "verifier.gguf"):
            for share in (0.1, 0.2, 0.3):
                loading(name, share)
                clock.now += 1.0
            loading(name, 1.0)
    assert [line[:-len(", about 8 s left")] for line in capsys.readouterr().err.splitlines()] == [
        "loading draft.gguf: 20%", "loading verifier.gguf: 20%",
    ]  # fmt: skip
