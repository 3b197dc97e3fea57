"""The cost curve of a model on this device: an estimate at first, then measured while nothing waits for it; and such
work in the background, while no reply is written.

A measurement during which other programs took the processor is not kept: a curve counts for 30 days, and a decode of
two rows that once took three times as long as a single row would end all drafting. The next reply repeats the
measurement.
"""

import logging
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic, perf_counter, time
from typing import TypeAlias

import numpy as np

from edgellm import __version__
from edgellm.engine import Context, ContextSpec, Model, ShouldStop, never
from edgellm.engine.cores import BUSY, CpuWait, minimum_times, plausible_times
from edgellm.engine.native import Stop, default_threads, release_threads
from edgellm.errors import Stopped
from edgellm.spec.drafting.cost_curve import KNOTS, ROW_TILE, WITNESSES, CostCurve, DecodeCost
from edgellm.state import MONTH, from_json, read_cached, write_cached
from edgellm.storage.chat_log import History
from edgellm.storage.fingerprint import FileHash
from edgellm.system import cache_dir, processor

AGAIN = 60.0
"""Seconds after a measurement on a busy machine before the next one."""
_PREFIX = 16  # positions in the context before a measured decode
_FAR = 512
"""Positions before the decodes that tell what a position adds, at most: as many as can be read in `_MAX_SECONDS`, by an
estimate."""
_ROUNDS = 12  # most rounds of measurements: fewer if all lengths took the same time twice
_MIN_LENGTHS = 3  # minimum number of measured lengths, however slow the device is
_MAX_SECONDS = 3.0  # limit of a measurement, after which longer decodes are extrapolated
_ORDER = tuple(dict.fromkeys((1, 4, 2, 8, 16, 32, *KNOTS)))  # the most informative lengths come first
_QUICK_SECONDS = 0.01  # seconds below which a decode is repeated
BANDWIDTH = 10e9
"""Assumed bytes of weights that a device reads in a second."""
ROW_SHARE = 0.5
"""Assumed time of a further row, as a share of the first row's."""
LINK_CURVE = CostCurve(KNOTS, tuple(0.02 * (1.0 + ROW_SHARE * (rows - 1)) for rows in KNOTS))
"""The cost curve of a verifier across a link, until its verdicts tell how long its passes take."""


def estimated_curve(model: Model) -> CostCurve:
    """Return a cautious guess for a model that has not been measured on this device; decodes are not padded by it."""
    one = model.header.file_size / BANDWIDTH
    return CostCurve(KNOTS, tuple(one * (1.0 + ROW_SHARE * (rows - 1)) for rows in KNOTS))


@dataclass(frozen=True, slots=True)
class StoredCurve:
    """A cost curve as it is stored: of a model on `device`, measured at `taken` (seconds since 1970, UTC); or a guess,
    corrected by the decodes of replies, where decodes are not padded by it (`CostCurve.filled`)."""

    curve: CostCurve
    taken: float
    device: str


def curve_path(model_hash: str, threads: int, placement: str = "") -> Path:
    """Return the file of a curve for a `Model.placement`; its name includes the device, because several devices may
    share a home folder."""
    where = f"{platform.node() or 'here'}{placement and '-'}{placement}"
    return cache_dir() / "curves" / f"{model_hash[:16]}-{threads}-{where}.json"


def read_curve(path: Path) -> CostCurve | None:
    """Return the curve stored for this device; None if there is none, or it is damaged or too old."""
    found = read_cached(path, partial(from_json, StoredCurve))
    is_valid = found is not None and found.device == _device() and 0.0 <= time() - found.taken <= MONTH
    return found.curve if found is not None and is_valid else None


def write_curve(path: Path, curve: CostCurve) -> None:
    """Write a curve of this device to disk. If that fails, it is measured again next time."""
    write_cached(path, asdict(StoredCurve(curve, time(), _device())))


def _device() -> str:
    """Return the version and processor that a curve is valid for."""
    return f"edgellm {__version__} on {processor()}"


