"""Probes of paired devices: which are reachable, and which models they offer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from edgellm.errors import EdgeError, NotPaired, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.discovery.mdns import Hint, HintPredicate, ServiceKind, browse
from edgellm.rpc.trust.handshake import PeerInfo, fetch_peer_info
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.trust import Trust

BROWSE_SECONDS = 1.5  # for announcements; most come within a tenth of that
MAX_BROWSE_SECONDS = 6.0  # if no device was found by then: busy machines answer late
PROBE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A paired device, and its greeting or the error that prevents it. `announced`: it was found by multicast."""

    peer: Peer
    info: PeerInfo | None
    error: EdgeError | None
    announced: bool


def probe_peers(
    trust: Trust,
    peers: Sequence[Peer],
    hosts: Sequence[str],
    hints: Sequence[Hint] | None = None,
    seconds: float = PROBE_SECONDS,
) -> list[ProbeResult]:
    """Return the result of probing each of `peers`, in their order. Errors of a device are returned, not raised.

    All are probed at once, at the addresses where they were last seen; those that do not answer are probed at the
    addresses that they announce: in `hints`, or else on the interfaces with the addresses `hosts`.
    """
    results = run_in_network_loop(_ask_all(trust, [(peer, peer.addresses) for peer in peers], seconds)).result()
    missing = {result.peer.id.short for result in results if result.info is None}
    if not missing or not (hosts or hints):
        return results
    if hints is None:
        hints = browse(
            ServiceKind.DEVICE, hosts, BROWSE_SECONDS, all_of(missing), minimum=any_of(missing),
            max_seconds=max_browse_seconds(len(missing), len(results)),
        )  # fmt: skip
    return [_with_hints(trust, result, hints, seconds) for result in results]


def all_of(shorts: Collection[str]) -> HintPredicate:
    """Return a predicate: each of these devices, by short ID, is among the hints."""
    return lambda found: {hint.short for hint in found} >= set(shorts)


def any_of(shorts: Collection[str]) -> HintPredicate:
    """Return a predicate: at least one of these devices, by short ID, is among the hints."""
    return lambda found: any(hint.short in shorts for hint in found)


def max_browse_seconds(missing: int, wanted: int) -> float:
    """Return the longest time to search, in seconds: if some devices answer, the others are probably off."""
    return MAX_BROWSE_SECONDS if missing == wanted else BROWSE_SECONDS


def probe_address(trust: Trust, address: Address, seconds: float = PROBE_SECONDS) -> PeerInfo:
    """Return the greeting of the paired device at an address. Raise the errors of `connect_authenticated`."""
    return run_in_network_loop(fetch_peer_info(address, trust, None, seconds)).result()


def _with_hints(trust: Trust, result: ProbeResult, hints: Iterable[Hint], seconds: float) -> ProbeResult:
    """Return the result of probing a device at the announced addresses that were not tried yet."""
    announced = [place for hint in hints if hint.short == result.peer.id.short for place in hint.addresses]
    new = [place for place in announced if place not in result.peer.addresses]
    result = run_in_network_loop(_ask(trust, result.peer, new, seconds)).result() if new else result
    return replace(result, announced=bool(announced))


async def _ask_all(
    trust: Trust, targets: Sequence[tuple[Peer, Sequence[Address]]], seconds: float
) -> list[ProbeResult]:
    return list(await asyncio.gather(*(_ask(trust, peer, addresses, seconds) for peer, addresses in targets)))


async def _ask(trust: Trust, peer: Peer, addresses: Sequence[Address], seconds: float) -> ProbeResult:
    """Return the first answer from any of the addresses, all probed at once."""
    failure: EdgeError | None = None
    tasks = [asyncio.create_task(fetch_peer_info(address, trust, peer.id, seconds)) for address in addresses]
    try:
        for completed in asyncio.as_completed(tasks):
            try:
                info = await completed
            except EdgeError as error:
                # a refusal says more than no answer
                failure = error if failure is None or isinstance(failure, VerifierUnreachable) else failure
            else:
                return ProbeResult(peer, info, None, False)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failure is None:
        failure = NotPaired(f"No address of {peer.name} is known.", "Give its address with --peer HOST:PORT.")
    return ProbeResult(peer, None, failure, False)
