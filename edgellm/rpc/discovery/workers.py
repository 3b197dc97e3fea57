"""Discovery of the workers among the paired devices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc.aio

from edgellm.errors import EdgeError, NotPaired, NotPermitted, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel, run_in_network_loop
from edgellm.rpc.discovery.interfaces import RETRY_FACTOR
from edgellm.rpc.discovery.mdns import ServiceKind, browse
from edgellm.rpc.discovery.peer_probe import BROWSE_SECONDS, PROBE_SECONDS, any_of, max_browse_seconds
from edgellm.rpc.layers.upload import StoreFacts, list_layers
from edgellm.rpc.trust.handshake import PeerInfo, connect_authenticated
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import Right, Rights
from edgellm.rpc.trust.trust import Trust


@dataclass(frozen=True, slots=True)
class Worker:
    """A device that keeps layers: its address, its layers, and the rights of this device there.

    `peer` is None for a worker on this machine that answers in plain text. `error` is the reason why the worker
    cannot be used; then `address` and `facts` are None.
    """

    name: str
    peer: Peer | None
    address: Address | None = None
    facts: StoreFacts | None = None
    rights: Rights = frozenset()
    round_trip: float = 0.0
    version: str = ""
    error: EdgeError | None = None


def find_workers(
    trust: Trust, peers: Sequence[Peer], hosts: Sequence[str], seconds: float = PROBE_SECONDS
) -> list[Worker]:
    """Return each of `peers` as a worker, in their order. Errors of a device are returned, not raised.

    All are probed at once, at the addresses where they were last seen; those that do not answer as workers are probed
    at the addresses that they announce on the interfaces with the addresses `hosts`.
    """
    workers = run_in_network_loop(_all(trust, [(peer, peer.addresses) for peer in peers], seconds)).result()
    missing = {worker.peer.id.short for worker in workers if worker.error is not None and worker.peer is not None}
    if not missing or not hosts:
        return workers
    # several programs of one device may announce themselves, and only one keeps layers: one hint is not enough
    max_seconds = max_browse_seconds(len(missing), len(workers))
    hints = browse(ServiceKind.DEVICE, hosts, BROWSE_SECONDS, max_seconds=max_seconds, minimum=any_of(missing))
    found = []
    for worker, peer in zip(workers, peers, strict=True):
        announced = [address for hint in hints if hint.short == peer.id.short for address in hint.addresses]
        new = [address for address in announced if address not in peer.addresses]
        if worker.error is not None and new:
            again = run_in_network_loop(_ask(trust, peer, new, seconds)).result()
            # a refusal says more than no answer
            worker = worker if isinstance(again.error, VerifierUnreachable) else again  # noqa: PLW2901
        found.append(worker)
    return found


async def reach_worker(trust: Trust | None, worker: Worker) -> grpc.aio.Channel:
    """Return an open channel to a worker; the caller closes it. Raise the errors of `connect_authenticated`, and for a
    worker that was not found its `error` or NotPaired."""
    if worker.address is None:
        raise worker.error or NotPaired(f"No address of {worker.name} is known.", "Check that it is on and serves.")
    if worker.peer is None or trust is None:
        return open_channel(worker.address)
    channel, _info = await connect_authenticated(worker.address, trust, worker.peer.id)
    return channel


async def local_worker(address: Address) -> Worker:
    """Return the worker of this machine at a loopback address. Raise the errors of `rpc.layers.upload.list_layers`."""
    async with open_channel(address) as channel:
        return Worker(str(address), None, address, await list_layers(channel, str(address)), frozenset(Right))


def worker_at_address(trust: Trust, name: str, address: Address, seconds: float = PROBE_SECONDS) -> Worker:
    """Return the worker at an address: a paired device, by default under its name in the list of peers; or, at a
    loopback address where no paired device was met, a worker in plain text. Errors of a device are returned, not
    raised."""
    paired = not address.loopback or any(address in peer.addresses for peer in trust.peers.all())

    async def probe() -> Worker:
        if not paired:
            return replace(await local_worker(address), name=name or str(address))
        channel, info = await connect_authenticated(address, trust, None, seconds)
        async with channel:
            return await _read_worker(channel, name or info.peer.name, address, info, seconds)

    try:
        return run_in_network_loop(probe()).result()
    except EdgeError as error:
        return Worker(name or str(address), None, error=error)


async def _all(trust: Trust, targets: Sequence[tuple[Peer, Sequence[Address]]], seconds: float) -> list[Worker]:
    return list(await asyncio.gather(*(_ask(trust, peer, addresses, seconds) for peer, addresses in targets)))


async def _ask(trust: Trust, peer: Peer, addresses: Sequence[Address], seconds: float) -> Worker:
    """Return the first worker at any of the addresses, all probed at once: several programs of a device may answer."""
    failure: EdgeError = VerifierUnreachable(
        f"No address of {peer.name} is known.", "Start a worker there: edgellm serve --role worker"
    )
    tasks = [asyncio.create_task(_probe_address(trust, peer, address, seconds)) for address in addresses]
    try:
        for completed in asyncio.as_completed(tasks):
            try:
                return await completed
            except EdgeError as error:
                if isinstance(failure, VerifierUnreachable) or isinstance(error, NotPermitted):
                    failure = error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Worker(peer.name, peer, error=failure)


async def _probe_address(trust: Trust, peer: Peer, address: Address, seconds: float) -> Worker:
    channel, info = await connect_authenticated(address, trust, peer.id, seconds)
    async with channel:
        return await _read_worker(channel, peer.name, address, info, seconds)


async def _read_worker(
    channel: grpc.aio.Channel, name: str, address: Address, info: PeerInfo, seconds: float
) -> Worker:
    # the device has just answered, so a late reply means that it is busy
    facts = await list_layers(channel, name, RETRY_FACTOR * seconds)
    return Worker(name, info.peer, address, facts, info.rights, info.seconds, info.version)
