"""Measurement of the home's devices for a plan, and doubts about the measurements."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from edgellm.coldstart.cost_model import TransformerShape
from edgellm.coldstart.hardware import Device, Link, Utilisation, fit_utilisation
from edgellm.coldstart.plan import PlannedStage
from edgellm.engine.gguf.synthetic_layers import Blocks
from edgellm.engine.timing import BUSY, CpuWait
from edgellm.errors import EdgeError, InvalidOption, NotPermitted, StateDamaged
from edgellm.layer_range import HERE
from edgellm.mesh.compute_unit import ComputeUnit
from edgellm.mesh.device_profiler import MAX_AGE, measure_device
from edgellm.mesh.fleet_file import Fleet
from edgellm.places import cache_dir
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.discovery.workers import Worker, reach_worker
from edgellm.rpc.layers.bandwidth_probe import LinkSpeed, measure_link, request_link_measurement
from edgellm.rpc.layers.benchmark_service import DeviceFigures, measure
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.storage.device_speed import MAX_DOUBTFUL_AGE
from edgellm.storage.state import from_json, read_json, write_state

FAR = 8.0
"""The factor between measured and planned time from which a figure counts as wrong, and not just the planner's model as
inexact."""
_LEAST = 1e-4  # seconds: shorter times say nothing of a line


@dataclass(frozen=True, slots=True)
class Doubt:
    """A doubt about the figures measured at `taken` (seconds since 1970, UTC). `again`: they are to be measured again;
    else they come from such a new measurement, and are not doubted any more."""

    taken: int
    again: bool


def disproved(found: PlannedStage, planned: PlannedStage) -> Iterator[tuple[str, float, float]]:
    """Yield what a stage did in a time far from what was planned: "computing", "loading" or "network", and the seconds
    that were measured and planned."""
    times = {
        "computing": (found.compute_s, planned.compute_s),
        "loading": (found.load_s, planned.load_s),
        "network": (found.network_s, planned.network_s),
    }
    for what, (took, expected) in times.items():
        shorter, longer = sorted((took, expected))
        if shorter > 0.0 and longer > max(_LEAST, FAR * shorter):
            yield what, took, expected


def doubt(key: str, taken: int) -> bool:
    """Have the figures of `key` that were measured at `taken` measured again; return whether that will be."""
    doubts = read_doubts()
    known = doubts.get(key)
    if known is not None and known.taken == taken and not known.again:
        return False
    _write_doubts({**doubts, key: Doubt(taken, again=True)})
    return True


def resolve_doubt(key: str, taken: int) -> None:
    """Record that the figures of `key` were measured again, at `taken`."""
    doubts = read_doubts()
    if key in doubts:
        _write_doubts({**doubts, key: Doubt(taken, again=False)})


def read_doubts() -> dict[str, Doubt]:
    """Return all doubts, by device or by both ends of a line; none where the file is damaged."""
    with suppress(StateDamaged):
        return read_json(_path(), lambda found: {key: from_json(Doubt, row) for key, row in found.items()}) or {}
    return {}


def _write_doubts(doubts: Mapping[str, Doubt]) -> None:
    """Write the doubts. If that fails, the figures are doubted again after the next reply."""
    with suppress(OSError):
        write_state(_path(), json.dumps({key: asdict(one) for key, one in doubts.items()}))


def _path() -> Path:
    return cache_dir() / "figures" / "doubts.json"


MAX_LINK_AGE = 86_400.0  # seconds; a device that has moved to another room since has another line
_NO_LIMIT = 1e12  # bits/s of this device's own side: the limits are in the lines

Notify = Callable[[str, str], None]
"""Called with the device and what is being measured of it."""


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """What a device can do with a model's layers: figures, and the model's name and shape."""

    figures: DeviceFigures
    model: str
    shape: TransformerShape

    @property
    def utilisation(self) -> Utilisation:
        rows, seconds = self.figures.rows, self.figures.seconds
        return fit_utilisation(rows, [self.shape.flops(n) / taken for n, taken in zip(rows, seconds, strict=True)])


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A line, when it was measured (seconds since 1970, UTC), why then, the share of the time for which this process
    waited for a processor, and the seconds to connect, where that was measured."""

    line: LinkSpeed
    taken: int
    reason: str
    waited: float = 0.0
    opening: float = 0.0

    @property
    def doubtful(self) -> bool:
        """Whether this device was busy while the line was measured."""
        return self.waited > BUSY


