"""A stage: consecutive layers of a model on one device, and the micro-batches for them.

A stage has two threads. One loads block after block. The other takes micro-batches through the blocks that are loaded:
as a rule the oldest that can move. So a later part of a prompt goes on in the lower blocks while an earlier part
waits for a block that is still loading (layer streaming; in CSGO's equation 18 a device computes nothing before all its
layers are loaded).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np

from edgellm.engine import Block, Floats, LayerRows, Model
from edgellm.errors import SAME_VERSION, EdgeError, EngineFailed, ModelCorrupt, ProtocolError
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import require
from edgellm.mesh.messages import (
    MAX_CACHE_BYTES,
    MAX_ROWS,
    CacheTaken,
    CacheWanted,
    Event,
    Failed,
    Forward,
    LayerCache,
    Loaded,
    MicroBatch,
    Order,
    StageAnswer,
    StageLost,
    StageSpec,
    StageTrace,
    TraceSpan,
    TraceWanted,
)
from edgellm.mesh.stage_queue import InFlight, StageQueue
from edgellm.mesh.weight_cache import WeightCache
from edgellm.verifier.judgement import Judgement

_log = logging.getLogger(__name__)
_MERGED = 2e-3  # seconds: spans with a shorter gap between them are reported as one
_MAX_SPANS = 2048
MAX_QUEUED_ROWS = 4  # waiting rows per position of every session: abandoned micro-batches still pass through


class Stage:
    """The layers of one `StageSpec`, loaded and computed. It calls `post` with every event, from its threads."""

    def __init__(self, work: StageSpec, cache: WeightCache, post: Callable[[Event], None]) -> None:
        """Reserve the memory that the stage needs until `close`. This may wait a moment for a stage that is closing.

        Raises:
            LayersMissing: not all of the layers are on this device, or not without further layers.
            MemoryShort: there is no room for the weights, the caches and the batches.
        """
        model, self._files = require(cache.layers, work)
        self.work = work
        self._reservation = cache.reserve(work, model, self._files)
        self._cache, self._post = cache, post
        self._blocks: list[Block] = []
        self._models: list[Model] = []
        self._ends: list[int] = []  # the last layer of each block
        self._queue = StageQueue(work)
        self._spans: list[TraceSpan] = []
        self._taken: dict[int, dict[int, LayerRows]] = {}  # arrived layers' keys and values, by session
        self._changed = threading.Condition()
        self._passing = threading.Lock()  # held while a block computes, or its cache is read or written
        self._closed = False
        self._steps = 0
        self._share = 0.0
        self._began = perf_counter()
        self._used = self._began  # time of the last work
        self._loader = threading.Thread(target=self._run, args=(self._load,), name="stage-load", daemon=True)
        self._computer = threading.Thread(target=self._run, args=(self._compute,), name="stage", daemon=True)

    @property
    def progress(self) -> tuple[float, int, int]:
        """Layers loaded, with a fraction of the file being loaded; passes done; micro-batches in the stage."""
        return self._loaded + self._share, self._steps, len(self._queue)

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
        with self._changed:
            if self._queue or self._loaded < len(self.work.layers):
                return 0.0
            return perf_counter() - self._used

    def start(self) -> None:
        """Start to load and to compute."""
        self._loader.start()
        self._computer.start()

    def take(self, order: Order) -> None:
        """Carry out an order. Raises ProtocolError for an invalid order."""
        if isinstance(order, MicroBatch):
            self.put(order)
        elif isinstance(order, TraceWanted):
            self._post_trace(order.session)
        elif isinstance(order, CacheWanted):
            self._give_cache(order.session, order.positions)
        elif isinstance(order, LayerCache):
            self._take_cache(order)

    def put(self, batch: MicroBatch) -> None:
        """Queue a micro-batch.

        Raises:
            ProtocolError: the micro-batch does not fit this stage, or too many rows wait already.
        """
        check(batch, self.work)
        with self._changed:
            if self._queue.rows + len(batch.data) > MAX_QUEUED_ROWS * self.work.sessions * self.work.context:
                raise ProtocolError("The queue has more micro-batches than all sessions can use.", "Wait for answers.")
            self._queue.put(batch)
            now = self.clock
            self._record(TraceSpan("got", batch.number, now, now), merge=False)
            self._changed.notify_all()

    def touch(self) -> None:
        """Reset the idle time: the stage is in use, although only other stages have something to do."""
        with self._changed:
            self._used = perf_counter()

    def _post_trace(self, session: int) -> None:
        """Post the spans recorded since the last call, as a `StageTrace`."""
        with self._changed:
            spans, self._spans = tuple(self._spans), []
        self._post(StageTrace(session, spans, self.clock))

    def _give_cache(self, session: int, positions: int) -> None:
        """Post the keys and values of every layer for a session's first positions, each as a `LayerCache`; without rows
        if they are not there, or too large to be sent.

        Raises:
            ProtocolError: there is no such session, or it cannot have so many positions.
        """
        self._check_cache(session, positions)
        with self._changed:
            blocks, first = list(self._blocks), self.work.layers.start
        complete = self._loaded == len(self.work.layers)
        for block in blocks if complete else ():
            with self._passing:
                layers = None if self._closed else block.layer_rows(positions, session)
            if layers is None or max(layer.size for layer in layers) > MAX_CACHE_BYTES:
                break
            for layer in layers:
                self._post(LayerCache(session, first, layer))
                first += 1
        if first < self.work.layers.stop:
            self._post(LayerCache(session, first, None))

    def _take_cache(self, cache: LayerCache) -> None:
        """Keep the keys and values of a layer; once all layers' are there, replace the session's cache by them, and
        post `CacheTaken`.

        Raises:
            ProtocolError: they are of no layer of this stage.
        """
        if cache.rows is None or cache.layer not in self.work.layers:
            raise ProtocolError(f"Layer {cache.layer} is not one of this stage, or has no cache.", SAME_VERSION)
        self._check_cache(cache.session, positions := cache.rows.positions)
        with self._changed:
            layers = self._taken.setdefault(cache.session, {})
            layers[cache.layer] = cache.rows
            if len(layers) < len(self.work.layers):
                return
            del self._taken[cache.session]
        alike = all(rows.positions == positions for rows in layers.values())
        self._post(CacheTaken(cache.session, positions if alike and self._adopted(cache.session, layers) else 0))

    def _adopted(self, session: int, layers: dict[int, LayerRows]) -> bool:
        """Return whether all blocks have taken these keys and values."""
        first = self.work.layers.start
        if self._loaded < len(self.work.layers):
            return False
        for block, last in zip(self._blocks, self._ends, strict=True):
            with self._passing:
                if self._closed or not block.adopt([layers[at] for at in range(first, last + 1)], session):
                    return False
            first = last + 1
        return True

    def _check_cache(self, session: int, positions: int) -> None:
        if not 0 <= session < self.work.sessions or not 0 < positions <= self.work.context:
            raise ProtocolError(f"Session {session} has no cache of {positions} positions.", SAME_VERSION)

    def close(self) -> None:
        """Wait for the pass and the load under way, and release everything."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in (self._loader, self._computer):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        with self._passing:
            for block, model in zip(self._blocks, self._models, strict=True):
                block.close()
                self._cache.give_back(model)
            self._blocks, self._models, self._ends = [], [], []
        self._reservation.close()

    def _run(self, work: Callable[[], None]) -> None:
        """Run a thread's work. Post `StageLost` if it raises: any error ends the stage."""
        try:
            work()
        except EdgeError as error:
            self._post(StageLost(error))
        except Exception as error:  # noqa: BLE001 - it would go unreported otherwise
            _log.exception("the stage with %s of %s", self.work.layers.named, self.work.name)
            self._post(StageLost(EngineFailed(f"The stage has failed: {error!r}.", "Report this.")))

    def _load(self) -> None:
        for file in self._files:
            if self._closed:
                return
            begin = self.clock
            model = self._cache.acquire(file, self._set_share)
            try:
                block = self._block(model, file.layers)
            except BaseException:
                self._cache.give_back(model)
                raise
            with self._changed:
                self._blocks.append(block)
                self._models.append(model)
                self._ends.append(file.layers.last)
                self._share = 0.0
                self._record(TraceSpan("load", file.layers.start, begin, self.clock), merge=False)
                self._used = perf_counter()
                self._changed.notify_all()
            self._post(Loaded(self._loaded, self.clock))

    def _block(self, model: Model, layers: LayerRange) -> Block:
        """Return a block that computes these layers, which `model` holds.

        Raises:
            ModelCorrupt: the model has another number of layers.
        """
        work = self.work
        if model.n_layer != len(layers):
            raise ModelCorrupt(
                f"The file with layers {layers} of {work.name} has {model.n_layer} layers.", "Deploy them again."
            )
        return Block(
            model, head=layers.stop == work.n_layers, n_ctx=work.context, n_seq=work.sessions,
            rows=max(MAX_ROWS + 1, work.sessions),
        )  # fmt: skip

    def _set_share(self, share: float) -> None:
        self._share = min(share, 0.999)

    def _compute(self) -> None:
        while group := self._next():
            self._step(group)

    def _next(self) -> list[InFlight]:
        """Wait for micro-batches that can go through a block, and return them; none once the stage is closed."""
        with self._changed:
            while not self._closed:
                if self._blocks and (group := self._queue.next(len(self._blocks), self._blocks[0].rows_that_pay)):
                    return group
                self._changed.wait()
            return []

    def _step(self, group: list[InFlight]) -> None:
        """Take micro-batches through one block. If the pass fails, try each alone to find the micro-batch at fault."""
        begin, at = self.clock, group[0].at
        try:
            with self._passing:
                found = self._blocks[at].forward_together([entry.passage for entry in group])
        except EdgeError as error:
            if len(group) == 1:
                self._remove(group[0], Failed(group[0].batch.session, group[0].batch.number, error))
                return
            for entry in group:
                self._step([entry])
            return
        self._steps += 1
        last = self._ends[at] == self.work.layers.last
        results: list[Event | None] = []
        for entry, rows in zip(group, found, strict=True):
            # The rows are copied, because the block reuses their memory before all of them have moved on.
            entry.advance(None if last else rows.copy())
            if last:
                results.append(self._result(entry, rows, begin))
        end = self.clock
        for entry in group:
            entry.add_seconds(end - begin)
        with self._changed:
            self._record(TraceSpan("compute", group[0].batch.number, begin, end))
        for entry, result in zip(group, results, strict=False):
            self._remove(entry, result)

    def _remove(self, entry: InFlight, event: Event | None) -> None:
        """Remove a micro-batch from the queue, and post its result, if there is one."""
        with self._changed:
            self._used = perf_counter()
            self._queue.remove(entry)
        if event is not None:
            self._post(event)

    def _result(self, entry: InFlight, rows: Floats, begin: float) -> Event | None:
        """Return the event for a micro-batch that has gone through the last block, in a pass that began at `begin`.

        The last stage applies the verification rule, so that verdicts travel instead of rows of a large vocabulary.
        """
        batch, request = entry.batch, entry.batch.request
        if not self.work.ends:
            return Forward(replace(batch, data=rows.copy()))
        if request is None:
            return None
        try:
            judgement = Judgement(request)
            judgement.judge(rows, len(request.draft), _never_asked)
        except EdgeError as error:
            return Failed(batch.session, batch.number, error)
        verdict = replace(judgement.verdict(), seconds=entry.seconds + self.clock - begin)
        logits = rows.copy() if request.logits else None
        return StageAnswer(batch.session, batch.number, verdict, logits, self.clock)

    def _record(self, span: TraceSpan, merge: bool = True) -> None:
        """Record a span, merged with the last span where possible. The caller holds the lock."""
        before = self._spans[-1] if self._spans else None
        if merge and before is not None and before.kind == span.kind and span.begin - before.end < _MERGED:
            self._spans[-1] = replace(before, end=span.end)
        elif len(self._spans) < _MAX_SPANS:
            self._spans.append(span)


