"""Finding the paired devices that keep layers for this one, and their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc.aio

from edgellm.errors import EdgeError, NotPaired, NotPermitted, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel, run_there
from edgellm.rpc.discovery.interfaces import PATIENCE
from edgellm.rpc.discovery.mdns import ServiceKind, browse
from edgellm.rpc.discovery.peer_probe import ASK_SECONDS, LOOK_SECONDS, any_of, longest_look
from edgellm.rpc.layers.upload import StoreFacts, list_layers
from edgellm.rpc.trust.handshake import PeerInfo, meet
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import Right, Rights
from edgellm.rpc.trust.trust import Trust


@dataclass(frozen=True, slots=True)
class Worker:
    """A device that keeps layers: its address, its layers, and the rights of this device there.

    `peer` is None for a worker on this machine that answers in plain text. `trouble` is the reason why the worker
    cannot be used; then `address` and `facts` are None.
    """

    name: str
    peer: Peer | None
    address: Address | None = None
    facts: StoreFacts | None = None
    rights: Rights = frozenset()
    round_trip: float = 0.0
    version: str = ""
    trouble: EdgeError | None = None


def find_workers(
    trust: Trust, peers: Sequence[Peer], hosts: Sequence[str], seconds: float = ASK_SECONDS
) -> list[Worker]:
    """Ask all `peers` at the addresses where they were last seen, and those that do not answer as workers at the
    addresses that they announce on the interfaces with the addresses `hosts`. Return the workers in the order of
    `peers`. Errors of a device are returned, not raised.
    """
    first = run_there(_all(trust, [(peer, peer.addresses) for peer in peers], seconds)).result()
    missing = {worker.peer.id.short for worker in first if worker.trouble is not None and worker.peer is not None}
    if not missing or not hosts:
        return first
    # several programs of one device may announce themselves, and only one keeps layers: one hint is not enough
    longest = longest_look(len(missing), len(first))
    hints = browse(ServiceKind.DEVICE, hosts, LOOK_SECONDS, longest=longest, some=any_of(missing))
    found = []
    for worker, peer in zip(first, peers, strict=True):
        heard = [place for hint in hints if hint.short == peer.id.short for place in hint.addresses]
        places = [place for place in heard if place not in peer.addresses]
        if worker.trouble is not None and places:
            again = run_there(_ask(trust, peer, places, seconds)).result()
            # a refusal says more than no answer
            worker = worker if isinstance(again.trouble, VerifierUnreachable) else again  # noqa: PLW2901
        found.append(worker)
    return found


async def reach_worker(trust: Trust | None, worker: Worker) -> grpc.aio.Channel:
    """Open a channel to a worker, which the caller closes. Raises the errors of `rpc.trust.handshake.meet`, and for a
    worker that was not found its `trouble` or NotPaired."""
    if worker.address is None:
        raise worker.trouble or NotPaired(f"Nobody knows where {worker.name} is.", "Is it on, and does it serve?")
    if worker.peer is None or trust is None:
        return open_channel(worker.address)
    channel, _welcomed = await meet(worker.address, trust, worker.peer.id)
    return channel


async def worker_at(address: Address) -> Worker:
    """Return the worker of this machine at a loopback address. Raises the errors of `rpc.layers.upload.held`."""
    async with open_channel(address) as channel:
        return Worker(str(address), None, address, await list_layers(channel, str(address)), frozenset(Right))


def worker_there(trust: Trust, name: str, address: Address, seconds: float = ASK_SECONDS) -> Worker:
    """Return the worker at an address: a paired device, by default under its name in the list of peers; or, at a
    loopback address where no paired device was met, a worker in plain text. Errors of a device are returned, not
    raised."""
    paired = not address.loopback or any(address in peer.addresses for peer in trust.peers.all())

    async def ask() -> Worker:
        if not paired:
            return replace(await worker_at(address), name=name or str(address))
        channel, welcomed = await meet(address, trust, None, seconds)
        async with channel:
            return await _met(channel, name or welcomed.peer.name, address, welcomed, seconds)

    try:
        return run_there(ask()).result()
    except EdgeError as error:
        return Worker(name or str(address), None, trouble=error)


async def _all(trust: Trust, whom: Sequence[tuple[Peer, Sequence[Address]]], seconds: float) -> list[Worker]:
    return list(await asyncio.gather(*(_ask(trust, peer, places, seconds) for peer, places in whom)))


async def _ask(trust: Trust, peer: Peer, places: Sequence[Address], seconds: float) -> Worker:
    """Ask at all addresses at once and take the first that is a worker: several programs of one device may answer."""
    trouble: EdgeError = VerifierUnreachable(
        f"Nobody knows where {peer.name} is.", "Start a worker there: edgellm serve --role worker"
    )
    tasks = [asyncio.create_task(_one(trust, peer, place, seconds)) for place in places]
    try:
        for next_one in asyncio.as_completed(tasks):
            try:
                return await next_one
            except EdgeError as error:
                if isinstance(trouble, VerifierUnreachable) or isinstance(error, NotPermitted):
                    trouble = error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Worker(peer.name, peer, trouble=trouble)


async def _one(trust: Trust, peer: Peer, place: Address, seconds: float) -> Worker:
    channel, welcomed = await meet(place, trust, peer.id, seconds)
    async with channel:
        return await _met(channel, peer.name, place, welcomed, seconds)


async def _met(channel: grpc.aio.Channel, name: str, place: Address, welcomed: PeerInfo, seconds: float) -> Worker:
    facts = await list_layers(
        channel, name, PATIENCE * seconds
    )  # it has just answered, so it is there, and perhaps busy
    return Worker(name, welcomed.peer, place, facts, welcomed.rights, welcomed.seconds, welcomed.version)