class ModelCurve:
    """The cost curve of one model. It may be used by several threads."""

    def __init__(
        self, model: Model, threads: int | None, file_hash: FileHash, idle: "IdleWork | None" = None, *,
        history: bool = True,
    ) -> None:  # fmt: skip
        """Use the stored curve, or an estimate until `idle` has measured; without `idle`, the caller measures. Without
        `history`, and while the history is off, corrections from replies are not saved."""
        self._model, self._threads, self._hash, self._idle, self._history = model, threads, file_hash, idle, history
        self._replies = CpuWait()
        self._curve: CostCurve | None = None
        self._measure_at = 0.0  # monotonic time of the next measurement in the background
        self._lock, self._measuring = threading.Lock(), threading.Lock()

    @property
    def measured(self) -> bool:
        """Return whether the curve was measured, now or earlier, and is not an estimate."""
        return self._curve is not None and self._curve.filled

    def current(self) -> CostCurve:
        """Return the best known curve, without waiting."""
        with self._lock:
            if self._curve is None and (known := self._hash.known) is not None:
                self._curve = read_curve(self._file(known))
            if not self.measured and self._idle is not None and monotonic() >= self._measure_at:
                self._measure_at = inf
                self._idle.add(self.measure)
            self._curve = self._curve or estimated_curve(self._model)
            return self._curve

    def measure(self, should_stop: ShouldStop = never, progress: Callable[[float], None] | None = None) -> CostCurve:
        """Return the measured curve, measuring it now unless that was done before. It is kept for later processes,
        unless other programs took the processor meanwhile: then it is for the caller alone. `progress` is called with
        shares of the longest time. Raises Stopped: `should_stop` returned True; OSError: the model's file cannot be
        read."""
        path = self._file(self._hash.compute(should_stop))
        while not self._measuring.acquire(timeout=0.05):
            if should_stop():
                raise Stopped
        try:
            with self._lock:
                if not self.measured:
                    self._curve = read_curve(path) or self._curve
                if self._curve is not None and self._curve.filled:
                    return self._curve
            curve, busy = self._measure(should_stop, progress)
            with self._lock:
                if busy:
                    self._measure_at = monotonic() + AGAIN
                else:
                    write_curve(path, curve)
                    self._curve = curve
            return curve
        finally:
            self._measuring.release()

    def correct(self, cost: DecodeCost, shared: bool) -> None:
        """Use the curve that the decodes of replies have made of an estimate; `shared`: some of them shared the cores.
        Keep it for later processes if the process hardly waited meanwhile. Forget a measured one that strays from the
        decodes: it is measured again."""
        if cost.given.filled and cost.strays and not shared:
            with self._lock:
                if self._curve == cost.given and (known := self._hash.quick()) is not None:
                    self._file(known).unlink(missing_ok=True)
                    self._curve, self._measure_at = None, 0.0
        if cost.given.filled:
            return
        curve = cost.corrected()
        with self._lock:
            if self.measured or self._curve == curve:
                return
            self._curve = curve
            known, busy = self._hash.quick(), shared or self._replies.share() > BUSY
            if known is not None and not busy and self._history and History().on:
                write_curve(self._file(known), curve)

    def _file(self, model_hash: str) -> Path:
        threads = self._threads or self._model.hardware.threads or default_threads(self._model.n_params)
        return curve_path(model_hash, threads, self._model.placement)

    def _measure(self, should_stop: ShouldStop, progress: Callable[[float], None] | None) -> tuple[CostCurve, bool]:
        """Return a curve, and whether other programs took the processor while it was measured."""
        far = min(_FAR, KNOTS[-1] * int(_MAX_SECONDS / estimated_curve(self._model).table()[-1]))
        spec = ContextSpec(
            _PREFIX + far + KNOTS[-1], threads=self._threads, rolls_back=True,
            reproducible=self._model.hardware.reproducible,
        )  # fmt: skip
        with Context(self._model, spec) as context:
            context.set_cancel(should_stop)
            waiting = CpuWait()
            curve = measure_curve(context, progress)
            return curve, bool(context.native.shared) or waiting.share() > BUSY


