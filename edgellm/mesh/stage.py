"""A stage: consecutive layers of a model on one device, and the queue of what waits for them.

Two threads. One loads block after block. The other takes parcels through the blocks that are there: as a rule the
oldest parcel that can move, so that a later part of a prompt goes on in the lower blocks while an earlier one waits for
a block that is still loading (layer streaming; CSGO's equation 18 lets a device do nothing before all is loaded); and
with it those of other sessions that are there, in one batch (`schedule` says which).

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

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from edgellm.engine import Block, Floats, Ids, Model, Passage
from edgellm.errors import EdgeError, EngineFailed, LayersMissing, ProtocolError
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import require
from edgellm.mesh.messages import (
    MOST_ROWS,
    Event,
    Failed,
    Forward,
    Loaded,
    MicroBatch,
    StageAnswer,
    StageLost,
    StageSpec,
    StageTrace,
    TraceSpan,
)
from edgellm.mesh.weight_cache import WeightCache
from edgellm.verifier.engine import judge_pass, verdict

COMPANY_ROWS = 64
"""Rows that several sessions have in one pass, at most (measured: `bench.mesh.micro_batching`)."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A parcel in this stage, whose `data` has gone through the first `at` blocks, in `seconds` seconds."""

    parcel: MicroBatch
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
        self._line: deque[InFlight] = deque()
        self._after_long = False  # whether the last parcel that went through was a long one
        self._lately: deque[int] = deque(maxlen=work.sessions)  # sessions of the latest parcels, runs merged

    def __len__(self) -> int:
        return len(self._line)

    @property
    def rows(self) -> int:
        """Positions of all parcels that are in the stage."""
        return sum(len(moving.data) for moving in self._line)

    def put(self, parcel: MicroBatch) -> None:
        self._line.append(InFlight(parcel, parcel.data))
        if not self._lately or self._lately[-1] != parcel.session:
            self._lately.append(parcel.session)

    def leave(self, moving: InFlight) -> None:
        """Remove a parcel that has gone through, or is given up."""
        self._after_long = not _short(moving)
        if moving in self._line:  # it may have been cleared
            self._line.remove(moving)

    def clear(self) -> None:
        self._line.clear()

    def next(self, blocks: int, least: int = 2) -> list[InFlight]:
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

    def _ready(self, blocks: int) -> list[InFlight]:
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


def _short(moving: InFlight) -> bool:
    """Return whether a parcel is not a part of a long prompt."""
    return len(moving.data) <= COMPANY_ROWS


_MERGED = 2e-3  # seconds: spans with a shorter gap between them are reported as one
_SPANS_MOST = 2048
ROWS_MOST = 4  # rows that may wait per position of every session: abandoned parcels still pass through


