"""The Gantt chart of a run: whatever took less than a cell is seen, also at the end."""

from __future__ import annotations

import pytest

from edgellm.cli.views.timeline_view import gantt
from edgellm.coldstart.plan import PlannedStage, PlanOption
from edgellm.layer_range import LayerRange
from edgellm.llm.mesh_timeline import DeviceTimeline, Measured


@pytest.mark.parametrize("begin", [0.96, 0.97, 0.975, 0.99])
def test_a_short_computation_at_the_end_is_drawn(begin: float) -> None:
    end = begin + 0.001
    stage = PlannedStage("desktop", LayerRange(0, 12), 0.1, 0.8, 0.0, 0.9, 0.001, end, 1.0, "")
    option = PlanOption((stage,), 1.0, 0.01, 1.0)
    did = DeviceTimeline("desktop", LayerRange(0, 12), ((0.0, 0.1),), ((begin, end),), (0.9,))
    line, _legend = gantt(Measured(option, (did,)), None, 20)
    assert line.plain.startswith("desktop  run   ░")
    assert "█" in line.plain
