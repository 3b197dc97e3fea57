"""Measurement of the home's devices for a plan, and doubts about the measurements."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import permutations
from math import inf
from pathlib import Path
from typing import Self

from edgellm.coldstart.costs import Device, Link, TransformerShape, Utilisation, fit_utilisation
from edgellm.coldstart.problem import Fleet
from edgellm.engine import ModelFile
from edgellm.engine.cores import BUSY, CpuWait
from edgellm.engine.gguf.synthetic_layers import Blocks, blocks_of
from edgellm.errors import EdgeError, InvalidOption, NotPermitted
from edgellm.layer_range import HERE
from edgellm.mesh.device_profiler import MAX_DOUBTFUL_AGE, measure_device
from edgellm.mesh.layer_costs import stand_in
from edgellm.mesh.placement import model_costs
from edgellm.mesh.weight_cache import ComputeUnit
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.layers import Worker, find_workers, worker_at
from edgellm.rpc.link import Endpoint
from edgellm.rpc.measuring import DeviceFigures, LinkSpeed, measure, measure_link
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.state import MONTH, from_json, read_cached, write_cached
from edgellm.system import cache_dir

MAX_LINK_AGE = 86_400.0  # seconds; a device moved to another room has another line

Notify = Callable[[str, str], None]
"""A function that is called with a device and the figure being measured."""


@dataclass(frozen=True, slots=True)
class TimedModel:
    """The model whose layers are timed: their headers, and its name and shape."""

    blocks: Blocks
    name: str
    shape: TransformerShape


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """The speed of a device with a model's layers: figures, and the model's name and shape."""

    figures: DeviceFigures
    model: str
    shape: TransformerShape

    @property
    def utilisation(self) -> Utilisation:
        rows, seconds = self.figures.rows, self.figures.seconds
        return fit_utilisation(rows, [self.shape.flops(n) / taken for n, taken in zip(rows, seconds, strict=True)])


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A line from here, the time of its measurement (seconds since 1970, UTC), the seconds to connect, and whether this
    device was `busy` meanwhile, so that the line is soon measured again."""

    line: LinkSpeed
    taken: int
    opening: float
    busy: bool = False


@dataclass(slots=True)
class KeptFigures:
    """The measurements of this home: devices and the lines to them, by the devices' keys."""

    speeds: dict[str, MeasuredSpeed] = field(default_factory=dict)
    lines: dict[str, MeasuredLink] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Self:
        """Return the kept figures; none of a damaged file, and then all are measured again."""
        return read_cached(_path(), partial(from_json, cls)) or cls()

    def save(self) -> None:
        """Keep the figures. If that fails, they are measured again next time."""
        write_cached(_path(), asdict(self))


def _path() -> Path:
    return cache_dir() / "figures" / "home.json"


def key_of(worker: Worker | None) -> str:
    """Return the key of a device in files: its ID, as names change."""
    if worker is None:
        return HERE
    return str(worker.address) if worker.peer is None else str(worker.peer.id)


@dataclass(frozen=True, slots=True)
class Survey:
    """Speeds by device's name, `HERE` for this device; lines from here by name; devices left out, and why."""

    speeds: Mapping[str, MeasuredSpeed]
    lines: Mapping[str, MeasuredLink]
    workers: Mapping[str, Worker]
    left_out: tuple[tuple[str, EdgeError], ...]

    def fleet(self) -> Fleet:
        """Return the fleet for the planner. Between two other devices, rows pass through this one."""
        devices = tuple(self._device(name, speed) for name, speed in self.speeds.items())
        links = {
            (one.name, two.name): Link(1.0 / (1.0 / one.uplink + 1.0 / two.downlink), one.latency + two.latency)
            for one, two in permutations(devices, 2) if HERE not in (one.name, two.name)
        }  # fmt: skip
        return Fleet(devices, links)

    def doubts(self) -> list[str]:
        """Return the figures that are doubtful, each with the reason, and what to do; nothing where none is."""
        return [f"{name}: {speed.figures.doubt}" for name, speed in self.speeds.items() if speed.figures.doubt]

    def _device(self, name: str, speed: MeasuredSpeed) -> Device:
        """Return a device for the planner."""
        figures, curve = speed.figures, speed.utilisation
        stored = self.lines.get(name)
        up, down, latency, opening = inf, inf, 0.0, 0.0  # this device's own limits are in the lines
        if stored is not None:
            up, down, latency = stored.line.down, stored.line.up, stored.line.round_trip / 2.0
            opening = stored.opening
        reading = figures.layer / figures.seconds[0] if figures.rows[0] == 1 else 0.0
        return Device(
            name, curve.peak, 1.0, curve.b, figures.disk, float(max(1, figures.memory)), up, down, latency, reading,
            unit=figures.unit, opening=opening,
        )  # fmt: skip


