"""The coordinator of a mesh: opens the pipeline, and a new pipeline over the remaining devices when a device is lost.

A lost stage takes only its part of every session's KV cache with it: the text is here. So a session that waits for a
verdict requests it again from the beginning, and gets the same verdict. No token can be lost or duplicated.

Another placement may take over without a loss: its pipeline is opened beside the present pipeline (`NextPipeline`), and
computes the next token once it has loaded and has read the texts of the open replies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from edgellm.coldstart.cost_model import ModelCosts, TransformerShape
from edgellm.coldstart.hardware import Device, Links
from edgellm.coldstart.home import MemoryOverhead
from edgellm.engine import Ids, common_prefix
from edgellm.errors import DeviceLost, EdgeError, PlanImpossible
from edgellm.layer_range import StageShare, ranges
from edgellm.mesh.messages import MAX_ROWS, StageSpec
from edgellm.mesh.next_pipeline import NextPipeline, TakeOver
from edgellm.mesh.pipeline import Pipeline, StageHost
from edgellm.mesh.placement import fail_over
from edgellm.spec.types import NO_IDS

_log = logging.getLogger(__name__)
_PLANNING = 2.0  # seconds for planning a new split, for which a reply waits
_REVIVALS = 3  # returns of a device that is lost again; also pipelines lost with no device at fault


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


@dataclass(slots=True)
class _Slot:
    """One sequence in every stage's cache: the tokens that it holds, and the generation of their pipeline."""

    held: Ids = field(default_factory=lambda: NO_IDS)
    generation: int = 0
    taken: bool = False


