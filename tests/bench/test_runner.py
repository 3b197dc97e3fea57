"""The runner: a cheap run of it, what it refuses, and the rule by which a result is stale."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness import results
from bench.harness.catalogue import benchmarks
from bench.harness.children import Crashed, in_child
from bench.harness.depends import measured_files
from bench.harness.progress import track
from bench.harness.runner import main, run
from testkit import ROOT

FAST = ("csgo/exact", "csgo/paper")
NIGHTLY = ("synera/early_exit", "coordgen/acceptance", "robustness/json_schema", "mesh/kill_worker")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results go."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", [*FAST[:1], *(pytest.param(one, marks=pytest.mark.nightly) for one in FAST[1:] + NIGHTLY)]
)
def test_a_quick_run_writes_a_trial(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = benchmarks()[name]
    assert run(one, [], quick=True) == 0
    assert len(capsys.readouterr().out.splitlines()) > 1
    found = json.loads((folder / one.suite / f"trial-{one.name}.json").read_text())
    assert found["settings"].items() >= {**one.quick}.items()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found["commit"] == head.stdout.strip()


def test_a_run_as_declared_is_the_result_any_other_a_trial(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = replace(benchmarks()["csgo/exact"], settings={"instances": 1})
    assert run(one, [], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["instances"] == 1
    assert run(one, ["--seed", "3"]) == 0
    assert {path.name for path in (folder / "csgo").glob("*.json")} == {"exact.json", "trial-exact.json"}
    assert one.command(results.read("csgo", "exact")).split()[:5] == ["python", "-m", "bench", "run", "csgo/exact"]
    assert "--seed 3" in one.command(results.read("csgo", "trial-exact"))
    ignored = ["git", "check-ignore", "bench/results/csgo/trial-exact.json"]
    assert subprocess.run(ignored, cwd=ROOT, check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "say what to run"),
        (["show", "nonsense"], "there is no benchmark"),
        (["run", "csgo", "--threads", "2"], "none of these benchmarks uses --threads 2"),
        (["list", "csgo", "--threads", "2"], "settings are for `run`"),
        (["run", "csgo/exact", "--instances", "many"], "invalid int value"),
        (["run", "coordgen/speed", "--cache-type", "q2"], "q2"),
    ],
)
def test_what_cannot_be_run_is_said_beforehand(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_lists_and_results_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list", "csgo", "--json"])
    assert "csgo/paper" in json.loads(capsys.readouterr().out)
    main(["show", "csgo/paper", "--json"])
    assert json.loads(capsys.readouterr().out)["csgo/paper"]["ours"]
    with pytest.raises(SystemExit):
        main(["run", "csgo/exact", "--help"])
    shown = capsys.readouterr().out
    assert "Algorithm 1" in shown
    assert "fleets of each family" in shown


def test_a_result_is_stale_once_a_module_it_measures_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.setattr(results, "ROOT", tmp_path)
    measured, other = tmp_path / "measured.py", tmp_path / "other.py"
    for path in (measured, other):
        path.write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a")
    commit = git("rev-parse", "HEAD")
    other.write_text("2\n")
    assert results.changed_since(commit, ["measured.py"]) == []
    measured.write_text('"""What it is."""\n\n1  # and why\n')
    assert results.changed_since(commit, ["measured.py"]) == []
    measured.write_text("2\n")
    assert results.changed_since(commit, ["measured.py"]) == ["measured.py"]
    other.unlink()
    git("commit", "-qam", "b")
    assert results.changed_since(commit, ["measured.py", "other.py"]) == ["measured.py", "other.py"]
    assert results.changed_since("0" * 40, ["measured.py"]) is None
    assert results.date_of(commit) is not None


def test_what_a_benchmark_measures_is_what_it_and_its_helpers_import() -> None:
    names = measured_files("bench.csgo.exact")
    assert "edgellm/coldstart/exact_search.py" in names  # by itself
    assert not any(name.startswith("edgellm/spec") for name in names)
    assert "edgellm/coldstart/exact_search.py" in measured_files("bench.csgo.exact", "HEAD")
    helped = measured_files("bench.papers.two_filters")
    assert "edgellm/spec/gates/rules.py" in helped  # by bench.synera.quality
    assert "edgellm/engine/model.py" in measured_files(
        "bench.coordgen.acceptance"
    )  # of `from edgellm.engine import Model`


def test_a_child_that_crashes_says_how() -> None:
    assert in_child("os.path", "join", "a", "b") == "a/b"
    with pytest.raises(Crashed, match="exit code"):
        in_child("os", "abort")


def test_bars_stand_below_each_other_and_nothing_is_left_of_them() -> None:
    assert [[*track("ab", "inner")] for _ in track(range(2), "outer")] == [["a", "b"], ["a", "b"]]
    assert [*track(iter("abc"), "of known length", 3)] == ["a", "b", "c"]
