"""The home's workers: those that are there, what they can do, and the parts of a split for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgellm.engine import ModelFile
from edgellm.engine.gguf.synthetic_layers import blocks_of
from edgellm.errors import InvalidOption, NotPaired
from edgellm.layer_range import HERE, StageShare
from edgellm.mesh.deploy import DeployPart
from edgellm.mesh.fleet_profiler import Notify, Survey, survey
from edgellm.mesh.model_costs import model_costs
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_there
from edgellm.rpc.discovery.workers import Worker, find_workers, reach_worker, worker_at, worker_there
from edgellm.rpc.layers.upload import clean
from edgellm.rpc.trust.trust import Trust


def seek(hosts: Sequence[str], places: Sequence[tuple[str, Address]] = ()) -> list[Worker]:
    """Return the workers of the home; those that cannot be used have the reason as `trouble`.

    `hosts` are this device's addresses at which to listen for announcements. `places` are addresses of further workers,
    or of paired ones that do not announce themselves, each with a name or an empty one.

    Raises:
        InvalidOption: two workers have the same name.
    """
    trust = Trust.here()
    named = [worker_there(trust, name, address) for name, address in places]
    there = {worker.peer.id for worker in named if worker.peer is not None}
    found = [*named, *find_workers(trust, [peer for peer in trust.peers.all() if peer.id not in there], hosts)]
    names = [worker.name for worker in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidOption(f"Two devices are called {twice!r}.", "Give the other another name: --peer NAME=HOST:PORT")
    return found


def look(model: ModelFile, workers: Sequence[Worker], fresh: bool, notify: Notify) -> Survey:
    """Measure this device and these workers for a model; `fresh`: also where figures are known.

    Raises what `blocks_of` and `model_costs` raise.
    """
    planned = model_costs(model)
    return survey(Trust.here(), workers, blocks_of(model), planned.name, planned.shape, fresh=fresh, notify=notify)


def read_place(text: str) -> tuple[str, Address]:
    """Parse the value of `--peer`, [NAME=]HOST:PORT: a name, empty if none is given, and an address.

    Raises:
        InvalidOption: there is no valid address.
    """
    name, _, where = text.rpartition("=")
    return name.strip(), Address.parse(where)


def parts_of(split: Sequence[StageShare], workers: Mapping[str, Worker]) -> list[DeployPart]:
    """Return the parts of a split, with devices looked up by name; workers on this machine by HOST:PORT.

    Raises:
        NotPaired: no device has that name.
        InvalidOption: a device is named twice.
        EdgeError: a device cannot be used; says why.
    """
    names = [one.name for one in split]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidOption(f"{twice} is named twice.", "Give each device its layers in one part.")
    return [DeployPart(_worker(one.name, workers), one.layers) for one in split]


def _worker(name: str, workers: Mapping[str, Worker]) -> Worker | None:
    if name == HERE:
        return None
    worker = workers.get(name)
    if worker is None and ":" in name:
        return run_there(worker_at(Address.parse(name).require_loopback())).result()
    if worker is None:
        there = ", ".join([HERE, *workers])
        raise NotPaired(f"No paired device is called {name!r}.", f"There are: {there}. Pair one with: edgellm pair")
    if worker.trouble is not None:
        raise worker.trouble
    return worker


def clean_worker(worker: Worker, fingerprint: str = "") -> tuple[int, int, int]:
    """Have a worker remove what is not in use, of one model or of all; return the pieces and the bytes removed, and the
    pieces kept. Raise what `edgellm.rpc.layers.upload.clean` raises."""

    async def work() -> tuple[int, int, int]:
        async with await reach_worker(Trust.here() if worker.peer else None, worker) as channel:
            return await clean(channel, worker.name, fingerprint)

    return run_there(work()).result()