@dataclass(frozen=True, slots=True)
class Survey:
    """Each device's speed by name, this one's as `HERE`; lines by the names of both ends; devices left out, and why."""

    speeds: Mapping[str, MeasuredSpeed]
    lines: Mapping[tuple[str, str], MeasuredLink]
    workers: Mapping[str, Worker]
    left_out: tuple[tuple[str, EdgeError], ...]

    def fleet(self) -> Fleet:
        """Return the fleet for the planner."""
        devices = tuple(self._device(name, speed) for name, speed in self.speeds.items())
        links = {}
        for (one, other), stored in self.lines.items():
            latency = stored.line.round_trip / 2.0
            links[one, other] = Link(stored.line.up, latency)
            links[other, one] = Link(stored.line.down, latency)
        return Fleet(devices, links)

    def doubts(self) -> list[str]:
        """Return a sentence for each figure that is doubtful."""
        found = [f"The figures of {name} are doubtful: {speed.figures.doubt}." for name, speed in self.speeds.items()
                 if speed.figures.doubt]  # fmt: skip
        for (one, other), stored in self.lines.items():
            if stored.doubtful:
                found.append(f"The connection from {one} to {other} was measured while this machine was busy.")
        return [*found, "Run again with --measure when the devices are idle."] if found else []

    def _device(self, name: str, speed: MeasuredSpeed) -> Device:
        """Return a device for the planner. Between two devices without a measured line, data is taken to pass through
        the home's network as it does between each of them and this one."""
        figures, curve = speed.figures, speed.utilisation
        stored = self.lines.get((HERE, name))
        up, down, latency, opening = _NO_LIMIT, _NO_LIMIT, 0.0, 0.0
        if stored is not None:
            up, down, latency = stored.line.down, stored.line.up, stored.line.round_trip / 2.0
            opening = stored.opening
        reading = figures.layer / figures.seconds[0] if figures.rows[0] == 1 else 0.0
        return Device(
            name, curve.peak, 1.0, curve.b, figures.disk, float(max(1, figures.memory)), up, down, latency, reading,
            unit=figures.unit, opening=opening,
        )  # fmt: skip


def survey(
    trust: Trust,
    workers: Sequence[Worker],
    blocks: Blocks,
    model: str,
    shape: TransformerShape,
    *,
    remeasure: bool = False,
    notify: Notify = lambda _who, _what: None,
    with_here: bool = True,
    unit: ComputeUnit = ComputeUnit(),
) -> Survey:
    """Measure what is not known, or too old, of this device, where the `unit` computes, and of the workers that answer;
    `remeasure`: everything.

    The devices measure themselves at the same time, the lines one after the other. A device that fails does not raise:
    if it cannot be measured, it is left out.
    """
    return run_in_network_loop(
        _Surveyor(trust, blocks, model, shape, remeasure, notify, unit).all(workers, with_here)
    ).result()


