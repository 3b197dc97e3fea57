"""From names and addresses of workers to their endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgellm.coldstart.hardware import Device
from edgellm.errors import InvalidOption, NotPaired, NotPermitted
from edgellm.layer_range import HERE
from edgellm.mesh.fleet_profiler import parse_peer
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.rpc.discovery.peer_probe import probe_peers
from edgellm.rpc.discovery.workers import Worker
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.services.client.stage_client import Endpoint, OwnPieces, RemoteDevice
from edgellm.services.client.verifier_selection import trust_for


def remote_devices(
    names: Sequence[str], peers: Sequence[str], discovered: Sequence[Worker], known: Mapping[str, Device],
    own: OwnPieces,
) -> dict[str, RemoteDevice]:  # fmt: skip
    """Return workers by name: those that were `discovered`, or else those at the addresses `peers`; and all further
    `names` but `HERE`, which are addresses or names of paired devices. `known` are those that were measured; `own` is
    as for `RemoteDevice`.

    Raises:
        InvalidOption, NotPermitted, NotPaired, EdgeError: a device does not answer, has granted this one no right to
            compute there, or cannot be used.
    """
    if discovered:
        endpoints = {worker.name: endpoint_of(worker) for worker in discovered}
    else:
        endpoints = {endpoint.name: endpoint for endpoint in map(_endpoint_at, peers)}
    endpoints |= _resolved([name for name in dict.fromkeys(names) if name not in (HERE, *endpoints)])
    return {name: RemoteDevice(where, known=known.get(name), own=own) for name, where in endpoints.items()}


def remote_device(worker: Worker, known: Device, own: OwnPieces) -> RemoteDevice:
    """Return a discovered worker that was measured. Raise why it cannot be used."""
    return RemoteDevice(endpoint_of(worker), known=known, own=own)


def endpoint_of(worker: Worker) -> Endpoint:
    """Return the endpoint of a discovered worker. Raise why it cannot be used."""
    if worker.address is None:
        raise worker.error or NotPaired(
            f"The address of {worker.name} is unknown.", "Check that it is switched on and runs edgellm serve."
        )
    if worker.peer is None:
        return Endpoint(worker.name, worker.address)
    return Endpoint(worker.name, worker.address, Trust.load(), worker.peer.id)


def _endpoint_at(text: str) -> Endpoint:
    name, address = parse_peer(text)
    return Endpoint(name or str(address), address, trust_for(address))


def _resolved(names: Sequence[str]) -> dict[str, Endpoint]:
    """Return the endpoints of devices, given an address or a paired device's name each. Paired ones are all asked at
    once."""
    found = {name: _endpoint_at(name) for name in names if ":" in name}
    paired = [name for name in names if name not in found]
    if not paired:
        return found
    trust = Trust.load()
    for name, answer in zip(
        paired, probe_peers(trust, list(map(trust.peers.find, paired)), chosen_hosts()), strict=True
    ):
        if answer.info is None:
            raise answer.error or InvalidOption(
                f"{name} does not answer.", f"Give its address: --peer {name}=HOST:PORT"
            )
        if Right.COMPUTE not in answer.info.rights:
            raise NotPermitted(
                f"{name} does not allow this device to have layers computed there.",
                f"To allow it, run there: edgellm peers grant {trust.identity.id.short} compute",
            )
        found[name] = Endpoint(name, answer.info.address, trust, answer.peer.id)
    return found