def discover_workers(hosts: Sequence[str], others: Sequence[Endpoint] = ()) -> list[Worker]:
    """Return the workers of the home; a worker that cannot be used has the reason as `error`.

    `hosts` are this device's addresses at which to listen for announcements. `others` are further workers, or paired
    ones that do not announce themselves. Raises InvalidOption: two workers have the same name."""
    trust = Trust.load()
    named = list(map(worker_at, others))
    known = {worker.peer.id for worker in named if worker.peer is not None}
    found = [*named, *find_workers(trust, [peer for peer in trust.peers.all() if peer.id not in known], hosts)]
    names = [worker.name for worker in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidOption(
            f"Two devices are called {twice!r}.", "Give one of them another name: --peer NAME=HOST:PORT"
        )
    return found


def timed_model(file: ModelFile, *, by_stand_in: bool = False) -> TimedModel:
    """Return what is timed for a model file; `by_stand_in`: other layers of its shape, for a model that cannot be
    cut."""
    if by_stand_in:
        blocks, shape = stand_in(file)
        return TimedModel(blocks, file.name, shape)
    return TimedModel(blocks_of(file), file.name, model_costs(file).shape)


def survey(
    workers: Sequence[Worker], model: TimedModel, *, remeasure: bool = False,
    notify: Notify = lambda _who, _what: None, unit: ComputeUnit = ComputeUnit(),
) -> Survey:  # fmt: skip
    """Measure the missing and outdated figures of this device, where the `unit` computes, and of the workers that
    answer; `remeasure`: all figures.

    The devices measure themselves at the same time, the lines one after the other. A device that fails does not raise:
    if it cannot be measured, it is left out.
    """
    return run_in_network_loop(_Surveyor(model, remeasure, notify, unit).all(workers)).result()


class _Surveyor:
    def __init__(self, model: TimedModel, remeasure: bool, notify: Notify, unit: ComputeUnit) -> None:
        self._model, self._remeasure, self._notify, self._unit = model, remeasure, notify, unit
        self._left_out: list[tuple[str, EdgeError]] = []
        self._kept = KeptFigures.load()

    async def all(self, workers: Sequence[Worker]) -> Survey:
        devices = [None, *workers]
        found = await asyncio.gather(*(self._speed(worker) for worker in devices))
        speeds = {HERE if one is None else one.name: speed for one, speed in zip(devices, found, strict=True) if speed}
        links = {
            worker.name: link for worker in workers if worker.name in speeds and (link := await self._link(worker))
        }
        self._kept.save()
        speeds = {name: speed for name, speed in speeds.items() if name in (HERE, *links)}
        return Survey(speeds, links, {one.name: one for one in workers if one.name in links}, tuple(self._left_out))

    async def _speed(self, worker: Worker | None) -> MeasuredSpeed | None:
        key, name = key_of(worker), HERE if worker is None else worker.name
        max_age = 0.0 if self._remeasure else MONTH
        blocks = self._model.blocks
        try:
            if worker is None:
                figures = await asyncio.to_thread(
                    measure_device, blocks, max_age, lambda what: self._notify(HERE, what), unit=self._unit
                )
            else:
                endpoint = _usable(worker)
                self._notify(name, "measuring itself")
                async with await endpoint.connect() as channel:
                    figures = await measure(channel, name, blocks, max_age)
        except EdgeError as error:
            self._left_out.append((name, error))
            return None
        self._kept.speeds[key] = MeasuredSpeed(figures, self._model.name, self._model.shape)
        return self._kept.speeds[key]

    async def _link(self, worker: Worker) -> MeasuredLink | None:
        """Return the line from here to a worker; None if it cannot be measured."""
        key, name = key_of(worker), worker.name
        known = self._kept.lines.get(key)
        most = MAX_DOUBTFUL_AGE if known is not None and known.busy else MAX_LINK_AGE
        if known is not None and not self._remeasure and 0 <= time.time() - known.taken <= most:
            return known
        self._notify(name, "measuring the connection from here")
        began = time.perf_counter()
        try:
            async with await worker.reached().connect() as channel:
                opening, waiting = time.perf_counter() - began, CpuWait()
                line = await measure_link(channel, name)
        except EdgeError as error:
            self._left_out.append((name, error))
            return None
        self._kept.lines[key] = MeasuredLink(line, int(time.time()), opening, waiting.share() > BUSY)
        return self._kept.lines[key]


def _usable(worker: Worker) -> Endpoint:
    """Return how to reach a worker that may be measured. Raise EdgeError for another one."""
    endpoint = worker.reached()
    if worker.name == HERE:
        raise InvalidOption(
            f"The name {HERE!r} is reserved for this device.", "Rename the other device: edgellm peers rename here desk"
        )
    if worker.peer is not None and Right.COMPUTE not in worker.rights:
        raise NotPermitted(
            f"{worker.name} has not allowed this device to compute there.", "There: edgellm peers grant NAME compute"
        )
    return endpoint