class Mesh:
    """A model over several devices. Any number of threads may use it."""

    def __init__(
        self,
        devices: Sequence[MeshDevice],
        shares: Sequence[StageShare],
        work: StageSpec,
        model: ModelCosts | None = None,
        *,
        links: Links | None = None,
        overhead: MemoryOverhead = MemoryOverhead(),
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Check the shares. `work` is for the whole model: every stage gets its part. After a loss, `model`, `links`
        and `overhead` are planned with, as for `edgellm.coldstart.plan.plan`; without `model`, a transformer of that
        width. `notify` is called with every change, in words for people.

        Raises:
            PlanImpossible: the shares are not the layers of the model in order, or a share names no member.
        """
        self._devices = {device.name: device for device in devices}
        self.shares = tuple(shares)
        self.work = work
        self._planned = partial(fail_over, model=model or _transformer(work), links=links, overhead=overhead)
        self.notify = notify or (lambda _text: None)
        self.generation = 0
        self.recoveries = 0
        self._pipeline: Pipeline | None = None
        self._lost: dict[str, EdgeError] = {}
        self._reopened: Counter[str] = Counter()  # losses since the last verdict
        self._lock = threading.RLock()
        self._slots = [_Slot() for _ in range(work.sessions)]
        self._closed = False
        self._direct = True
        self._following: deque[tuple[StageShare, ...]] = deque()  # placements that take over in turn
        self._rest: tuple[StageShare, ...] = ()  # the placement between replies
        self._next: NextPipeline | None = None
        self._opening = False  # a thread opens the next pipeline
        self._sends_caches = False
        self.take_overs: list[TakeOver] = []
        check_shares(self.shares, work.n_layers, self._devices)

    def pipeline(self) -> tuple[Pipeline, int]:
        """Return the open pipeline, or open a new one; and its generation.

        Raises:
            PlanImpossible: the remaining devices do not hold the model.
        """
        with self._lock:
            if self._closed:
                raise DeviceLost("The mesh is closed.", "Open it again.")
            if self._pipeline is not None and self._pipeline.lost is not None:
                self._discard(self._pipeline)
            if self._pipeline is None:
                self._open()
            if self._pipeline is None:
                raise DeviceLost("The mesh could not be opened.", "Ask again.")
            return self._pipeline, self.generation

    def move(
        self, following: Sequence[Sequence[StageShare]], rest: Sequence[StageShare] = (), *, sends_caches: bool = False
    ) -> None:
        """Let these placements take over behind the replies, one after the other, and `rest`, if given, once no reply
        is open. The first placement begins to load now if only devices without a part in the present pipeline load,
        else after the first verdict. `sends_caches`: behind a reply, keys and values are sent, if possible, and not
        computed again from the text.

        Raises:
            PlanImpossible: as for the shares of a mesh.
        """
        for shares in (*following, *([rest] if rest else [])):
            check_shares(shares, self.work.n_layers, self._devices)
        with self._lock:
            self._following = deque(tuple(shares) for shares in following)
            self._rest, self._sends_caches = tuple(rest), sends_caches
            present = {share.name: set(share.layers) for share in self.shares}
            first = self._following[0] if self._following else ()
            busy = [share for share in first if not present.get(share.name, set()).issuperset(share.layers)]
            if first and not present.keys() & {share.name for share in busy}:
                self._open_next(self._following.popleft())

    def coming(self) -> NextPipeline | None:
        """Return the pipeline that takes over next, if one is open."""
        return self._next

    def token_ended(self, slot: int, text: Ids, rows: int) -> None:
        """Let the next placement take over if it is ready; the sequence has just got this `text`."""
        with self._lock:
            following, pipeline = self._next, self._pipeline
            if following is None or pipeline is None or pipeline.lost is not None:
                return
            if following.pipeline.lost is not None:
                self._give_up(following)
                return
            taken = [at for at, one in enumerate(self._slots) if one.taken]
            present = {at: self.held(at, self.generation) for at in taken}
            texts = {at: (text if at == slot else present[at], present[at]) for at in taken}
            if following.ready(texts, rows, pipeline):
                pipeline.retire()
                self._take_over(following, len(text))

    def _take_over(self, following: NextPipeline, tokens: int) -> None:
        """Make `following` the present pipeline, and open the pipeline after it."""
        self.generation += 1
        for at, slot in enumerate(self._slots):
            slot.held, slot.generation = following.held(at), self.generation
        self.shares, self._pipeline, self._next = following.shares, following.pipeline, None
        self.take_overs.append(following.taken(tokens))
        _log.info("pipeline %d over %s", self.generation, ", ".join(share.name for share in self.shares))
        if self._following:
            self._open_next(self._following.popleft())

    def _give_up(self, following: NextPipeline) -> None:
        """Stay with the present pipeline: the next pipeline is lost, and what was to follow is dropped. If a device is
        at fault, the placement between replies is dropped, too."""
        name, lost = following.pipeline.lost or ("", None)
        following.pipeline.close()
        self._next = None
        self._following.clear()
        if lost is not None and lost.blamed:
            self._rest = ()
            _log.warning("the next pipeline has lost %s: %s", name, lost.error.what)
            self.notify(f"{name} cannot take over ({lost.error.what}) The layers stay where they are.")

    def _open_next(self, shares: tuple[StageShare, ...], *, read: bool = False) -> None:
        """Open the next pipeline, in a thread of its own, because it may wait for memory. `read`: it reads the texts
        that the present pipeline holds, as no reply is open."""
        self._opening = True

        def open_it() -> None:
            following, fault = self._opened(shares, sends_caches=self._sends_caches and not read)
            with self._lock:
                self._opening = False
                if fault is not None:
                    self._following.clear()
                    self._rest = ()
                    self.notify(f"Another split cannot take over ({fault.what}) The layers stay where they are.")
                elif following is not None and self._closed:
                    following.pipeline.close()
                elif following is not None:
                    self._next = following
                    for at in range(len(self._slots)) if read else ():
                        following.read(at, self.held(at, self.generation), MAX_ROWS)

        threading.Thread(target=open_it, name="next-pipeline", daemon=True).start()

    def _opened(
        self, shares: tuple[StageShare, ...], *, sends_caches: bool
    ) -> tuple[NextPipeline | None, EdgeError | None]:
        """Return a new pipeline over these shares, or why there is none."""
        try:
            stages = [
                (self._devices[share.name].stage_host(), replace(self.work, layers=share.layers)) for share in shares
            ]
            return NextPipeline(shares, stages, direct=self._direct, sends_caches=sends_caches), None
        except EdgeError as error:
            return None, error

    def current(self) -> Pipeline | None:
        """Return the pipeline, if one is open."""
        return self._pipeline

    def free(self) -> bool:
        """Return whether a sequence is left for another session."""
        return not all(slot.taken for slot in self._slots)

    def slot(self, prompt: Ids) -> int | None:
        """Take the free sequence of the stages' caches that shares the longest prefix with `prompt`; None if all are
        taken."""
        with self._lock:
            free = [at for at, slot in enumerate(self._slots) if not slot.taken]
            if not free:
                return None
            at = max(free, key=lambda at: common_prefix(self.held(at, self.generation), prompt))
            self._slots[at].taken = True
            return at

    def release(self, slot: int) -> None:
        """Free the sequence of a session that is over; its tokens may serve another session."""
        with self._lock:
            self._slots[slot].taken = False
            idle = not any(one.taken for one in self._slots) and self._next is None and not self._opening
            if idle and not self._closed and self._rest and self._rest != self.shares:
                self._following.clear()
                self._open_next(self._rest, read=True)

    def held(self, slot: int, generation: int) -> Ids:
        """Return the tokens that every stage's cache holds for a sequence once all micro-batches are computed."""
        one = self._slots[slot]
        return one.held if one.generation == generation else NO_IDS

    def record_tokens(self, slot: int, generation: int, ids: Ids) -> None:
        """Remember the tokens that have been sent for a sequence."""
        self._slots[slot].held, self._slots[slot].generation = ids, generation

    def confirm(self) -> None:
        """Forget the losses counted so far: a verdict has come, so the pipeline has recovered. Layers for the placement
        that takes over may be loaded now."""
        self._reopened.clear()
        if self._following and self._next is None:
            with self._lock:
                if self._following and self._next is None and not self._opening:
                    self._open_next(self._following.popleft())

    def close(self) -> None:
        """Close the mesh, and release all stages."""
        with self._lock:
            self._closed = True
            if self._next is not None:
                self._next.pipeline.close()
                self._next = None
            if self._pipeline is not None:
                self._pipeline.close()
                self._pipeline = None

    def _discard(self, pipeline: Pipeline) -> None:
        """Close a pipeline that has lost a stage, and count the device at fault, if known, as lost."""
        name, lost = pipeline.lost or ("", None)
        pipeline.close()
        self._pipeline = None
        if lost is None:
            return
        if pipeline.silent:  # rows that pass through this process show which device does not return them
            self._direct = False
        self._reopened[""] += 1
        if lost.blamed or (self._reopened[""] > _REVIVALS and not pipeline.silent):
            self._lost[name] = lost.error
            self.recoveries += 1

    def _open(self) -> None:
        shares = self.shares
        if any(share.name in self._lost for share in shares):
            following, self._next = self._next, None
            if following is not None and self._can_stand_in(following):
                why = "; ".join(f"{name}: {error.what}" for name, error in self._lost.items())
                self.notify(f"A device was lost ({why}) Those that were to take over do so now; the reply continues.")
                self._take_over(following, max((len(slot.held) for slot in self._slots if slot.taken), default=0))
                return
            if following is not None:
                following.pipeline.close()
            self._following.clear()
            self._rest = ()
            shares = self._replanned()
            who = ", ".join(f"{share.name} {share.layers}" for share in shares)
            why = "; ".join(f"{name}: {error.what}" for name, error in self._lost.items())
            _log.warning("a device is lost (%s), the layers are now on %s", why, who)
            self.notify(f"A device was lost ({why}) The layers are now on {who}; the reply continues.")
        self.generation += 1
        self.shares = shares
        stages = [(self._devices[share.name].stage_host(), replace(self.work, layers=share.layers)) for share in shares]
        _log.info("pipeline %d over %s", self.generation, ", ".join(share.name for share in shares))
        self._pipeline = Pipeline(stages, direct=self._direct)

    def _can_stand_in(self, following: NextPipeline) -> bool:
        """Return whether the next pipeline is without a loss, needs no lost device, and takes no caches, which would
        be incomplete."""
        if following.takes_caches:
            return False
        return following.pipeline.lost is None and not any(share.name in self._lost for share in following.shares)

    def _replanned(self) -> tuple[StageShare, ...]:
        """Return new shares over the remaining devices, and, if need be, over lost devices that are back."""
        remaining: list[Device] = []
        for name, device in self._devices.items():
            if name not in self._lost:
                self._ask(device, remaining)
        began = time.monotonic()

        def late() -> bool:
            return time.monotonic() - began > _PLANNING

        text = max((len(slot.held) for slot in self._slots if slot.taken), default=0)
        planned = partial(self._planned, text=max(1, text), stop=late)
        if (shares := planned(remaining)) is None:
            back = [name for name in self._lost if self._reopened[name] < _REVIVALS]
            back = [name for name in back if self._ask(self._devices[name], remaining)]
            if (shares := planned(remaining)) is None:
                raise self._impossible(remaining)
            for name in {share.name for share in shares}.intersection(back):
                del self._lost[name]
                self._reopened[name] += 1
        return shares

    def _ask(self, device: MeshDevice, remaining: list[Device]) -> bool:
        try:
            remaining.append(device.describe(self.work.model))
        except EdgeError as error:
            self._lost[device.name] = error
            return False
        return True

    def _impossible(self, remaining: Sequence[Device]) -> PlanImpossible:
        every = frozenset(range(self.work.n_layers))
        stored = {one.name: every if one.layers.stored is None else one.layers.stored for one in remaining}
        missing = sorted(every.difference(*stored.values()))
        lost = ", ".join(self._lost) or "none"
        why = "".join(f" {name}: {error.what}" for name, error in self._lost.items())
        if missing:
            what = f"Layers {ranges(missing)} of {self.work.name} are on no remaining device (lost: {lost}).{why}"
            return PlanImpossible(what, "Reconnect a lost device, or deploy these layers to a remaining one.")
        left = ", ".join(f"{name} {ranges(sorted(layers))}" for name, layers in stored.items())
        return PlanImpossible(
            f"The remaining devices cannot hold {self.work.name}, each in one range of layers: {left}"
            f" (lost: {lost}).{why}",
            "Reconnect a lost device, or deploy more layers to a remaining one.",
        )


def _transformer(work: StageSpec) -> ModelCosts:
    """Return the costs of a usual transformer of the same width, in 16 bits."""
    heads = max(1, work.n_embd // 64)
    return ModelCosts.of(TransformerShape(work.n_layers, work.n_embd, heads, heads, 64, 4 * work.n_embd), work.name)


def check_shares(shares: Sequence[StageShare], layers: int, names: Sequence[str] | dict[str, MeshDevice]) -> None:
    """Raise PlanImpossible if the shares are not the layers of the model in order, each on a device of its own."""
    end = 0
    for share in shares:
        if share.name not in names:
            raise PlanImpossible(f"No device is called {share.name!r}.", f"Devices: {', '.join(names) or 'none'}.")
        if share.layers.start != end or not len(share.layers):
            raise PlanImpossible(
                f"Layer {end} is followed by the range {share.layers} of {share.name}.",
                f"Give all layers from 1 to {layers}, in order.",
            )
        end = share.layers.stop
    if end != layers:
        raise PlanImpossible(f"The split ends with layer {end}, but the model has {layers} layers.", "Give all layers.")
    named = [share.name for share in shares]
    if len(set(named)) < len(named):
        raise PlanImpossible("A device has two ranges of layers.", "Give each device one range.")
