"""`bench`: the measurements of a checkout, behind one command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import coldstart, reliability, retrieval, synera
from bench.figures import FIGURES
from edgellm.cli.commands import bench
from edgellm.spec.drafters import verdict_prediction
from tests.cli.conftest import Done

Edge = Callable[..., Done]
ROOT = Path(__file__).parents[2]
SUITES = {
    "synera": synera.PARTS,
    "retrieval": retrieval.PARTS,
    "coldstart": coldstart.PARTS,
    "reliability": reliability.PARTS,
}


@pytest.mark.parametrize("suite", SUITES)
def test_every_part_is_listed(suite: str) -> None:
    command = [sys.executable, "-m", "edgellm", "bench", suite, "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert all(name in listed for name in SUITES[suite])


def test_every_part_is_a_benchmark_with_a_name_for_its_results() -> None:
    for part in (part for parts in SUITES.values() for part in parts.values()):
        place = ROOT / "bench" / part.kind
        source = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
        assert '"--name"' in source.read_text(encoding="utf-8")


def test_what_is_not_there_is_said(edge: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = edge("bench", "sinera")
    assert done.code == 2
    assert "Choose one of synera, retrieval, coldstart, reliability" in done.err
    assert edge("bench", "synera", "nonsense").code == 2
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    done = edge("bench", "synera")
    assert done.code == 2
    assert "no checkout" in done.err


def test_how_often_guesses_hit_is_what_was_measured() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "guesses.json").read_text(encoding="utf-8"))["rows"]
    (measured,) = (row["hits"] for row in rows if row["known"] == verdict_prediction.KNOWN)
    assert pytest.approx(measured, abs=0.006) == verdict_prediction.HITS


@pytest.mark.parametrize("kind", FIGURES)
def test_results_in_the_repository_can_be_drawn(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = ROOT / "bench" / "results" / f"{kind}.json"
    if not results.is_file():
        pytest.skip("not measured yet")
    drawn = FIGURES[kind](json.loads(results.read_text(encoding="utf-8")), tmp_path / "drawn.png")
    assert drawn is not None
    assert drawn.read_bytes().startswith(b"\x89PNG")
