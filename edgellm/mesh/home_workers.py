"""The home's workers: discovery, measurement, and the parts of a split for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgellm.engine import ModelFile
from edgellm.engine.gguf.stand_in import stand_in
from edgellm.engine.gguf.synthetic_layers import blocks_of
from edgellm.engine.hardware import ON_PROCESSOR, Hardware
from edgellm.errors import InvalidOption, NotPaired
from edgellm.layer_range import HERE, StageShare
from edgellm.mesh.compute_unit import ComputeUnit
from edgellm.mesh.deploy import DeployPart
from edgellm.mesh.fleet_profiler import Notify, Survey, TimedModel, survey
from edgellm.mesh.model_costs import model_costs, shape_of
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.discovery.workers import Worker, find_workers, local_worker, reach_worker, worker_at_address
from edgellm.rpc.layers.upload import clean
from edgellm.rpc.trust.trust import Trust


def discover_workers(hosts: Sequence[str], addresses: Sequence[tuple[str, Address]] = ()) -> list[Worker]:
    """Return the workers of the home; those that cannot be used have the reason as `error`.

    `hosts` are this device's addresses at which to listen for announcements. `addresses` are addresses of further
    workers, or of paired ones that do not announce themselves, each with a name or an empty one.

    Raises:
        InvalidOption: two workers have the same name.
    """
    trust = Trust.load()
    named = [worker_at_address(trust, name, address) for name, address in addresses]
    known = {worker.peer.id for worker in named if worker.peer is not None}
    found = [*named, *find_workers(trust, [peer for peer in trust.peers.all() if peer.id not in known], hosts)]
    names = [worker.name for worker in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidOption(
            f"Two devices are called {twice!r}.", "Give one of them another name: --peer NAME=HOST:PORT"
        )
    return found


def measure_workers(
    model: ModelFile, workers: Sequence[Worker], remeasure: bool, notify: Notify, hardware: Hardware = ON_PROCESSOR,
    *, by_stand_in: bool = False,
) -> Survey:  # fmt: skip
    """Return measurements of this device, where `hardware` has it compute, and these workers for a model; `remeasure`:
    ignore stored ones. `by_stand_in`: layers are timed that stand in for those of a model that cannot be cut.

    Raises the errors of `ComputeUnit.choose`, `blocks_of` and `model_costs`, or `stand_in`.
    """
    unit = ComputeUnit.choose(hardware)
    if by_stand_in:
        blocks, known = stand_in(model)
        timed = TimedModel(blocks, model.name, shape_of(known))
    else:
        timed = TimedModel(blocks_of(model), model.name, model_costs(model).shape)
    return survey(Trust.load(), workers, timed, remeasure=remeasure, notify=notify, unit=unit)


def parse_peer(text: str) -> tuple[str, Address]:
    """Return name and address from the value of `--peer`, [NAME=]HOST:PORT; the name is empty if none is given.

    Raises:
        InvalidOption: there is no valid address.
    """
    name, _, address = text.rpartition("=")
    return name.strip(), Address.parse(address)


def deploy_parts(split: Sequence[StageShare], workers: Mapping[str, Worker]) -> list[DeployPart]:
    """Return the parts of a split, with devices looked up by name; workers on this machine by HOST:PORT.

    Raises:
        NotPaired: no device has that name.
        InvalidOption: a device is named twice.
        EdgeError: a device cannot be used; says why.
    """
    names = [share.name for share in split]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidOption(f"{twice} is named twice.", "Give each device its layers in one part.")
    return [DeployPart(_worker(share.name, workers), share.layers) for share in split]


def _worker(name: str, workers: Mapping[str, Worker]) -> Worker | None:
    if name == HERE:
        return None
    worker = workers.get(name)
    if worker is None and ":" in name:
        return run_in_network_loop(local_worker(Address.parse(name).require_loopback())).result()
    if worker is None:
        names = ", ".join([HERE, *workers])
        raise NotPaired(f"No paired device is called {name!r}.", f"Devices: {names}. Pair one with: edgellm pair")
    if worker.error is not None:
        raise worker.error
    return worker


def clean_worker(worker: Worker, fingerprint: str = "") -> tuple[int, int, int]:
    """Remove pieces that are not in use from a worker, of one model or of all; return the number of pieces and bytes
    removed, and of pieces in use. Raise the errors of `edgellm.rpc.layers.upload.clean`."""

    async def work() -> tuple[int, int, int]:
        async with await reach_worker(Trust.load() if worker.peer else None, worker) as channel:
            return await clean(channel, worker.name, fingerprint)

    return run_in_network_loop(work()).result()
