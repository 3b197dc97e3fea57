"""Benchmarks run on the hardware that is asked for where they use such options, and say so where they do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.engine import rows
from bench.harness import hardware, report
from bench.harness.suite import Benchmark, benchmarks
from bench.models import told_facts
from edgellm.engine import Context, Model
from testkit import ROOT

USING = {name: one for name, one in benchmarks().items() if one.hardware is not None}


@pytest.mark.parametrize("benchmark", USING.values(), ids=USING)
def test_it_takes_the_options_that_it_is_said_to_use(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.hardware is not None
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit):
        benchmark.load().main()
    shown = capsys.readouterr().out
    for name in hardware.USED[benchmark.hardware]:
        assert f"--{name.replace('_', '-')} " in shown


def test_what_a_benchmark_does_not_use_is_kept_from_it() -> None:
    asked = {"threads": ["2", "draft=1"], "cache_type": ["q8_0"], "ctx_size": ["512"]}
    everything = ["--threads", "2", "--threads", "draft=1", "--cache-type", "q8_0", "--ctx-size", "512"]
    assert hardware.words_for(None, asked) == ([], everything)
    assert hardware.words_for(hardware.PAIR, asked) == (everything, [])
    assert hardware.words_for(hardware.THREADS, asked) == (everything[:2], everything[2:])
    used, unused = hardware.words_for(hardware.MODEL, asked)
    assert (used, unused) == (["--threads", "2", "--cache-type", "q8_0"], ["--threads", "draft=1", "--ctx-size", "512"])


def test_a_result_of_other_hardware_does_not_replace_the_own_one() -> None:
    benchmark = benchmarks()["models/told_facts"]
    assert benchmark.command(quick=False)[-2:] == ["--name", "told_facts"]
    words = ("--threads", "2")
    assert benchmark.command(quick=False, words=words)[-4:] == [*words, "--name", "hardware-told_facts"]
    assert benchmark.command(quick=True, words=words)[-4:] == [*words, "--name", "quick-told_facts"]
    ignored = subprocess.run(
        ["git", "check-ignore", "bench/results/models/hardware-told_facts.json"], cwd=ROOT, check=False,
        capture_output=True,
    )  # fmt: skip
    assert ignored.returncode == 0


@pytest.mark.parametrize("words", [("run", "csgo", "--threads", "2"), ("list", "csgo", "--threads", "2")])
def test_where_no_benchmark_uses_them_nothing_runs(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "none of these benchmarks uses --threads 2" in done.stderr or "are for `run`" in done.stderr


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, int, int, bool]]:
    """The models, positions, threads and flash attention of contexts; results go elsewhere."""
    found: list[tuple[str, int, int, bool]] = []
    init = Context.__init__

    def noted(self: Context, model: Model, **more: Any) -> None:
        init(self, model, **more)
        found.append((model.name, self.n_ctx, self.native.threads, self.spec.native.flash))

    monkeypatch.setattr(Context, "__init__", noted)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return found


def test_a_pair_is_opened_with_them(
    opened: list[tuple[str, int, int, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(told_facts, "CONVERSATIONS", told_facts.CONVERSATIONS[:1])
    words = ["--ctx-size", "512", "--threads", "1", "--threads", "draft=2", "--flash-attn", "verifier=on"]
    monkeypatch.setattr(sys, "argv", ["told_facts", *words, "--name", "hardware-told_facts"])
    told_facts.main()
    assert set(opened) == {("edgellm draft", 512, 2, False), ("edgellm verifier", 512, 1, True)}
    found = report.read("bench.models.told_facts", "hardware-told_facts")
    assert " ".join(words) in found["command"]


def test_a_single_model_is_loaded_with_them(
    opened: list[tuple[str, int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROWS", (1, 2))
    words = ["--models", "edgellm-draft", "--repeats", "1", "--threads", "2", "--flash-attn", "on"]
    monkeypatch.setattr(sys, "argv", ["rows", *words, "--cache-type", "q8_0"])
    rows.main()
    assert set(opened) == {("edgellm draft", 2 * rows.BEHIND, 2, True)}
