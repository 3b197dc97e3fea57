"""Cost curves on disk: kept and read; a damaged, impossible or old one is none, one of a busy machine is not kept."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine import Model
from edgellm.engine.cores import BUSY
from edgellm.llm import cost_curves
from edgellm.llm.cost_curves import ModelCurve, StoredCurve, estimated_curve, read_curve, write_curve
from edgellm.llm.idle_work import IdleWork
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.state import MONTH
from edgellm.storage.fingerprint import FileHash

KEPT = CostCurve((1, 2, 4), (0.5, 0.75, 1.25), 0.125, True, (0.25, 0.5))


def test_what_was_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "curve.json"
    write_curve(path, KEPT, "a chip")
    assert read_curve(path, "a chip") == KEPT
    assert read_curve(path, "another chip") is None


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [1, 2, 3], "seconds": [0.0013, 0.0008, 0.425]},  # measured while something else ran
        {"seconds": [0.5, 0.75, 300 * 1.25]},
        {"seconds": [300 * 0.5, 0.75, 1.25]},
        {"change": 300 * 0.125},
        {"taken": time.time() + 3600.0},
        {"taken": time.time() - MONTH - 1.0},
    ],
)
def test_a_curve_that_no_device_can_have_or_that_is_too_old_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "curve.json"
    stored = asdict(StoredCurve(KEPT, time.time(), "a chip"))
    for name, value in change.items():
        (stored if name in stored else stored["curve"])[name] = value
    path.write_text(json.dumps(stored))
    assert read_curve(path, "a chip") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"rows": [1, 2], "seconds": [1.0], "change": 0, "heads": []}',
        '{"rows": [], "seconds": [], "change": 0, "heads": []}',
        '{"rows": [2, 4], "seconds": [1.0, 2.0], "change": 0, "heads": []}',
        '{"rows": [1, 2], "seconds": [1.0, 0.0], "change": 0, "heads": []}',
        '{"rows": [1, "x"], "seconds": [1.0, 2.0], "change": 0, "heads": []}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": 0, "heads": [NaN]}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": Infinity, "heads": []}',
    ],
)
def test_a_damaged_curve_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(f'{{"curve": {text}, "taken": {time.time()}, "device": "a chip"}}')
    assert read_curve(path, "a chip") is None


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves of a busy machine are told apart, as outside the tests."""
    monkeypatch.setattr(cost_curves, "BUSY", BUSY)


class Waited:
    """A process that waited for a processor for this share of its time."""

    def __init__(self, share: float) -> None:
        self._share = share

    def share(self) -> float:
        return self._share


@pytest.mark.usefixtures("strict")
def test_what_is_measured_while_others_compute_is_not_kept(draft_path: Path, home: Path) -> None:
    with Model.load(draft_path, faults=()) as model:
        shares = [0.5, 0.0]
        curve = ModelCurve(model, 1, FileHash(draft_path), waiting=lambda: Waited(shares.pop(0)))
        curve.measure()
        assert not curve.measured
        assert not list((home / "cache" / "curves").glob("*"))
        assert curve.current() == estimated_curve(model), "nor used by replies"
        found = curve.measure()
        assert curve.measured
        assert curve.current() == found
        assert ModelCurve(model, 1, FileHash(draft_path)).measure() == found, "but read from the disk"


@pytest.mark.usefixtures("strict")
def test_what_is_not_kept_is_measured_again_later(
    draft_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, idle = [0.5, 0.0], IdleWork()
    with Model.load(draft_path, faults=()) as model:
        curve = ModelCurve(model, 1, FileHash(draft_path), idle, waiting=lambda: Waited(shares.pop(0)))
        for _ in range(2):  # the second time at once
            curve.current()
            idle.wait()
        assert not curve.measured
        monkeypatch.setattr(cost_curves, "AGAIN", 0.0)
        shares.insert(0, 0.5)
        curve.measure()
        curve.current()
        idle.wait()
        assert curve.measured
    assert shares == []
