"""The parcels that are in a stage, and which of them go through a block next.

One pass over a row of each of several sessions takes less time than a pass for each: the weights are read once. So the
oldest parcel that can move is batched with the other parcels that are there and fit; it never waits for more. Four
limits keep that from making things slower:

- Only parcels with the same number of rows, of adjacent sequences: llama.cpp computes others one after the other even
  within a batch, and then the first would only wait for the last.
- Enough rows in all for a batched pass to take less time: at least `Block.rows_that_pay`.
- At most `COMPANY_ROWS` in all: in longer passes a row costs the same, so the parts of prompts go by themselves.
- At most the number of active sessions divided by the number of stages. If all went together, one stage would compute,
  and the others would wait for it.

The parts of a prompt come all at once, and each takes as long as many tokens. So that no session's token waits for all
of them, a short parcel goes ahead of the next part whenever a part has gone through; then that part has its turn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edgellm.engine import Floats, Ids, Passage
from edgellm.mesh.messages import Parcel, StageSpec

COMPANY_ROWS = 64
"""Rows that several sessions have in one pass, at most (measured: `bench.mesh_company`)."""


@dataclass(slots=True, eq=False)
class Moving:
    """A parcel in this stage, whose `data` has gone through the first `at` blocks, in `seconds` seconds."""

    parcel: Parcel
    data: Ids | Floats
    at: int = 0
    seconds: float = 0.0

    def passed(self, data: Floats | None = None) -> None:
        """Record that the parcel has gone through one more block, with `data` as the output; None for the last one."""
        self.at += 1
        if data is not None:
            self.data = data

    def took(self, seconds: float) -> None:
        """Add the seconds of a pass, batched or not."""
        self.seconds += seconds

    @property
    def passage(self) -> Passage:
        """The input of the parcel's next block."""
        parcel = self.parcel
        return Passage(self.data, parcel.start, parcel.session, parcel.outputs)


class StageQueue:
    """Parcels in the order in which they came. The caller locks it."""

    def __init__(self, work: StageSpec) -> None:
        self._stages = work.stages
        self._line: deque[Moving] = deque()
        self._after_long = False  # whether the last parcel that went through was a long one
        self._lately: deque[int] = deque(maxlen=work.sessions)  # sessions of the latest parcels, runs merged

    def __len__(self) -> int:
        return len(self._line)

    @property
    def rows(self) -> int:
        """Positions of all parcels that are in the stage."""
        return sum(len(moving.data) for moving in self._line)

    def put(self, parcel: Parcel) -> None:
        self._line.append(Moving(parcel, parcel.data))
        if not self._lately or self._lately[-1] != parcel.session:
            self._lately.append(parcel.session)

    def leave(self, moving: Moving) -> None:
        """Remove a parcel that has gone through, or is given up."""
        self._after_long = not _short(moving)
        if moving in self._line:  # it may have been cleared
            self._line.remove(moving)

    def clear(self) -> None:
        self._line.clear()

    def next(self, blocks: int, least: int = 2) -> list[Moving]:
        """Return the parcels that go next through one of the first `blocks` blocks; empty if all must wait.

        The first of them goes alone if the group has fewer than `least` rows. No parcel overtakes another parcel of its
        session.
        """
        ready = self._ready(blocks)
        if not ready:
            return []
        first = next(filter(_short, ready), ready[0]) if self._after_long else ready[0]
        group = [first]
        alike = [one for one in ready if one.at == first.at and len(one.data) == len(first.data)]
        low = high = first.parcel.session
        for _ in range(1, min(COMPANY_ROWS // len(first.data), self._fair)):
            beside = next((one for one in alike if one.parcel.session in (low - 1, high + 1)), None)
            if beside is None:
                break
            group.append(beside)
            low, high = min(low, beside.parcel.session), max(high, beside.parcel.session)
        return group if len(group) * len(first.data) >= least else [first]

    def _ready(self, blocks: int) -> list[Moving]:
        """Return the parcels, oldest first, whose next block is loaded and clear of earlier parcels of the session."""
        ready, ahead = [], dict[int, int]()
        for moving in self._line:
            session = moving.parcel.session
            if moving.at < min(blocks, ahead.get(session, blocks)):
                ready.append(moving)
            ahead[session] = moving.at
        return ready

    @property
    def _fair(self) -> int:
        """The most sessions in one batch that leave some for every stage of the pipeline."""
        alive = {*self._lately, *(moving.parcel.session for moving in self._line)}
        return -(-len(alive) // self._stages)


def _short(moving: Moving) -> bool:
    """Return whether a parcel is not a part of a long prompt."""
    return len(moving.data) <= COMPANY_ROWS