class _Surveyor:
    def __init__(
        self, trust: Trust, blocks: Blocks, model: str, shape: TransformerShape, remeasure: bool, notify: Notify,
        unit: ComputeUnit,
    ) -> None:  # fmt: skip
        self._trust, self._blocks, self._model, self._shape = trust, blocks, model, shape
        self._remeasure, self._notify, self._unit = remeasure, notify, unit
        self._left_out: list[tuple[str, EdgeError]] = []
        self._links = read_links()
        self._doubts = read_doubts()

    async def all(self, workers: Sequence[Worker], with_here: bool) -> Survey:
        devices = [None, *workers] if with_here else list(workers)
        found = await asyncio.gather(*(self._speed(worker) for worker in devices))
        available = [(worker, speed) for worker, speed in zip(devices, found, strict=True) if speed is not None]
        links: dict[tuple[str, str], MeasuredLink] = {}
        for worker, _speed in available:
            if worker is not None and (stored := await self._link_from_here(worker)):
                links[HERE, worker.name] = stored
        reached = [worker for worker, _ in available if worker is not None and (HERE, worker.name) in links]
        for one, other in combinations(reached, 2):
            if stored := await self._link_between(one, other):
                links[one.name, other.name] = stored
        store_links(self._links)
        speeds = {
            HERE if worker is None else worker.name: speed
            for worker, speed in available
            if worker is None or worker in reached
        }
        return Survey(speeds, links, {worker.name: worker for worker in reached}, tuple(self._left_out))

    async def _speed(self, worker: Worker | None) -> MeasuredSpeed | None:
        doubted = self._is_doubted(_key(worker))
        max_age = 0.0 if self._remeasure or doubted else MAX_AGE
        name = HERE if worker is None else worker.name
        try:
            if worker is None:
                figures = await asyncio.to_thread(
                    measure_device, self._blocks, max_age, lambda what: self._notify(HERE, what), unit=self._unit
                )
            else:
                _check_usable(worker)
                self._notify(name, "measuring itself")
                async with await reach_worker(self._trust, worker) as channel:
                    figures = await measure(channel, name, self._blocks, max_age)
        except EdgeError as error:
            self._left_out.append((name, error))
            return None
        if doubted:
            resolve_doubt(_key(worker), figures.taken)
        speed = MeasuredSpeed(figures, self._model, self._shape)
        store_speed(_key(worker), speed)
        return speed

    async def _link_from_here(self, worker: Worker) -> MeasuredLink | None:
        key = (HERE, _key(worker))
        if (known := self._known(key)) is not None:
            return known
        self._notify(worker.name, "measuring the connection from here")
        began = time.perf_counter()
        try:
            async with await reach_worker(self._trust, worker) as channel:
                opening, waiting = time.perf_counter() - began, CpuWait()
                line = await measure_link(channel, worker.name)
                return self._store(key, line, waiting.share(), opening)
        except EdgeError as error:
            self._left_out.append((worker.name, error))
            return None

    async def _link_between(self, one: Worker, other: Worker) -> MeasuredLink | None:
        """Return the line between two workers; None if they cannot reach each other, usually for not being paired."""
        key = (_key(one), _key(other))
        known = self._known(key)
        if known is not None or one.peer is None or other.peer is None:
            return known
        self._notify(one.name, f"measuring the connection to {other.name}")
        with suppress(EdgeError):
            async with await reach_worker(self._trust, one) as channel:
                return self._store(key, await request_link_measurement(channel, one.name, other.peer.id, other.address))
        return None

    def _known(self, key: tuple[str, str]) -> MeasuredLink | None:
        known = self._links.get(key)
        if known is None or self._remeasure or self._is_doubted(link_key(*key)) or not _is_recent(known):
            return None
        return known

    def _is_doubted(self, key: str) -> bool:
        doubt = self._doubts.get(key)
        return doubt is not None and doubt.again

    def _store(self, key: tuple[str, str], line: LinkSpeed, waited: float = 0.0, opening: float = 0.0) -> MeasuredLink:
        before = self._links.get(key)
        reason = "asked for" if self._remeasure else "never measured" if before is None else "too old"
        if before is not None and not self._remeasure and self._is_doubted(link_key(*key)):
            reason = "a reply took a different time"
        elif before is not None and not self._remeasure and time.time() - before.taken <= MAX_LINK_AGE:
            reason = "this machine was busy"
        self._links[key] = MeasuredLink(line, int(time.time()), reason, waited, opening)
        resolve_doubt(link_key(*key), self._links[key].taken)
        return self._links[key]


