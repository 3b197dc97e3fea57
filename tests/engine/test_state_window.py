"""The states of a text's latest positions are those that were added last."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine.speculators.speculator import StateWindow


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=40))
def test_a_window_has_the_latest_states_without_a_gap(steps: list[tuple[int, int]]) -> None:
    """A single state is copied from where its two parts are, if there is room for it."""
    window, known, end, clock = StateWindow(2, window=8), dict[int, float](), 0, 0.0
    for back, n in steps:
        start = max(0, end - back)
        window.truncate(start)
        known = {at: value for at, value in known.items() if at < start}
        rows = np.repeat(np.arange(clock, clock + n, dtype=np.float32)[:, None], 2, axis=1)
        address = rows.ctypes.data
        if n > 1 or not window.add_row(start, (address, address + rows.itemsize)):
            window.add(start, rows)
        known |= dict(enumerate(rows[:, 0].tolist(), start))
        end, clock = start + n, clock + n
        assert window.end == end
        assert window.end - window.first >= min(n, 8)
        for part in (0, 1):
            assert window.of(window.first, end)[:, part].tolist() == [known[at] for at in range(window.first, end)]
