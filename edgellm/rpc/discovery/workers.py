"""Discovery of the workers among the paired devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc.aio

from edgellm.errors import EdgeError, NotPaired
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO_SECONDS, open_channel, run_in_network_loop
from edgellm.rpc.discovery.interfaces import RETRY_FACTOR
from edgellm.rpc.discovery.peer_probe import ask_peers
from edgellm.rpc.layers import list_layers
from edgellm.rpc.trust.handshake import PeerInfo, connect_authenticated
from edgellm.rpc.trust.trust import Peer, Right, Rights, Trust
from edgellm.storage.layer_store import StoreFacts


@dataclass(frozen=True, slots=True)
class Worker:
    """A device that keeps layers: its address, its layers, and the rights of this device there. `peer` is None for a
    worker on this machine that answers in plain text. `error` is the reason why the worker cannot be used; then
    `address` and `facts` are None."""

    name: str
    peer: Peer | None
    address: Address | None = None
    facts: StoreFacts | None = None
    rights: Rights = frozenset()
    round_trip: float = 0.0
    version: str = ""
    error: EdgeError | None = None


def find_workers(trust: Trust, peers: Sequence[Peer], hosts: Sequence[str]) -> list[Worker]:
    """Return each of `peers` as a worker, as `ask_peers` finds them. Errors of a device are returned, not raised."""

    async def read(peer: Peer, address: Address) -> Worker:
        channel, info = await connect_authenticated(address, trust, peer.id)
        async with channel:
            return await _read_worker(channel, peer.name, address, info)

    return [
        Worker(peer.name, peer, error=answer) if isinstance(answer, EdgeError) else answer
        for peer, answer in zip(peers, ask_peers(peers, read, hosts, every_hint=True), strict=True)
    ]


async def reach_worker(trust: Trust | None, worker: Worker) -> grpc.aio.Channel:
    """Return an open channel to a worker; the caller closes it."""
    if worker.address is None:
        raise worker.error or NotPaired(f"No address of {worker.name} is known.", "Check that it is on and serves.")
    if worker.peer is None or trust is None:
        return open_channel(worker.address)
    channel, _info = await connect_authenticated(worker.address, trust, worker.peer.id)
    return channel


async def local_worker(address: Address) -> Worker:
    async with open_channel(address) as channel:
        return Worker(str(address), None, address, await list_layers(channel, str(address)), frozenset(Right))


def worker_at_address(trust: Trust, name: str, address: Address) -> Worker:
    """Return the worker at an address: a paired device, by default under its name in the list of peers; or, at a
    loopback address where no paired device was met, a worker in plain text. Errors of a device are returned, not
    raised."""
    paired = not address.loopback or any(address in peer.addresses for peer in trust.peers.all())

    async def probe() -> Worker:
        if not paired:
            return replace(await local_worker(address), name=name or str(address))
        channel, info = await connect_authenticated(address, trust)
        async with channel:
            return await _read_worker(channel, name or info.peer.name, address, info)

    try:
        return run_in_network_loop(probe()).result()
    except EdgeError as error:
        return Worker(name or str(address), None, error=error)


async def _read_worker(channel: grpc.aio.Channel, name: str, address: Address, info: PeerInfo) -> Worker:
    # the device has just answered, so a late reply means that it is busy
    facts = await list_layers(channel, name, RETRY_FACTOR * HELLO_SECONDS)
    return Worker(name, info.peer, address, facts, info.rights, info.seconds, info.version)