class Stage:
    """The layers of one `StageSpec`. `post` is called with every event, from the stage's threads."""

    def __init__(
        self, work: StageSpec, shelf: WeightCache, post: Callable[[Event], None], *, threads: int | None = None
    ) -> None:
        """Reserve the memory that the stage needs, until `close`; this may wait a moment. `start` begins to load.

        Raises:
            LayersMissing: not all of the layers are on this device.
            MemoryShort: there is no room for the weights, the caches and the batches.
        """
        require(shelf.layers, work)
        self.work = work
        self._lease = shelf.reserve(work)
        self._shelf, self._post, self._threads = shelf, post, threads
        self._blocks: list[Block] = []
        self._models: list[Model] = []
        self._ends: list[int] = []  # the last layer of each block
        self._line = StageQueue(work)
        self._spans: list[TraceSpan] = []
        self._news = threading.Condition()
        self._closed = False
        self._steps = 0
        self._share = 0.0
        self._began = perf_counter()
        self._used = self._began  # when it last had something to do
        self._loader = threading.Thread(target=self._guarded, args=(self._load,), name="stage-load", daemon=True)
        self._computer = threading.Thread(target=self._guarded, args=(self._compute,), name="stage", daemon=True)

    @property
    def progress(self) -> tuple[float, int, int]:
        """Layers loaded, the one under way as a fraction; passes through blocks; parcels waiting or being computed."""
        return self._loaded + self._share, self._steps, len(self._line)

    @property
    def _loaded(self) -> int:
        return self._ends[-1] + 1 - self.work.layers.start if self._ends else 0

    @property
    def clock(self) -> float:
        """Seconds since the stage was made."""
        return perf_counter() - self._began

    @property
    def idle(self) -> float:
        """Seconds since it last had something to do."""
        with self._news:
            if self._line or self._loaded < len(self.work.layers):
                return 0.0
            return perf_counter() - self._used

    def start(self) -> None:
        """Begin to load and to compute."""
        self._loader.start()
        self._computer.start()

    def put(self, parcel: MicroBatch) -> None:
        """Queue a parcel.

        Raises:
            ProtocolError: the parcel does not fit this stage, or too many rows wait already.
        """
        check(parcel, self.work)
        with self._news:
            if self._line.rows + len(parcel.data) > ROWS_MOST * self.work.sessions * self.work.context:
                raise ProtocolError("More parcels wait here than all sessions can use.", "Wait for answers.")
            self._line.put(parcel)
            now = self.clock
            self._note(TraceSpan("got", parcel.number, now, now), merge=False)
            self._news.notify_all()

    def touch(self) -> None:
        """Reset the idle time: the stage is in use although it has nothing to do, as other stages are at work."""
        with self._news:
            self._used = perf_counter()

    def tell(self, session: int) -> None:
        """Post the spans recorded since the last call, as `StageTrace`."""
        with self._news:
            spans, self._spans = tuple(self._spans), []
        self._post(StageTrace(session, spans, self.clock))

    def close(self) -> None:
        """Release everything, once nothing is being computed any more; a block being loaded is finished first."""
        with self._news:
            if self._closed:
                return
            self._closed = True
            self._line.clear()
            self._news.notify_all()
        for thread in (self._loader, self._computer):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        for block, model in zip(self._blocks, self._models, strict=True):
            block.close()
            self._shelf.give(model)
        self._blocks, self._models, self._ends = [], [], []
        self._lease.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run a thread's work, and post `StageLost` if it raises: any error ends the stage."""
        try:
            work()
        except EdgeError as error:
            self._post(StageLost(error))
        except Exception as error:  # noqa: BLE001 - it would go unreported otherwise
            self._post(StageLost(EngineFailed(f"The stage has failed: {error!r}.", "Report this.")))

    def _load(self) -> None:
        work, layer = self.work, self.work.layers.start
        while layer < work.layers.stop and not self._closed:
            begin = self.clock
            model = self._shelf.take(work.model, LayerRange(layer, work.layers.stop), self._sharing)
            try:
                block = self._block(model, layer)
            except BaseException:
                self._shelf.give(model)
                raise
            with self._news:
                self._blocks.append(block)
                self._models.append(model)
                self._ends.append(layer + model.n_layer - 1)
                self._share = 0.0
                self._note(TraceSpan("load", layer, begin, self.clock), merge=False)
                self._used = perf_counter()
                self._news.notify_all()
            self._post(Loaded(self._loaded, self.clock))
            layer += model.n_layer

    def _block(self, model: Model, layer: int) -> Block:
        """Return a block with the layers of one file, of which `layer` is the first."""
        work, piece = self.work, LayerRange(layer, layer + model.n_layer)
        if piece.stop > work.layers.stop:
            raise LayersMissing(
                f"Layers {piece} of {work.name} are one piece on this device, and the stage ends with layer"
                f" {work.layers.stop}.",
                "Split the model where its pieces end.",
            )
        return Block(
            model, head=piece.stop == work.n_layers, n_ctx=work.context, n_seq=work.sessions,
            rows=max(MOST_ROWS + 1, work.sessions), threads=self._threads,
        )  # fmt: skip

    def _sharing(self, share: float) -> None:
        self._share = min(share, 0.999)

    def _compute(self) -> None:
        while group := self._next():
            self._step(group)

    def _next(self) -> list[InFlight]:
        """Wait for parcels that can go through a block, and return them; return none once the stage is closed."""
        with self._news:
            while not self._closed:
                if self._blocks and (group := self._line.next(len(self._blocks), self._blocks[0].rows_that_pay)):
                    return group
                self._news.wait()
            return []

    def _step(self, group: list[InFlight]) -> None:
        """Take parcels through one block. If the batch fails, try each alone, to find the parcel at fault."""
        begin, at = self.clock, group[0].at
        try:
            found = self._blocks[at].forward_together([moving.passage for moving in group])
        except EdgeError as error:
            if len(group) == 1:
                self._leave(group[0], Failed(group[0].parcel.session, group[0].parcel.number, error))
                return
            for moving in group:
                self._step([moving])
            return
        self._steps += 1
        last = self._ends[at] == self.work.layers.last
        results: list[Event | None] = []
        for moving, rows in zip(group, found, strict=True):
            # a block returns rows in memory that it reuses, and not all of these parcels may move on at once
            moving.passed(None if last else rows.copy())
            if last:
                results.append(self._result(moving, rows, begin))
        end = self.clock
        for moving in group:
            moving.took(end - begin)
        with self._news:
            self._note(TraceSpan("compute", group[0].parcel.number, begin, end))
        for moving, result in zip(group, results, strict=False):
            self._leave(moving, result)

    def _leave(self, moving: InFlight, event: Event | None) -> None:
        """Remove a finished parcel from the queue, and post `event`, its result, if there is one."""
        with self._news:
            self._used = perf_counter()
            self._line.leave(moving)
        if event is not None:
            self._post(event)

    def _result(self, moving: InFlight, rows: Floats, begin: float) -> Event | None:
        """Return the event for a parcel that has gone through the last block, which it entered at `begin`.

        The last stage applies the verification rule itself: verdicts travel, not whole rows of a large vocabulary.
        """
        parcel, request = moving.parcel, moving.parcel.request
        if not self.work.ends:
            return Forward(replace(parcel, data=rows.copy()))
        if request is None:
            return None
        try:
            judge_pass(request, rows, len(request.draft), _never_asked)
        except EdgeError as error:
            return Failed(parcel.session, parcel.number, error)
        request.seconds = moving.seconds + self.clock - begin
        logits = rows.copy() if request.logits else None
        return StageAnswer(parcel.session, parcel.number, verdict(request), logits, self.clock)

    def _note(self, span: TraceSpan, merge: bool = True) -> None:
        """Record a span, merged with the one before where possible; the caller holds the lock."""
        before = self._spans[-1] if self._spans else None
        if merge and before is not None and before.kind == span.kind and span.begin - before.end < _MERGED:
            self._spans[-1] = replace(before, end=span.end)
        elif len(self._spans) < _SPANS_MOST:
            self._spans.append(span)


