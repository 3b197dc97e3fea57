"""`before_after` runs the benchmarks of two checkouts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from bench.engine.before_after import PARTS


def test_a_part_is_told_of_the_other_checkout_where_it_is_run_from_here(tmp_path: Path) -> None:
    assert PARTS["start"].command(tmp_path)[:3] == ["bench.engine.start_up", "--checkout", str(tmp_path)]
    assert str(tmp_path) not in PARTS["decode"].command(tmp_path)


def test_no_benchmarks_of_this_checkout_stand_before_those_of_another_one() -> None:
    """A package with an `__init__.py` comes before one without, wherever it is on the path."""
    found = importlib.util.find_spec("bench")
    assert found is not None
    assert found.origin is None