def measure_curve(context: Context, progress: Callable[[float], None] | None = None) -> CostCurve:
    """Return the minimum time of a decode of 1, 2, 3 … 64 rows with all their logits, and what a position before it
    adds. A slow device measures fewer lengths, the most informative ones first, once each. Raises Stopped."""
    ids, start = np.ones(KNOTS[-1], dtype=np.int32), perf_counter()
    context.clear()
    context.fill(())
    context.decode(ids[:_PREFIX])

    def timed(rows: int, prefix: int = _PREFIX) -> float:
        began = perf_counter()
        context.decode(ids[:rows], outputs=rows).argmax(axis=1)
        taken = perf_counter() - began
        context.rollback(prefix)
        context.reread()
        return taken

    timed(1)

    def timed_twice(rows: int) -> float:
        """Return the seconds of a decode; of a quick decode, those of its repetition."""
        if progress is not None:
            progress(min(1.0, (perf_counter() - start) / _MAX_SECONDS))
        fresh = timed(rows)
        return timed(rows) if fresh < _QUICK_SECONDS else fresh

    found = minimum_times(
        timed_twice, _ORDER, rounds=_ROUNDS, seconds=_MAX_SECONDS, at_least=_MIN_LENGTHS, clock=perf_counter
    )
    known = sorted(found)
    curve = CostCurve(tuple(known), plausible_times(known, [found[rows] for rows in known]), filled=True)
    table = curve.table()
    while len(context.cached()) + 2 * len(ids) <= context.n_ctx:
        context.decode(ids)
    if not (far := len(context.cached()) - _PREFIX):
        return curve

    def added(rows: int) -> float:
        """Return the seconds that a position adds."""
        return max(0.0, min(timed(rows, _PREFIX + far) for _ in range(WITNESSES)) - table[rows]) / far

    one, many = added(1), added(2 * ROW_TILE)
    return replace(curve, positions=(one, max(0.0, many - one) / (2 * ROW_TILE - 1)))


Task: TypeAlias = Callable[[Stop], object]
"""A function that does its work, or raises Stopped soon after its argument is set; called again, it continues."""

PAUSE = 0.5  # seconds after a reply before work goes on: the next reply may follow at once
STOPPING = 0.2
"""Most seconds that a reply waits for the work to stop: sharing the cores would take longer."""
_log = logging.getLogger(__name__)


class IdleWork:
    """Tasks of a pair, run one after another in a thread of their own while no reply is being written."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._hashes: dict[Path, FileHash] = {}
        self._changed = threading.Condition()
        self._replies = 0
        self._resume_at = 0.0
        self._stop = Stop()
        self._thread: threading.Thread | None = None
        self._working = False
        self._closed = False

    def add(self, task: Task) -> None:
        """Run `task` when no reply is being written. If it fails, the failure is logged, and it is not run again."""
        with self._changed:
            if self._closed:
                return
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="edgellm-idle", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def file_hash(self, path: Path) -> FileHash:
        """Return the hash of a file, which is computed in the background from the first call on."""
        with self._changed:
            if path not in self._hashes:
                found = self._hashes[path] = FileHash(path)
                if found.known is None:
                    self.add(found.compute)
            return self._hashes[path]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the work before the `with` block, and resume it some time after the block."""
        with self._changed:
            self._replies += 1
            self._stop.set()
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: not self._working, STOPPING)
        try:
            yield
        finally:
            release_threads()
            with self._changed:
                self._replies -= 1
                self._resume_at = monotonic() + PAUSE
                self._changed.notify_all()

    def rest(self) -> None:
        """Begin no task for some time: a reply may follow at once."""
        with self._changed:
            self._resume_at = monotonic() + PAUSE

    def wait(self) -> None:
        """Wait until all tasks have ended."""
        with self._changed:
            while self._thread is not None:
                self._changed.wait()

    def close(self) -> None:
        """Stop the work for good, and wait until it has stopped."""
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._stop.set()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task(self._stop)
            except Stopped:
                with self._changed:
                    if not self._closed:
                        self._tasks.appendleft(task)
            except Exception as error:  # noqa: BLE001  # Replies need no background work.
                _log.warning("work in the background failed: %s: %s", type(error).__name__, error)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _next(self) -> Task | None:
        """Return the next task as soon as no reply is being written; None after the last task."""
        with self._changed:
            while self._tasks and not self._closed:
                wait = None if self._replies else self._resume_at - monotonic()
                if wait is not None and wait <= 0.0:
                    self._stop, self._working = Stop(), True
                    return self._tasks.popleft()
                self._changed.wait(wait)
            self._thread = None
            self._changed.notify_all()
            return None
