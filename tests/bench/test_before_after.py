"""`before_after` compares two checkouts, also with one of before the benchmarks were packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from bench.engine.before_after import PARTS
from testkit import ROOT


def test_a_part_is_run_as_the_checkout_calls_it(tmp_path: Path) -> None:
    assert PARTS["decode"].command(ROOT)[0] == "bench.engine.decode_loop"
    assert PARTS["decode"].command(tmp_path)[0] == "bench.decode_loop"
    assert "--out" in PARTS["decode"].command(tmp_path)
    assert PARTS["gate"].command(tmp_path)[0] == "bench.gate_cost"


def test_no_benchmarks_of_this_checkout_stand_before_those_of_another_one() -> None:
    """A package with an `__init__.py` comes before one without, wherever it is on the path."""
    found = importlib.util.find_spec("bench")
    assert found is not None
    assert found.origin is None
