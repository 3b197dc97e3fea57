"""Which of the paired devices keep layers for this one, and where they are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc.aio

from edgellm.errors import EdgeError, NotPaired, NotPermitted, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel
from edgellm.rpc.discovery.mdns import ServiceKind, browse
from edgellm.rpc.discovery.peer_probe import ASK_SECONDS, LOOK_SECONDS, any_of, longest_look
from edgellm.rpc.discovery.tcp_probe import PATIENCE
from edgellm.rpc.event_loop import run_there
from edgellm.rpc.layers.upload import StoreFacts, held
from edgellm.rpc.trust.handshake import Welcomed, meet
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import Right, Rights
from edgellm.rpc.trust.trust import Trust


@dataclass(frozen=True, slots=True)
class Worker:
    """A device that keeps layers: where it answers, what it has, and what this device may do there.

    `peer` is None for one on this machine that answers in plain text. `trouble`: why it cannot be used; then `address`
    and `facts` are None.
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
    """Asks `peers` where they were last seen; those that do not answer as workers, where they announce themselves on
    the interfaces with the addresses `hosts`. In the order of `peers`. Raises nothing of what a device may do.
    """
    first = run_there(_all(trust, [(peer, peer.addresses) for peer in peers], seconds)).result()
    missing = {worker.peer.id.short for worker in first if worker.trouble is not None and worker.peer is not None}
    if not missing or not hosts:
        return first
    # several programs of one device announce themselves, and one of them keeps layers: one hint is not enough
    longest = longest_look(len(missing), len(first))
    hints = browse(ServiceKind.DEVICE, hosts, LOOK_SECONDS, longest=longest, some=any_of(missing))
    found = []
    for worker, peer in zip(first, peers, strict=True):
        heard = [place for hint in hints if hint.short == peer.id.short for place in hint.addresses]
        places = [place for place in heard if place not in peer.addresses]
        if worker.trouble is not None and places:
            again = run_there(_ask(trust, peer, places, seconds)).result()
            # that it refuses says more than that nobody is there
            worker = worker if isinstance(again.trouble, VerifierUnreachable) else again  # noqa: PLW2901
        found.append(worker)
    return found


async def reach_worker(trust: Trust | None, worker: Worker) -> grpc.aio.Channel:
    """A line to a worker, which the caller closes. Raises what `rpc.trust.handshake.meet` raises, and NotPaired for a
    worker that was not found."""
    if worker.address is None:
        raise worker.trouble or NotPaired(f"Nobody knows where {worker.name} is.", "Is it on, and does it serve?")
    if worker.peer is None or trust is None:
        return open_channel(worker.address)
    channel, _welcomed = await meet(worker.address, trust, worker.peer.id)
    return channel


async def worker_at(address: Address) -> Worker:
    """The worker of this machine at a loopback address. Raises what `edgellm.rpc.layers.upload.held` raises."""
    async with open_channel(address) as channel:
        return Worker(str(address), None, address, await held(channel, str(address)), frozenset(Right))


def worker_there(trust: Trust, name: str, address: Address, seconds: float = ASK_SECONDS) -> Worker:
    """The worker at an address: a paired device, called as it is here where no `name` is given; or on this machine, in
    plain text, where no paired device was met there. Raises nothing of what a device may do."""
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
    """Knocks at all places at once; several programs of one device may answer, of which one keeps layers."""
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


async def _met(channel: grpc.aio.Channel, name: str, place: Address, welcomed: Welcomed, seconds: float) -> Worker:
    facts = await held(channel, name, PATIENCE * seconds)  # it has just answered: it is there, and perhaps busy
    return Worker(name, welcomed.peer, place, facts, welcomed.rights, welcomed.seconds, welcomed.version)