def _never_asked(_token: int) -> bool:
    """Return False: the end of a turn matters only for further tokens, and a stage gets a request for each."""
    return False


def check(batch: MicroBatch, work: StageSpec) -> None:
    """Check that the preceding stage may have sent a micro-batch.

    Raises:
        ProtocolError: its session, position, shape, ids or values are invalid.
    """
    data, n = batch.data, len(batch.data)
    if not 0 <= batch.session < work.sessions:
        raise ProtocolError(f"There is no session {batch.session}.", SAME_VERSION)
    if not 0 < n <= MAX_ROWS + 1 or not 0 <= batch.start <= work.context - n:
        raise ProtocolError(f"A micro-batch has {n} positions from {batch.start} on.", SAME_VERSION)
    if batch.outputs > n:
        raise ProtocolError(f"A micro-batch requests outputs at {batch.outputs} of {n} positions.", SAME_VERSION)
    if work.layers.start == 0:
        if data.ndim != 1 or int(data.min()) < 0 or int(data.max()) >= work.n_vocab:
            raise ProtocolError("The first stage needs token ids of the vocabulary.", SAME_VERSION)
    elif data.shape != (n, work.n_embd):
        raise ProtocolError(f"Rows have the shape {data.shape} instead of ({n}, {work.n_embd}).", SAME_VERSION)
    elif not np.isfinite(data).all():
        raise ProtocolError("Rows contain NaN or infinity.", "The model's file may be damaged: pull it again.")
