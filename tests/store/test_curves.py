"""Cost curves on disk: kept, read, forgotten; a damaged one is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.store.curves import forget_curve, keep_curve, read_curve


def test_what_was_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "curve.json"
    keep_curve(path, (1, 2, 4), (0.5, 0.75, 1.25), 0.125, (0.25, 0.5))
    assert read_curve(path) == ((1, 2, 4), (0.5, 0.75, 1.25), 0.125, (0.25, 0.5))
    forget_curve(path)
    forget_curve(path)
    assert read_curve(path) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[]",
        '{"rows": [1, 2]}',
        '{"rows": [1, 2], "seconds": [1.0], "change": 0, "heads": []}',
        '{"rows": [], "seconds": [], "change": 0, "heads": []}',
        '{"rows": [2, 4], "seconds": [1.0, 2.0], "change": 0, "heads": []}',
        '{"rows": [1, 4, 2], "seconds": [1.0, 2.0, 3.0], "change": 0, "heads": []}',
        '{"rows": [1, 2], "seconds": [1.0, 0.0], "change": 0, "heads": []}',
        '{"rows": [1, "x"], "seconds": [1.0, 2.0], "change": 0, "heads": []}',
        '{"rows": 1, "seconds": 2, "change": 0, "heads": []}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "heads": []}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": 0}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": 0, "heads": [0.0]}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": 0, "heads": [NaN]}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": -1, "heads": []}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": NaN, "heads": []}',
        '{"rows": [1, 2], "seconds": [1.0, 2.0], "change": Infinity, "heads": []}',
    ],
)
def test_a_damaged_curve_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(text)
    assert read_curve(path) is None


def test_where_it_cannot_be_kept_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    keep_curve(tmp_path / "file" / "curve.json", (1,), (1.0,), 0.0, ())
    forget_curve(tmp_path / "file" / "curve.json")