def _check_usable(worker: Worker) -> None:
    if worker.error is not None:
        raise worker.error
    if worker.name == HERE:
        raise InvalidOption(
            f"The name {HERE!r} is reserved for this device.", "Rename the other device: edgellm peers rename here desk"
        )
    if worker.peer is not None and Right.COMPUTE not in worker.rights:
        raise NotPermitted(
            f"{worker.name} has not granted this device the right to compute there.",
            "On that device: edgellm peers grant NAME compute",
        )


def _is_recent(stored: MeasuredLink) -> bool:
    return (
        -60.0
        <= time.time() - stored.taken
        <= (min(MAX_DOUBTFUL_AGE, MAX_LINK_AGE) if stored.doubtful else MAX_LINK_AGE)
    )


def link_key(one: str, other: str) -> str:
    """Return the key of the line between two devices in files."""
    return f"{one} {other}"


def doubt_figures(worker: Worker | None, what: str) -> bool:
    """Have a device's figures that a reply has disproved, "computing", "loading" or "network", measured again; return
    whether they will be."""
    if what != "network":
        speed = stored_speed(worker)
        return speed is not None and doubt(_key(worker), speed.figures.taken)
    link = None if worker is None else stored_link(worker)
    return link is not None and doubt(link_key(HERE, _key(worker)), link.taken)


def _key(worker: Worker | None) -> str:
    """Return the key of a device in files: its ID, as names change."""
    if worker is None:
        return HERE
    return str(worker.address) if worker.peer is None else str(worker.peer.id)


def stored_speed(worker: Worker | None) -> MeasuredSpeed | None:
    """Return the last measurement of a device, whatever the model."""
    try:
        return read_json(_speeds(_key(worker)), _speed)
    except StateDamaged:
        return None


def _speed(found: Any) -> MeasuredSpeed:
    return MeasuredSpeed(
        from_json(DeviceFigures, found["figures"]), str(found["model"]), TransformerShape(**found["shape"])
    )


def stored_link(worker: Worker) -> MeasuredLink | None:
    """Return the last measurement of the line from here."""
    return read_links().get((HERE, _key(worker)))


def store_speed(key: str, speed: MeasuredSpeed) -> None:
    _write(_speeds(key), {"figures": asdict(speed.figures), "model": speed.model, "shape": asdict(speed.shape)})


def read_links() -> dict[tuple[str, str], MeasuredLink]:
    """Return all lines that were measured, by the keys of both ends."""
    try:
        return read_json(_links_path(), lambda rows: dict(map(_link_from_json, rows))) or {}
    except StateDamaged:
        return {}


def _link_from_json(row: Any) -> tuple[tuple[str, str], MeasuredLink]:
    line = LinkSpeed(float(row["round_trip"]), float(row["up"]), float(row["down"]))
    stored = MeasuredLink(line, int(row["taken"]), str(row["reason"]), float(row["waited"]), float(row["opening"]))
    return (str(row["from"]), str(row["to"])), stored


def store_links(lines: Mapping[tuple[str, str], MeasuredLink]) -> None:
    rows = [
        {"from": ends[0], "to": ends[1], **asdict(stored.line), "taken": stored.taken, "reason": stored.reason,
         "waited": stored.waited, "opening": stored.opening}
        for ends, stored in lines.items()
    ]  # fmt: skip
    _write(_links_path(), rows)


def _write(path: Path, found: Any) -> None:
    """Write a file of measurements. If that fails, they are made again next time."""
    with suppress(OSError):
        write_state(path, json.dumps(found))


def _speeds(key: str) -> Path:
    return cache_dir() / "figures" / f"device-{key.replace(':', '_')}.json"


def _links_path() -> Path:
    return cache_dir() / "figures" / "lines.json"
