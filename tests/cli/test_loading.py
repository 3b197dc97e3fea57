"""Progress of loading is shown where it takes long, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from edgellm.cli.views import console
from edgellm.cli.views.console import Loading


def test_a_quick_model_is_loaded_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with Loading() as progress:
        progress("draft.gguf", 0.5)
        progress("draft.gguf", 1.0)
    assert capsys.readouterr().err == ""


def test_a_slow_one_is_told_once_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    with Loading() as progress:
        for share in (0.1, 0.2, 1.0):
            progress("draft.gguf", share)
        progress("verifier.gguf", 0.1)
    assert capsys.readouterr().err == "loading draft.gguf\nloading verifier.gguf\n"


def test_the_time_that_is_left_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 0.0, 2.0))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with Loading("hashing") as progress:
        progress("qwen.gguf", 0.0)
        progress("qwen.gguf", 0.25)
    assert capsys.readouterr().err == "hashing qwen.gguf, about 6 s left\n"


def test_a_slow_one_has_a_bar_at_a_terminal_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with Loading() as progress:
        progress("dra\x1bft.gguf", 0.25)
        progress("dra\x1bft.gguf", 0.5)
    shown = screen.getvalue()
    assert "loading dra␛ft.gguf" in shown
    assert "50%" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared
