"""The coordinator of a mesh: opens the pipeline, and a new pipeline over the remaining devices when a device is lost.

A lost stage takes only its part of every session's KV cache with it: the text is here. So a session that waits for a
verdict requests it again from the beginning, and gets the same verdict. No token can be lost or duplicated.

Another placement may take over without a loss: its pipeline is opened beside the present pipeline (`NextPipeline`), and
computes the next token once it has loaded and has read the texts of the open replies. Stages of one device share their
weights, so only layers that the device lacks are loaded. The present pipeline does not depend on the next: if that is
lost, it is forgotten.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Protocol

from edgellm.coldstart.costs import Device
from edgellm.coldstart.problem import Home
from edgellm.engine import Ids, common_prefix
from edgellm.errors import DeviceLost, EdgeError, PlanImpossible
from edgellm.layer_range import StageShare, ranges
from edgellm.mesh.messages import MAX_ROWS, StageAnswer, StageLost, StageSpec
from edgellm.mesh.pipeline import Pipeline, StageHost
from edgellm.mesh.placement import PLAN_SECONDS, fail_over, within
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import GREEDY, NO_IDS, Chunk

_log = logging.getLogger(__name__)
_REVIVALS = 3  # pipelines lost in a row, after which a lost device is not asked again


class MeshDevice(Protocol):
    """A device that may hold a part of the model."""

    @property
    def name(self) -> str: ...

    def describe(self, model: str) -> Device:
        """Return the device for a plan, with its memory and its layers of the model, by fingerprint, as they are now.
        Raise an EdgeError if it cannot be asked."""
        ...

    def stage_host(self) -> StageHost:
        """Return a new host for a stage."""
        ...


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A pipeline that has taken over, with `perf_counter` times: when it began to load, had loaded, had read the
    text, and took over, at the end of a text of `tokens` tokens."""

    shares: tuple[StageShare, ...]
    began: float
    loaded: float
    ready: float
    at: float
    tokens: int


class NextPipeline:
    """A `pipeline` over `shares`, on its way. Not thread-safe."""

    def __init__(self, shares: Sequence[StageShare], pipeline: Pipeline) -> None:
        self.shares, self.pipeline = tuple(shares), pipeline
        self._began = perf_counter()
        self._reading: dict[int, Future[StageAnswer]] = {}

    @property
    def busy(self) -> bool:
        """Return whether it loads, or reads a text that was given to it."""
        return not self.pipeline.whole or not all(reading.done() for reading in self._reading.values())

    def read(self, slot: int, text: Ids, rows: int) -> None:
        """Begin to read a text, in parts of `rows` tokens, if none is being read for the sequence."""
        if len(text) and slot not in self._reading:
            request = VerifyRequest(slot, GREEDY, len(text), NO_IDS, Chunk())
            self._reading[slot] = self.pipeline.ask(slot, 0, text.copy(), request, rows)

    def ready(self, texts: Mapping[int, tuple[Ids, Ids]], rows: int) -> bool:
        """Return whether the pipeline may take over: all layers are loaded, and the texts read as far as they were when
        reading began. Begin now to read unread texts, unless the present pipeline, too, has still to read them.
        `texts`: the text of every open reply, and the part that the present pipeline holds."""
        if not self.pipeline.whole:
            return False
        for slot, (text, held) in texts.items():
            if common_prefix(self.pipeline.held(slot), text) < common_prefix(held, text):
                self.read(slot, text, rows)
        return not self.busy

    def taken(self, tokens: int) -> TakeOver:
        """Return the record of the take-over, which happens now."""
        loaded = max(record.loaded_at for record in self.pipeline.records)
        crossing = self.pipeline.records[-1].crossing
        ready = loaded if crossing is None else crossing.finished
        return TakeOver(self.shares, self._began, loaded, ready, perf_counter(), tokens)


@dataclass(slots=True)
class _Losses:
    """The devices that are lost, and why; and the pipelines that were lost since the last verdict."""

    why: dict[str, EdgeError] = field(default_factory=dict)
    pipelines: int = 0

    def __str__(self) -> str:
        told = ((name, error.what) for name, error in self.why.items())
        return "; ".join(what if what.startswith(name) else f"{name}: {what}" for name, what in told)


@dataclass(slots=True)
class _Moves:
    """The placements that take over in turn, behind a reply or only `between` replies, and the next pipeline, which a
    thread may be opening."""

    following: deque[tuple[StageShare, ...]] = field(default_factory=deque)
    between: bool = False
    next: NextPipeline | None = None
    opening: bool = False

    @property
    def idle(self) -> bool:
        return self.next is None and not self.opening

    def cancel(self) -> None:
        """Plan no moves any more, and close the next pipeline."""
        self.following.clear()
        if self.next is not None:
            self.next.pipeline.close()
            self.next = None


class Mesh:
    """A model over several devices. Any number of threads may use it."""

    def __init__(
        self,
        devices: Sequence[MeshDevice],
        shares: Sequence[StageShare],
        work: StageSpec,
        home: Home,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Check the shares. `work` is for the whole model: every stage gets its part. After a loss, the remaining
        devices are planned for as those of the `home`. `notify` is called with every change, in words for people.
        Raises PlanImpossible: the shares are not the layers of the model in order, or a share names no member."""
        self._devices = {device.name: device for device in devices}
        self.shares = tuple(shares)
        self.work = work
        self._home = home
        self.notify = notify or (lambda _text: None)
        self.recoveries = 0
        self.take_overs: list[TakeOver] = []
        self._pipeline: Pipeline | None = None
        self._losses, self._moves = _Losses(), _Moves()
        self._taken: set[int] = set()  # sequences of open replies
        self._longest = 1  # tokens of the longest text in a pipeline that was lost since the last verdict
        self._lock = threading.RLock()
        self._closed = False
        check_shares(self.shares, work.n_layers, self._devices)

    def pipeline(self) -> Pipeline:
        """Return the open pipeline, or open a new one. Raises PlanImpossible: the remaining devices do not hold the
        model."""
        with self._lock:
            if self._closed:
                raise DeviceLost("The mesh is closed.", "Open it again.")
            if self._pipeline is not None and self._pipeline.lost is not None:
                self._discard(self._pipeline, *self._pipeline.lost)
            return self._pipeline or self._open()

    def current(self) -> Pipeline | None:
        """Return the pipeline, if one is open."""
        return self._pipeline

    def coming(self) -> NextPipeline | None:
        """Return the pipeline that takes over next, if one is open."""
        return self._moves.next

    def confirm(self) -> None:
        """Forget the losses counted so far: a verdict has come, so the pipeline has recovered. Layers for the placement
        that takes over may be loaded now."""
        self._losses.pipelines = 0
        self._longest = 1
        with self._lock:
            if self._moves.following and self._moves.idle and not self._moves.between:
                self._open_next(self._moves.following.popleft())

    def close(self) -> None:
        """Close the mesh, and release all stages."""
        with self._lock:
            self._closed = True
            self._moves.cancel()
            if self._pipeline is not None:
                self._pipeline.close()
                self._pipeline = None

    # The sequences in the stages' caches.

    def free(self) -> bool:
        """Return whether a sequence is left for another session."""
        return len(self._taken) < self.work.sessions

    def slot(self, prompt: Ids) -> int | None:
        """Take the free sequence of the stages' caches that shares the longest prefix with `prompt`; None if all are
        taken."""
        with self._lock:
            free = [at for at in range(self.work.sessions) if at not in self._taken]
            if not free:
                return None
            at = max(free, key=lambda at: common_prefix(self._held(at), prompt))
            self._taken.add(at)
            return at

    def release(self, slot: int) -> None:
        """Free the sequence of a session that is over; its tokens may serve another session."""
        with self._lock:
            self._taken.discard(slot)
            moves = self._moves
            if not self._taken and moves.idle and not self._closed and moves.following:
                self._open_next(moves.following.popleft(), read=True)

    def _held(self, slot: int) -> Ids:
        return NO_IDS if self._pipeline is None else self._pipeline.held(slot)

    # Moves.

    def move(self, following: Sequence[Sequence[StageShare]], *, between: bool = False) -> None:
        """Let these placements take over one after the other. `between`: the first begins to load once no reply is
        open; else now if only devices without a part in the present pipeline load, or after the first verdict. Raises
        PlanImpossible: as for the shares of a mesh."""
        for shares in following:
            check_shares(shares, self.work.n_layers, self._devices)
        with self._lock:
            planned = self._moves.following = deque(tuple(shares) for shares in following)
            self._moves.between = between
            present = {share.name: set(share.layers) for share in self.shares}
            first = planned[0] if planned else ()
            loading = {share.name for share in first if not present.get(share.name, set()).issuperset(share.layers)}
            if first and not between and not present.keys() & loading:
                self._open_next(planned.popleft())

    def token_ended(self, slot: int, text: Ids, rows: int) -> None:
        """Let the next placement take over if it is ready; the sequence has just got this `text`."""
        with self._lock:
            following, pipeline = self._moves.next, self._pipeline
            if following is None or pipeline is None or pipeline.lost is not None:
                return
            if following.pipeline.lost is not None:
                self._stay(following.shares, *following.pipeline.lost)
                return
            present = {at: pipeline.held(at) for at in self._taken}
            texts = {at: (text if at == slot else held, held) for at, held in present.items()}
            if following.ready(texts, rows):
                pipeline.retire()
                self._take_over(following, len(text))

    def _take_over(self, following: NextPipeline, tokens: int) -> None:
        """Make `following` the present pipeline, and open the pipeline after it."""
        self.shares, self._pipeline, self._moves.next = following.shares, following.pipeline, None
        self.take_overs.append(following.taken(tokens))
        _log.info("a pipeline over %s takes over", _named(self.shares))
        if self._moves.following:
            self._open_next(self._moves.following.popleft())

    def _stay(self, shares: tuple[StageShare, ...], name: str, lost: StageLost) -> None:
        """Stay with the present pipeline: the next one is lost. If a device is at fault, plan no moves any more; else
        the next one is opened again between replies."""
        self._moves.cancel()
        if not lost.blamed:
            self._moves.following.append(shares)
            self._moves.between = True
            return
        _log.warning("the next pipeline has lost %s: %s", name, lost.error.what)
        self.notify(f"{name} cannot take over ({lost.error.what}) The layers stay where they are.")

    def _open_next(self, shares: tuple[StageShare, ...], *, read: bool = False) -> None:
        """Open the next pipeline, in a thread of its own, because it may wait for memory. `read`: it reads the texts
        that the present pipeline holds, as no reply is open."""
        self._moves.opening = True

        def open_it() -> None:
            try:
                following = NextPipeline(shares, self._started(shares))
            except EdgeError as error:
                with self._lock:
                    self._moves.opening = False
                    self._moves.cancel()
                self.notify(f"Another split cannot take over ({error.what}) The layers stay where they are.")
                return
            with self._lock:
                self._moves.opening = False
                if self._closed:
                    following.pipeline.close()
                    return
                self._moves.next = following
                for at in range(self.work.sessions) if read else ():
                    following.read(at, self._held(at), MAX_ROWS)

        threading.Thread(target=open_it, name="next-pipeline", daemon=True).start()

    # Losses.

    def _started(self, shares: Sequence[StageShare]) -> Pipeline:
        """Return a new pipeline over these shares, which begins to load."""
        stages = [(self._devices[share.name].stage_host(), replace(self.work, layers=share.layers)) for share in shares]
        return Pipeline(stages)

    def _discard(self, pipeline: Pipeline, name: str, lost: StageLost) -> None:
        """Close a pipeline that has lost a stage, and count the device at fault, if known, as lost."""
        pipeline.close()
        self._longest = max([self._longest, *(len(self._held(slot)) for slot in self._taken)])
        self._pipeline = None
        losses = self._losses
        losses.pipelines += 1
        if lost.blamed or losses.pipelines > _REVIVALS:
            losses.why[name] = lost.error
            self.recoveries += 1

    def _open(self) -> Pipeline:
        """Open the pipeline: over the present shares, or, after a loss, over planned ones."""
        lost = self._losses.why
        if any(share.name in lost for share in self.shares):
            self._moves.cancel()
            self.shares = self._replanned()
            _log.warning("a device is lost (%s), the layers are now on %s", self._losses, _named(self.shares))
            self.notify(
                f"A device was lost ({self._losses}) The layers are now on {_named(self.shares)}; the reply continues."
            )
        _log.info("a pipeline over %s", _named(self.shares))
        self._pipeline = self._started(self.shares)
        return self._pipeline

    def _replanned(self) -> tuple[StageShare, ...]:
        """Return new shares over the remaining devices, and, if need be, over lost devices that are back."""
        losses, remaining = self._losses, list[Device]()
        for name, device in self._devices.items():
            if name not in losses.why:
                self._ask(device, remaining)
        planned = partial(fail_over, self._home, text=self._longest, stop=within(PLAN_SECONDS))
        if (shares := planned(remaining)) is None:
            back = [] if losses.pipelines > _REVIVALS else list(losses.why)
            back = [name for name in back if self._ask(self._devices[name], remaining)]
            if (shares := planned(remaining)) is None:
                raise self._impossible(remaining)
            for name in {share.name for share in shares}.intersection(back):
                del losses.why[name]
        return shares

    def _ask(self, device: MeshDevice, remaining: list[Device]) -> bool:
        try:
            remaining.append(device.describe(self.work.model))
        except EdgeError as error:
            self._losses.why[device.name] = error
            return False
        return True

    def _impossible(self, remaining: Sequence[Device]) -> PlanImpossible:
        every = frozenset(range(self.work.n_layers))
        stored = {one.name: every if one.layers.stored is None else one.layers.stored for one in remaining}
        missing = sorted(every.difference(*stored.values()))
        lost = ", ".join(self._losses.why) or "none"
        why = "".join(f" {name}: {error.what}" for name, error in self._losses.why.items())
        if missing:
            what = f"Layers {ranges(missing)} of {self.work.name} are on no remaining device (lost: {lost}).{why}"
            return PlanImpossible(what, "Reconnect a lost device, or deploy these layers to a remaining one.")
        left = ", ".join(f"{name} {ranges(sorted(layers))}" for name, layers in stored.items())
        return PlanImpossible(
            f"The remaining devices cannot hold {self.work.name}, each in one range of layers: {left}"
            f" (lost: {lost}).{why}",
            "Reconnect a lost device, or deploy more layers to a remaining one.",
        )


def _named(shares: Sequence[StageShare]) -> str:
    return ", ".join(f"{share.name} {share.layers}" for share in shares)


def check_shares(shares: Sequence[StageShare], layers: int, names: Sequence[str] | dict[str, MeshDevice]) -> None:
    """Raise PlanImpossible if the shares are not the layers of the model in order, each on a device of its own."""
    end = 0
    for share in shares:
        if share.name not in names:
            raise PlanImpossible(f"No device is called {share.name!r}.", f"Devices: {', '.join(names) or 'none'}.")
        if share.layers.start != end or not len(share.layers):
            raise PlanImpossible(
                f"After layer {end} comes the range {share.layers} of {share.name}.", "Give all layers in order."
            )
        end = share.layers.stop
    if end != layers:
        raise PlanImpossible(f"The split ends with layer {end}, but the model has {layers} layers.", "Give all layers.")
    named = [share.name for share in shares]
    if len(set(named)) < len(named):
        raise PlanImpossible("A device has two ranges of layers.", "Give each device one range.")
