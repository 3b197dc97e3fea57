"""The best stages on the devices of a home, and what they still lack for others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgellm.coldstart.hardware import Device, LayersOnDevice
from edgellm.engine import ModelFile
from edgellm.errors import EdgeError
from edgellm.layer_range import HERE, StageShare
from edgellm.llm.home.target import PlanTarget
from edgellm.llm.mesh_llm import LocalDevice, overhead_of, planned_phases, positions_of
from edgellm.mesh.compute_unit import ComputeUnit
from edgellm.mesh.fleet_file import Fleet
from edgellm.mesh.ggml_rpc.engine_choice import EngineTimes
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.model_costs import model_costs
from edgellm.mesh.phases.phased_placement import PhasedPlacement
from edgellm.mesh.placement import Placement, missing, place

if TYPE_CHECKING:
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.rpc.discovery.workers import Worker

PLAN_SECONDS = 5.0  # for the planner; then the best plan so far is taken

Asked = Sequence[tuple[Device, Device | EdgeError]]
"""Devices as they were measured, each as it is now, with its layers; or why it cannot be used."""


@dataclass(frozen=True, slots=True)
class StagesAtHome:
    """The `placement` that begins a reply with stages; `phased`: how it goes on, None if it stays as it begins."""

    placement: Placement
    phased: PhasedPlacement | None

    @property
    def times(self) -> EngineTimes:
        if self.phased is None:
            return EngineTimes(self.placement.option.ttft_s, self.placement.option.reply_s)
        reply = self.phased.plan.reply
        return EngineTimes(reply.ttft, reply.seconds)


def place_stages(
    file: ModelFile, home: Survey, target: PlanTarget, asked: Asked | None = None, seconds: float = PLAN_SECONDS
) -> StagesAtHome:
    """Return the best stages of the model in `file` on the surveyed devices, with the layers that these have. `asked`
    are the devices, if they were asked already. After `seconds` the best plan so far is taken.

    Raises:
        ModelUnsupported, ModelCorrupt: the model cannot be split.
        PlanImpossible: the devices cannot hold it; says which layers to send where, if that helps.
    """
    overhead = overhead_of(
        file.header, positions_of(file, target.positions), target.sessions, target.hardware.cache_type
    )
    devices: list[Device] = []
    left_out = [(name, error.what) for name, error in home.left_out]
    for device, found in ask_devices(file, home, target) if asked is None else asked:
        if isinstance(found, Device):
            devices.append(found)
        else:
            left_out.append((device.name, found.what))
    fleet, model, began = Fleet(tuple(devices), home.fleet().links), model_costs(file), time.monotonic()
    placed = place(
        model, fleet, home.workers, tokens_in=target.tokens_in, tokens_out=target.tokens_out,
        objective=target.objective, left_out=left_out, overhead=overhead,
        stop=lambda: time.monotonic() - began > seconds, cold=target.cold,
    )  # fmt: skip
    phased = planned_phases(
        fleet, model, placed.shares, tokens_in=target.tokens_in, tokens_out=target.tokens_out,
        objective=target.objective, overhead=overhead, cold=target.cold,
    )  # fmt: skip
    return StagesAtHome(placed, phased)


def ask_devices(file: ModelFile, home: Survey, target: PlanTarget) -> Asked:
    """Ask all surveyed devices at once for the layers that they have. If everything is loaded (`PlanTarget.cold`), none
    is asked: each has whichever it is given."""
    devices = home.fleet().devices
    if not target.cold:
        return [(device, device) for device in devices]
    return _asked(devices, WholeModel(file), home.workers, ComputeUnit.choose(target.hardware))


def missing_layers(
    file: ModelFile, shares: Sequence[StageShare], home: Survey, asked: Asked | None = None
) -> list[tuple[str, int]]:
    """Return the bytes that each device of a split over the surveyed ones still lacks of its layers, by name. This
    device has the model; one that no longer answers is taken to lack all of its layers. `asked` are the devices, if
    they were asked already."""
    names = [share.name for share in shares]
    if names == [HERE]:
        return [(HERE, 0)]
    if asked is None:
        named_devices = [device for device in home.fleet().devices if device.name in names]
        asked = _asked(named_devices, WholeModel(file), home.workers, ComputeUnit())
    devices = [
        found if isinstance(found, Device) else replace(device, layers=LayersOnDevice(frozenset()))
        for device, found in asked
    ]
    lacking = {one.share.name: one.size for one in missing(model_costs(file), shares, devices)}
    return [(name, lacking.get(name, 0)) for name in names]


def _asked(devices: Sequence[Device], whole: WholeModel, workers: Mapping[str, Worker], unit: ComputeUnit) -> Asked:
    """Return each of these devices as it is now, or why it cannot be used. All are asked at once."""
    from edgellm.services.client.worker_selection import remote_device

    def ask(known: Device) -> tuple[Device, Device | EdgeError]:
        try:
            if known.name == HERE:
                return known, LocalDevice(whole, unit, known).describe(whole.model)
            return known, remote_device(workers[known.name], known, whole.own_pieces).describe(whole.model)
        except EdgeError as error:
            return known, error

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(ask, devices))
