"""The Gantt chart of a run: whatever took less than a cell is seen, also at the end."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from edgellm.cli.views.mesh_view import measured_chart, print_timeline
from edgellm.coldstart.phases import Move
from edgellm.coldstart.plan import PlannedStage, PlanOption
from edgellm.layer_range import HERE, LayerRange, StageShare
from edgellm.llm.mesh_timeline import DeviceTimeline, Measured, MeasuredMove


@pytest.mark.parametrize("begin", [0.96, 0.97, 0.975, 0.99])
def test_a_short_computation_at_the_end_is_drawn(begin: float) -> None:
    end = begin + 0.001
    stage = PlannedStage("desktop", LayerRange(0, 12), 0.1, 0.8, 0.0, 0.9, 0.001, end, 1.0, "")
    option = PlanOption((stage,), 1.0, 0.01, 1.0)
    did = DeviceTimeline("desktop", LayerRange(0, 12), ((0.0, 0.1),), ((begin, end),), (0.9,))
    line, _legend = measured_chart(Measured(option, (did,)), None, 20)
    assert line.plain.startswith("desktop  run   ░")
    assert "█" in line.plain


def test_a_reply_in_phases_shows_its_moves_beside_the_plan() -> None:
    planned = Move(((0, 12),), 2.0, 2.5, 40, 2.6)
    move = MeasuredMove((StageShare(HERE, LayerRange(0, 12)),), 43, 2.25, 2.75, 3.0, planned)
    console = Console(width=100, record=True, file=StringIO())
    plan = PlanOption((), 1.0, 0.02, 5.0)
    print_timeline(console, Measured(PlanOption((), 1.5, 0.02, 6.0), (), moves=(move,)), plan)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "44 (41) here 1-12 2.25 s (2.00 s) 2.75 s (2.50 s) 3.00 s (2.60 s)" in lines
    assert "last token 6.00 s (5.00 s)" in lines
