"""Cost curves on disk: kept and read; a damaged, impossible or old one is none."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from edgellm.llm.cost_curves import MAX_AGE, StoredCurve, read_curve, write_curve
from edgellm.storage.device_speed import MAX_DOUBTFUL_AGE

KEPT = StoredCurve((1, 2, 4), (0.5, 0.75, 1.25), 0.125, (0.25, 0.5), time.time(), 0.0, "a chip", (0.0, 1e-6))


def test_what_was_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "curve.json"
    write_curve(path, KEPT)
    assert read_curve(path, "a chip") == KEPT
    assert read_curve(path, "another chip") is None


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [1, 2, 3], "seconds": [0.0013, 0.0008, 0.425]},  # measured while something else ran
        {"seconds": [0.5, 300 * 0.75, 1.25]},
        {"seconds": [0.5, 0.75, 300 * 1.25]},
        {"seconds": [0.5, 0.75 / 300, 1.25]},
        {"seconds": [0.5, 0.75, 1.25 / 300]},
        {"seconds": [300 * 0.5, 0.75, 1.25]},
        {"change": 300 * 0.125},
        {"taken": time.time() + 3600.0},
        {"taken": time.time() - MAX_AGE - 1.0},
        {"taken": time.time() - MAX_DOUBTFUL_AGE - 1.0, "waited": 0.5},
    ],
)
def test_a_curve_that_no_device_can_have_or_that_is_too_old_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(asdict(KEPT) | change))
    assert read_curve(path, "a chip") is None


def test_a_doubtful_curve_is_used_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    write_curve(path, replace(KEPT, taken=time.time(), waited=0.5))
    kept = read_curve(path, "a chip")
    assert kept is not None
    assert kept.doubtful


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        '{"rows": [1, 2]}',
        '{"rows": [1, 2], "seconds": [1.0], "change": 0, "heads": [], REST}',
        '{"rows": [], "seconds": [], "change": 0, "heads": [], REST}',
        '{"rows": [2, 4], "seconds": [1.0, 2.0], "change": 0, "heads": [], REST}',
        '{"rows": [1, 4, 2], "seconds": [1.0, 2.0, 3.0], "change": 0, "heads": [], REST}',
        '{"rows": [1, 2], "seconds": [1.0, 0.0], "change": 0, "heads": [], REST}',
        '{"rows": [1, "x"], "seconds": [1.0, 2.0], "change": 0, "heads": [], REST}',
        '{"rows": 1, "seconds": 2, "change": 0, "heads": [], REST}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "heads": []}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": 0, REST}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": 0, "heads": [0.0], REST}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": 0, "heads": [NaN], REST}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": -1, "heads": [], REST}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": NaN, "heads": [], REST}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": Infinity, "heads": [], REST}',
    ],
)
def test_a_damaged_curve_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(text.replace("REST", f'"taken": {time.time()}, "waited": 0, "device": "a chip"'))
    assert read_curve(path, "a chip") is None


def test_where_it_cannot_be_kept_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    write_curve(tmp_path / "file" / "curve.json", KEPT)
