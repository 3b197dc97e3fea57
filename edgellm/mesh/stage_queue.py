"""The micro-batches that wait in a stage, and which of them go through its blocks together.

A pass over a row of each of several sessions reads the weights once, so waiting micro-batches of other sessions join
the oldest micro-batch in its pass, which never waits for them. Four limits keep that from making things slower:

- All micro-batches of a pass have the same number of rows, and belong to adjacent sequences: llama.cpp computes others
  one after the other even within a batch.
- They have enough rows in all for a common pass to take less time (`Block.rows_that_pay`), and at most `SHARED_ROWS`.
- They are at most the number of active sessions divided by the number of stages. If all sessions were in one pass, one
  stage would compute while the others wait for it.

The parts of a prompt come all at once, and each takes as long as many tokens. So short micro-batches go first after
each part of a prompt; then the next part follows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edgellm.engine import BlockRows, Floats, Ids
from edgellm.mesh.messages import MicroBatch, StageSpec

SHARED_ROWS = 64
"""The most rows of several sessions in one pass (measured by `bench.mesh.micro_batching`)."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A micro-batch in a stage. Its `data` has gone through the first `at` blocks, in `seconds` seconds of passes."""

    batch: MicroBatch
    data: Ids | Floats
    at: int = 0
    seconds: float = 0.0

    @property
    def short(self) -> bool:
        """Return whether the micro-batch has few rows, unlike a part of a long prompt."""
        return len(self.data) <= SHARED_ROWS

    @property
    def passage(self) -> BlockRows:
        """Return the input of the micro-batch's next block."""
        return BlockRows(self.data, self.batch.start, self.batch.session, self.batch.outputs)

    def advance(self, data: Floats | None = None, seconds: float = 0.0) -> None:
        """Record a pass of `seconds` through one more block, with this output; None after the last block."""
        self.at, self.seconds = self.at + 1, self.seconds + seconds
        if data is not None:
            self.data = data


class StageQueue:
    """The micro-batches in a stage, in the order of their arrival. Not thread-safe."""

    def __init__(self, work: StageSpec) -> None:
        self._stages = work.stages
        self._queue: deque[InFlight] = deque()
        self._after_long = False  # the last micro-batch that went through was long
        self._recent: deque[int] = deque(maxlen=work.sessions)  # sessions of the latest micro-batches, runs merged

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def rows(self) -> int:
        """Return the number of rows of all micro-batches in the stage."""
        return sum(len(entry.data) for entry in self._queue)

    def put(self, batch: MicroBatch) -> None:
        self._queue.append(InFlight(batch, batch.data))
        if not self._recent or self._recent[-1] != batch.session:
            self._recent.append(batch.session)

    def remove(self, entry: InFlight) -> None:
        """Remove a micro-batch that has gone through, or has failed."""
        self._after_long = not entry.short
        if entry in self._queue:  # it may have been cleared
            self._queue.remove(entry)

    def clear(self) -> None:
        self._queue.clear()

    def next(self, blocks: int, least: int = 2) -> list[InFlight]:
        """Return the micro-batches for the next pass through one of the first `blocks` blocks; none if all must wait.

        The first of them goes alone if the group has fewer than `least` rows. Micro-batches of a session stay in order.
        """
        ready = self._ready(blocks)
        if not ready:
            return []
        first = ready[0]
        if self._after_long:
            first = next((entry for entry in ready if entry.short), first)
        group = [first]
        alike = [one for one in ready if one.at == first.at and len(one.data) == len(first.data)]
        low = high = first.batch.session
        for _ in range(1, min(SHARED_ROWS // len(first.data), self._group_most)):
            beside = next((one for one in alike if one.batch.session in (low - 1, high + 1)), None)
            if beside is None:
                break
            group.append(beside)
            low, high = min(low, beside.batch.session), max(high, beside.batch.session)
        return group if len(group) * len(first.data) >= least else [first]

    def _ready(self, blocks: int) -> list[InFlight]:
        """Return the micro-batches, oldest first, whose next block is loaded and free for the session."""
        ready, ahead = [], dict[int, int]()
        for entry in self._queue:
            session = entry.batch.session
            if entry.at < min(blocks, ahead.get(session, blocks)):
                ready.append(entry)
            ahead[session] = entry.at
        return ready

    @property
    def _group_most(self) -> int:
        """Return the most sessions in one pass, so that every stage of the pipeline has some."""
        alive = {*self._recent, *(entry.batch.session for entry in self._queue)}
        return -(-len(alive) // self._stages)
