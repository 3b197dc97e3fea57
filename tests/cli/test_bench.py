"""`edgellm bench`: the measurements of a checkout, behind one command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgellm.cli.commands import bench
from tests.cli.conftest import Edge

ROOT = Path(__file__).parents[2]


def test_a_suite_is_listed_and_shown_and_one_that_is_not_there_is_said(
    edge: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        """In a process of its own: the benchmarks' output goes past this one's streams."""
        command = [sys.executable, "-m", "edgellm", "bench", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)

    assert "csgo/paper" in asked("csgo", "--list").stdout
    shown = asked("csgo", "paper", "--show")
    assert (shown.returncode, "python -m bench run csgo/paper" in shown.stdout) == (0, True)
    done = asked("sinera")
    assert done.returncode == 2
    assert "choose from synera, coordgen, papers, csgo" in done.stderr
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    found = edge("bench", "synera")
    assert (found.code, "not a checkout" in found.err) == (2, True)


def test_options_for_hardware_are_checked_and_handed_on(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def call(words: list[str], **_: object) -> int:
        ran.append(words)
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    words = ("--threads", "2", "--threads", "draft=1", "--cache-type", "q8_0")
    assert edge("bench", "models", "sampling_defaults", "--quick", *words).code == 0
    assert ran[-1][2:] == ["bench", "run", "models/sampling_defaults", "--quick", *words]
    monkeypatch.setenv("EDGELLM_BENCH_CTX_SIZE", "512")
    assert edge("bench", "models").code == 0
    assert ran[-1][3:] == ["run", "models", "--ctx-size", "512"]
    assert edge("bench", "models", "--list").code == 0  # a setting is left alone
    assert ran[-1][3:] == ["list", "models"]
    for refused, says in (
        (("--cache-type", "q2"), "q2"),
        (("--threads", "many"), "--threads is 'many'"),
        (("--show", "--threads", "2"), "--threads has no meaning with --show"),
    ):
        done = edge("bench", "models", *refused)
        assert (done.code, len(ran)) == (2, 3)
        assert says in done.err
