"""One device's part of the pipeline: a chain of blocks, the first of which compute while the last still load.

Two threads. One loads block after block. The other takes parcels through the blocks that are there: as a rule the
oldest parcel that can move, so that a later part of a prompt goes on in the lower blocks while an earlier one waits for
a block that is still loading (layer streaming; CSGO's equation 18 lets a device do nothing before all is loaded); and
with it those of other sessions that are there, in one batch (`mesh/runtime/stage_scheduler.py` says which).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np

from edgellm.engine import Block, Floats, Model
from edgellm.errors import EdgeError, EngineFailed, LayersMissing, ProtocolError
from edgellm.layer_range import LayerRange
from edgellm.mesh.messages import (
    MOST_ROWS,
    Event,
    Failed,
    Gone,
    Loaded,
    Onward,
    Parcel,
    StageAnswer,
    StageSpec,
    Times,
    TraceSpan,
)
from edgellm.mesh.runtime.layer_sources import require
from edgellm.mesh.runtime.stage_scheduler import Moving, StageQueue
from edgellm.mesh.runtime.weight_cache import Shelf
from edgellm.verifier.judging import judge_pass, verdict

_MERGED = 2e-3  # seconds: work that goes on after less than that is told as one piece
_SPANS_MOST = 2048
ROWS_MOST = 4  # that wait, for each position of every session: what was given up goes through all the same


class Stage:
    """The layers of one `StageSpec`. `post` is told of everything that happens, in threads of the stage."""

    def __init__(
        self, work: StageSpec, shelf: Shelf, post: Callable[[Event], None], *, threads: int | None = None
    ) -> None:
        """Nothing is loaded before `start`, but memory is set aside for it, until `close`. May wait a moment for that.

        Raises:
            LayersMissing: they are not all on this device.
            MemoryShort: there is no room for them, and for what they compute.
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
        """Layers loaded, the one under way included as a share; blocks computed; parcels that wait or are computed."""
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
        """Begins to load."""
        self._loader.start()
        self._computer.start()

    def put(self, parcel: Parcel) -> None:
        """Takes a parcel.

        Raises:
            ProtocolError: it is not what this stage takes.
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
        """It is in use, though it has nothing to do: other stages are at work."""
        with self._news:
            self._used = perf_counter()

    def tell(self, session: int) -> None:
        """Posts what was done since this was asked last."""
        with self._news:
            spans, self._spans = tuple(self._spans), []
        self._post(Times(session, spans, self.clock))

    def close(self) -> None:
        """Gives everything back. Returns when nothing is computed any more; what is being loaded is loaded first."""
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
        """Runs a thread's work; whatever ends it ends the stage."""
        try:
            work()
        except EdgeError as error:
            self._post(Gone(error))
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it
            self._post(Gone(EngineFailed(f"The stage has failed: {error!r}.", "Report this.")))

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
        """The layers of one file, of which `layer` is the first."""
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

    def _next(self) -> list[Moving]:
        """The parcels that go through a block next, once there are any; none at the end."""
        with self._news:
            while not self._closed:
                if self._blocks and (group := self._line.next(len(self._blocks), self._blocks[0].rows_that_pay)):
                    return group
                self._news.wait()
            return []

    def _step(self, group: list[Moving]) -> None:
        """Takes parcels through one block. Where they cannot go together, each is tried alone: one is to blame."""
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
            # a block shows rows in memory that it uses again, and not all may go on at once
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

    def _leave(self, moving: Moving, event: Event | None) -> None:
        """A parcel is done with, and `event` is what comes of it."""
        with self._news:
            self._used = perf_counter()
            self._line.leave(moving)
        if event is not None:
            self._post(event)

    def _result(self, moving: Moving, rows: Floats, begin: float) -> Event | None:
        """What comes of a parcel that has gone through the last block, which it entered at `begin`.

        At the last stage that is the rule: verdicts travel, and not whole rows of a large vocabulary.
        """
        parcel, request = moving.parcel, moving.parcel.request
        if not self.work.ends:
            return Onward(replace(parcel, data=rows.copy()))
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
        """Remembers what was done; the lock is held."""
        before = self._spans[-1] if self._spans else None
        if merge and before is not None and before.kind == span.kind and span.begin - before.end < _MERGED:
            self._spans[-1] = replace(before, end=span.end)
        elif len(self._spans) < _SPANS_MOST:
            self._spans.append(span)


def _never_asked(_token: int) -> bool:
    """Whether a turn ends matters for further tokens alone, and those cross all stages by themselves."""
    return False


def check(parcel: Parcel, work: StageSpec) -> None:
    """Refuses what the stage before would not send.

    Raises:
        ProtocolError: a session, shape, id or number that cannot be meant.
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
