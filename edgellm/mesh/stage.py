"""A stage: consecutive layers of a model on one device, and the micro-batches for them.

A stage has two threads. One loads block after block. The other takes micro-batches through the blocks that are loaded:
as a rule the oldest that can move. So a later part of a prompt goes on in the lower blocks while an earlier part
waits for a block that is still loading (layer streaming; in CSGO's equation 18 a device computes nothing before all its
layers are loaded).

The parts of a prompt come all at once, and each takes as long as many tokens. So short micro-batches of other sessions
go first after each part of a prompt; then the next part follows. Each goes alone: rows do not depend on other replies.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from edgellm.engine import Block, ContextSpec, Floats, Ids, Model
from edgellm.errors import SAME_VERSION, EdgeError, EngineFailed, ModelCorrupt, ProtocolError
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import require
from edgellm.mesh.messages import MAX_ROWS, Event, Failed, MicroBatch, StageAnswer, StageLost, StageSpec, Took
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.protos.mesh_pb2 import StageLoaded
from edgellm.spec.verification import Judgement

_log = logging.getLogger(__name__)
MAX_QUEUED_ROWS = 4  # waiting rows per position of every session: abandoned micro-batches still pass through


SHORT_ROWS = 64
"""The most rows of a micro-batch that is no part of a long prompt."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A micro-batch in a stage since it `arrived`. Its `data` has gone through the first `at` blocks, in `seconds`
    seconds of passes."""

    batch: MicroBatch
    data: Ids | Floats
    arrived: float
    at: int = 0
    seconds: float = 0.0

    @property
    def short(self) -> bool:
        """Return whether the micro-batch has few rows, unlike a part of a long prompt."""
        return len(self.data) <= SHORT_ROWS

    def advance(self, data: Floats | None = None, seconds: float = 0.0) -> None:
        """Record a pass of `seconds` through one more block, with this output; None after the last block."""
        self.at, self.seconds = self.at + 1, self.seconds + seconds
        if data is not None:
            self.data = data


class StageQueue:
    """The micro-batches in a stage, in the order of their arrival. Not thread-safe."""

    def __init__(self) -> None:
        self._queue: deque[InFlight] = deque()
        self._after_long = False  # the last micro-batch that went through was long

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def rows(self) -> int:
        """Return the number of rows of all micro-batches in the stage."""
        return sum(len(entry.data) for entry in self._queue)

    def put(self, batch: MicroBatch) -> None:
        self._queue.append(InFlight(batch, batch.data, perf_counter()))

    def remove(self, entry: InFlight) -> None:
        """Remove a micro-batch that has gone through, or has failed."""
        self._after_long = not entry.short
        if entry in self._queue:  # it may have been cleared
            self._queue.remove(entry)

    def clear(self) -> None:
        self._queue.clear()

    def next(self, blocks: int) -> InFlight | None:
        """Return the micro-batch for the next pass through one of the first `blocks` blocks; None if all must wait.
        Micro-batches of a session stay in order."""
        ready, ahead = [], dict[int, int]()
        for entry in self._queue:
            session = entry.batch.session
            if entry.at < min(blocks, ahead.get(session, blocks)):
                ready.append(entry)
            ahead[session] = entry.at
        short = [entry for entry in ready if entry.short] if self._after_long else []
        return next(iter(short or ready), None)


@dataclass(frozen=True, slots=True)
class _Part:
    """A loaded block of a stage, and its last layer."""

    block: Block
    last: int


class Stage:
    """The layers of one `StageSpec`, loaded and computed. It calls `post` with every event, from its threads."""

    def __init__(self, work: StageSpec, cache: WeightCache, post: Callable[[Event], None]) -> None:
        """Reserve the memory that the stage needs until `close`. This may wait a moment for a stage that is closing.
        Raises LayersMissing: not all of the layers are on this device, or not without further layers; MemoryShort:
        there is no room for the weights, the caches and the batches."""
        model, self._files = require(cache.layers, work)
        self.work = work
        self._reservation = cache.reserve(work, model, self._files)
        self._cache, self._post = cache, post
        self._parts: list[_Part] = []
        self._queue = StageQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._steps = 0
        self._computing = 0.0  # seconds of passes since the last micro-batch with a request
        self._share = 0.0  # share of the file being loaded
        self._used = perf_counter()  # time of the last work
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=f"stage-{run.__name__}", daemon=True)
            for run in (self._load, self._compute)
        ]

    @property
    def progress(self) -> tuple[float, int]:
        """Layers loaded, with a fraction of the file being loaded; and passes done."""
        return self._loaded + self._share, self._steps

    @property
    def _loaded(self) -> int:
        return self._parts[-1].last + 1 - self.work.layers.start if self._parts else 0

    @property
    def idle(self) -> float:
        """Seconds since it last had something to do."""
        with self._changed:
            if self._queue or self._loaded < len(self.work.layers):
                return 0.0
            return perf_counter() - self._used

    def start(self) -> None:
        """Start to load and to compute."""
        for thread in self._threads:
            thread.start()

    def put(self, batch: MicroBatch) -> None:
        """Queue a micro-batch. Raises ProtocolError: the micro-batch does not fit this stage, or too many rows wait
        already."""
        check(batch, self.work)
        with self._changed:
            if self._queue.rows + len(batch.data) > MAX_QUEUED_ROWS * self.work.sessions * self.work.context:
                raise ProtocolError("The queue has more micro-batches than all sessions can use.", "Wait for answers.")
            self._queue.put(batch)
            self._changed.notify_all()

    def touch(self) -> None:
        """Reset the idle time: the stage is in use, although only other stages have something to do."""
        with self._changed:
            self._used = perf_counter()

    def close(self) -> None:
        """Wait for the pass and the load under way, and release everything."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for part in self._parts:
            part.block.close()
        self._parts = []
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
        def set_share(share: float) -> None:
            self._share = min(share, 0.999)

        for file in self._files:
            if self._closed:
                return
            block = self._block(self._cache.acquire(file, set_share), file.layers)
            with self._changed:
                self._parts.append(_Part(block, file.layers.last))
                self._share = 0.0
                self._used = perf_counter()
                self._changed.notify_all()
            self._post(StageLoaded(layers=self._loaded))

    def _block(self, model: Model, layers: LayerRange) -> Block:
        """Return a block that computes these layers, which `model` holds. Raise ModelCorrupt where it does not."""
        work = self.work
        if model.n_layer != len(layers):
            raise ModelCorrupt(
                f"The file with layers {layers} of {work.name} has {model.n_layer} layers.", "Deploy them again."
            )
        rows = max(MAX_ROWS + 1, work.sessions)
        spec = ContextSpec(work.context, work.sessions, rows, reproducible=work.reproducible)
        return Block(model, spec, head=layers.stop == work.n_layers, n_params=work.n_params)

    def _compute(self) -> None:
        while (entry := self._next()) is not None:
            self._step(entry)

    def _next(self) -> InFlight | None:
        """Wait for a micro-batch that can go through a block, and return it; None once the stage is closed."""
        with self._changed:
            while not self._closed:
                if (entry := self._queue.next(len(self._parts))) is not None:
                    return entry
                self._changed.wait()
            return None

    def _step(self, entry: InFlight) -> None:
        """Take a micro-batch through one block."""
        began, part, batch = perf_counter(), self._parts[entry.at], entry.batch
        try:
            rows = part.block.forward(entry.data, start=batch.start, seq=batch.session, outputs=batch.outputs)
        except EdgeError as error:
            self._remove(entry, Failed(batch.number, error))
            return
        self._steps += 1
        seconds = perf_counter() - began
        self._computing += seconds
        last = part.last == self.work.layers.last
        # The rows are copied, because the block reuses their memory before they have moved on.
        entry.advance(None if last else rows.copy(), seconds)
        if last:
            self._remove(entry, self._result(entry, rows))

    def _remove(self, entry: InFlight, event: Event | None) -> None:
        """Remove a micro-batch from the queue, and post its result, if there is one."""
        with self._changed:
            self._used = perf_counter()
            self._queue.remove(entry)
        if event is not None:
            self._post(event)

    def _result(self, entry: InFlight, rows: Floats) -> Event | None:
        """Return the event for a micro-batch that has gone through the last block.

        The last stage applies the verification rule, so that verdicts travel instead of rows of a large vocabulary.
        """
        batch, request, took = entry.batch, entry.batch.request, Took()
        if request is not None:
            took, self._computing = Took(perf_counter() - entry.arrived, self._computing), 0.0
        if not self.work.ends:
            return replace(batch, data=rows.copy(), took=took)
        if request is None:
            return None
        try:
            judgement = Judgement(request)
            # A stage gets a request for each further token, so the end of a turn does not matter here.
            judgement.judge(rows, len(request.draft), lambda _token: False)
        except EdgeError as error:
            return Failed(batch.number, error)
        verdict = replace(judgement.verdict(), seconds=entry.seconds)
        return StageAnswer(batch.number, verdict, rows.copy() if request.logits else None, took)


def check(batch: MicroBatch, work: StageSpec) -> None:
    """Check that the preceding stage may have sent a micro-batch. Raises ProtocolError: its session, position, shape,
    ids or values are invalid."""
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