def _never_asked(_token: int) -> bool:
    """Return False: the end of a turn matters only for further tokens, each of which crosses the stages by itself."""
    return False


def check(parcel: MicroBatch, work: StageSpec) -> None:
    """Check that a parcel is one that the stage before could have sent.

    Raises:
        ProtocolError: its session, position, shape, ids or values are invalid.
    """
    data, n = parcel.data, len(parcel.data)
    if not 0 <= parcel.session < work.sessions:
        raise ProtocolError(f"There is no session {parcel.session}.", _UPDATE)
    if not 0 < n <= MOST_ROWS + 1 or not 0 <= parcel.start <= work.context - n:
        raise ProtocolError(f"A parcel holds {n} positions from {parcel.start} on.", _UPDATE)
    if parcel.outputs > n:
        raise ProtocolError(f"Of {n} positions {parcel.outputs} are to be judged.", _UPDATE)
    if work.layers.start == 0:
        if data.ndim != 1 or int(data.min()) < 0 or int(data.max()) >= work.n_vocab:
            raise ProtocolError("The first stage takes ids of the vocabulary, and has got something else.", _UPDATE)
    elif data.shape != (n, work.n_embd):
        raise ProtocolError(f"Rows have the shape {data.shape}, and not ({n}, {work.n_embd}).", _UPDATE)
    elif not np.isfinite(data).all():
        raise ProtocolError("Rows hold something that is no number.", "The model's file may be damaged: fetch it anew.")


_UPDATE = "Run the same version of edgellm on both sides."
