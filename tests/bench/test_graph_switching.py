"""What `bench.coordgen.graph_switching` measures."""

from __future__ import annotations

import pytest

from bench.coordgen.graph_switching import HEAD, measured, table
from testkit.switching_instances import EXAMPLES


def test_what_is_measured_is_the_distance_from_the_optimum() -> None:
    ways = measured([EXAMPLES[0][1]], lambda _: 18.0)
    assert ways["synchronous"]["mean"] == pytest.approx(32 / 18 - 1)
    assert ways["beam"]["best"] == 1.0
    shown = table({"slowdowns": [{"slowdown": 1.25, "ways": ways}], "partition": ways, "large": ways})
    assert shown.startswith(HEAD)
    assert "77.78" in shown
