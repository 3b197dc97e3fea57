"""Paired devices: which are reachable, and which models they offer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

from edgellm.errors import EdgeError, NotPaired, NotPermitted, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.rpc.discovery.mdns import Hint, ServiceKind, browse
from edgellm.rpc.trust.handshake import PeerInfo, fetch_peer_info
from edgellm.rpc.trust.trust import Peer, Trust

T = TypeVar("T")

BROWSE_SECONDS = 1.5  # wait for announcements; on a machine with another responder the second query is answered
MAX_BROWSE_SECONDS = 6.0  # wait without any device found: busy machines answer late


ProbeResult: TypeAlias = tuple[Peer, PeerInfo | EdgeError]
"""A paired device, and its greeting or the error that prevents it."""


def probe_peers(
    trust: Trust, peers: Sequence[Peer], hosts: Sequence[str], hints: Sequence[Hint] | None = None
) -> list[ProbeResult]:
    """Return the result of probing each of `peers`, as `ask_peers` finds them."""

    async def greeting(peer: Peer, address: Address) -> PeerInfo:
        return await fetch_peer_info(address, trust, peer.id)

    return ask_peers(peers, greeting, hosts, hints)


def probe_address(trust: Trust, address: Address) -> PeerInfo:
    return run_in_network_loop(fetch_peer_info(address, trust)).result()


def ask_peers(
    peers: Sequence[Peer],
    ask: Callable[[Peer, Address], Awaitable[T]],
    hosts: Sequence[str],
    hints: Sequence[Hint] | None = None,
    *,
    every_hint: bool = False,
) -> list[tuple[Peer, T | EdgeError]]:
    """Return each of `peers`, in their order, and the result of `ask` for it, or the error.

    All are asked at once, at the addresses where they were last seen; those that do not answer are asked at the
    addresses that they announce: in `hints`, or else on the interfaces with the addresses `hosts`. With `every_hint`,
    the search does not end with the first announcement of each: several programs of one device may announce themselves.
    """
    answers = _ask_all([(peer, peer.addresses) for peer in peers], ask)
    missing = {peer.id.short for peer, answer in zip(peers, answers, strict=True) if isinstance(answer, EdgeError)}
    if not missing or not (hosts or hints):
        return list(zip(peers, answers, strict=True))
    if hints is None:

        def enough(found: Sequence[Hint], elapsed: float) -> bool:
            shorts = {hint.short for hint in found}
            late = elapsed >= BROWSE_SECONDS and not shorts.isdisjoint(missing)
            return late or (not every_hint and shorts >= missing)

        # devices are probably off where others answer
        longest = MAX_BROWSE_SECONDS if len(missing) == len(peers) else BROWSE_SECONDS
        hints = browse(ServiceKind.DEVICE, hosts, longest, enough)
    announced: dict[str, list[Address]] = {}
    for hint in hints:
        announced.setdefault(hint.short, []).extend(hint.addresses)
    new = [
        [one for one in announced.get(peer.id.short, ()) if peer.id.short in missing and one not in peer.addresses]
        for peer in peers
    ]
    again = _ask_all(list(zip(peers, new, strict=True)), ask)
    return [
        (peer, second if tried and _says_more(second, first) else first)
        for peer, first, second, tried in zip(peers, answers, again, new, strict=True)
    ]


def _ask_all(
    targets: Sequence[tuple[Peer, Sequence[Address]]], ask: Callable[[Peer, Address], Awaitable[T]]
) -> list[T | EdgeError]:
    async def first_answer(peer: Peer, addresses: Sequence[Address]) -> T | EdgeError:
        """Return the first answer from any of the addresses, all asked at once; else the error that says most."""
        failure: EdgeError = _NoAddress(f"No address of {peer.name} is known.", "Check that it is on and serves.")
        tasks = [asyncio.ensure_future(ask(peer, address)) for address in addresses]
        try:
            for completed in asyncio.as_completed(tasks):
                try:
                    return await completed
                except EdgeError as error:
                    failure = error if _says_more(error, failure) else failure
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return failure

    async def asked() -> list[T | EdgeError]:
        return list(await asyncio.gather(*(first_answer(*target) for target in targets)))

    return run_in_network_loop(asked()).result()


class _NoAddress(NotPaired):
    """No address of the device is known."""


def _says_more(answer: object, failure: object) -> bool:
    """Return whether an answer says more than an earlier `failure`: a refusal, more than silence or no address."""
    if not isinstance(answer, EdgeError) or isinstance(failure, (VerifierUnreachable, _NoAddress)):
        return True
    return isinstance(answer, NotPermitted)


def announced_addresses(peer: Peer, seconds: float) -> list[Address]:
    """Return the addresses that the device announces within `seconds`: it may have moved since it was last seen."""
    hints = browse(
        ServiceKind.DEVICE, chosen_hosts(), seconds, lambda found, _: any(hint.short == peer.id.short for hint in found)
    )
    return [address for hint in hints if hint.short == peer.id.short for address in hint.addresses]
