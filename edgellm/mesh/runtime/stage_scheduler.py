"""The parcels that are in a stage, and which of them go through a block next.

One pass over a row of each of several sessions takes less time than a pass for each: the weights are read once. So the
oldest parcel that can move takes along whoever is there and fits, and nobody is waited for. Four limits keep that from
making things slower:

- Parcels of equally many rows, of sequences that follow each other: others llama.cpp computes one after the other, also
  within a batch, and then the first would only wait for the last.
- Rows in all for which a pass does take less time: `Block.rows_that_pay` and more.
- `COMPANY_ROWS` in all at most: in longer passes a row costs the same, so the parts of prompts go by themselves.
- Of all sessions that are at work not more than their number divided by that of the stages. If all went together, one
  stage would compute, and the others would wait for it.

The parts of a prompt come all at once, and each takes as long as many tokens. So that nobody's token waits for all of
them, what is short goes ahead of the next part whenever one has gone through; and then that part's turn has come.
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
    """A parcel in this stage, whose `data` has gone through the first `at` blocks, in so many seconds."""

    parcel: Parcel
    data: Ids | Floats
    at: int = 0
    seconds: float = 0.0

    def passed(self, data: Floats | None = None) -> None:
        """It has gone through one more block, which has made `data` of it; None: the last one."""
        self.at += 1
        if data is not None:
            self.data = data

    def took(self, seconds: float) -> None:
        """That took so many seconds, in company or not."""
        self.seconds += seconds

    @property
    def passage(self) -> Passage:
        """What its next block is given."""
        parcel = self.parcel
        return Passage(self.data, parcel.start, parcel.session, parcel.outputs)


class StageQueue:
    """Parcels in the order in which they came. Whoever uses it holds a lock."""

    def __init__(self, work: StageSpec) -> None:
        self._stages = work.stages
        self._line: deque[Moving] = deque()
        self._after_long = False  # who went through last
        self._lately: deque[int] = deque(maxlen=work.sessions)  # whose parcels came, one after the other

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
        """It has gone through, or is given up."""
        self._after_long = not _short(moving)
        if moving in self._line:  # it may have been cleared
            self._line.remove(moving)

    def clear(self) -> None:
        self._line.clear()

    def next(self, blocks: int, least: int = 2) -> list[Moving]:
        """Who goes through one of the first so many blocks next; nobody: all must wait.

        The first of them goes alone where all together have fewer than `least` rows. No parcel overtakes another one of
        its session.
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
        """Those whose next block is there, and no earlier parcel of their session before it; the oldest first."""
        ready, ahead = [], dict[int, int]()
        for moving in self._line:
            session = moving.parcel.session
            if moving.at < min(blocks, ahead.get(session, blocks)):
                ready.append(moving)
            ahead[session] = moving.at
        return ready

    @property
    def _fair(self) -> int:
        """How many sessions may go together, so that every stage of the pipeline has some."""
        alive = {*self._lately, *(moving.parcel.session for moving in self._line)}
        return -(-len(alive) // self._stages)


def _short(moving: Moving) -> bool:
    """Whether it is no part of a long prompt."""
    return len(moving.data) <= COMPANY_ROWS
