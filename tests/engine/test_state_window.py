"""The states of a text's latest positions are those that were added last."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine.speculators.state_window import StateWindow


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=40))
def test_a_window_has_the_latest_states_without_a_gap(steps: list[tuple[int, int]]) -> None:
    window, known, end, clock = StateWindow(1, window=8), dict[int, float](), 0, 0.0
    for back, n in steps:
        start = max(0, end - back)
        window.truncate(start)
        known = {at: value for at, value in known.items() if at < start}
        rows = np.arange(clock, clock + n, dtype=np.float32)[:, None]
        window.add(start, rows)
        known |= dict(enumerate(rows[:, 0].tolist(), start))
        end, clock = start + n, clock + n
        assert window.end == end
        assert window.end - window.first >= min(n, 8)
        assert window.of(window.first, end)[:, 0].tolist() == [known[at] for at in range(window.first, end)]
