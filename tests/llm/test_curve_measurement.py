"""What attention adds to decodes behind many positions is measured without reading as many."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.engine import Context, ContextSpec, Floats, Ids, Model
from edgellm.llm import cost_curves
from edgellm.llm.cost_curves import CurveMeasurement
from tests.conftest import Architectures

DEPTH, PREFIX = 512, 16


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Decodes take a millisecond, another for each row, and a microsecond for each row and position before it; return
    (rows, positions) of each."""
    clock, decodes, decode = [0.0], list[tuple[int, int]](), Context.decode

    def timed(self: Context, ids: Ids, **options: Any) -> Floats:
        decodes.append((len(ids), self.length()))
        clock[0] += 1e-3 + len(ids) * (1e-3 + 1e-6 * self.length())
        return decode(self, ids, **options)

    monkeypatch.setattr(Context, "decode", timed)
    monkeypatch.setattr(cost_curves, "perf_counter", lambda: clock[0])
    for limit in ("_MIN_SECONDS", "_MAX_SECONDS"):
        monkeypatch.setattr(cost_curves, limit, 100.0)
    return decodes


def test_a_row_takes_longer_for_each_position(architectures: Architectures, read: list[tuple[int, int]]) -> None:
    with (
        Model.load(architectures("qwen3"), faults=()) as model,
        Context(model, ContextSpec(n_ctx=DEPTH + PREFIX + 64, threads=1)) as context,
    ):
        curve = CurveMeasurement().run(context, depth=DEPTH)
    assert curve.attention == pytest.approx((0.0, 1e-6), abs=1e-8)
    assert {rows for rows, length in read if length == DEPTH + PREFIX} == {1, 16}


def test_where_a_cache_cannot_be_filled_it_is_left_out(
    architectures: Architectures, read: list[tuple[int, int]]
) -> None:
    with (
        Model.load(architectures("mamba2"), faults=()) as model,
        Context(model, ContextSpec(n_ctx=DEPTH + PREFIX + 64, threads=1)) as context,
    ):
        assert CurveMeasurement().run(context, depth=DEPTH).attention == (0.0, 0.0)
    assert max(length for _, length in read) < DEPTH
