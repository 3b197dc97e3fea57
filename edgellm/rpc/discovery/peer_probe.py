"""Finding out which paired devices are reachable now and what they offer; all are asked at once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from edgellm.errors import EdgeError, NotPaired, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_there
from edgellm.rpc.discovery.mdns import Enough, Hint, ServiceKind, browse
from edgellm.rpc.trust.handshake import PeerInfo, ask
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.trust import Trust

LOOK_SECONDS = 1.5  # for announcements; most come within a tenth of that
LONGEST_LOOK = 6.0  # seconds, if nobody was found by then: busy machines answer late
ASK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A paired device, and its greeting or the error that prevents it. `announced`: it was found by multicast."""

    peer: Peer
    welcomed: PeerInfo | None
    trouble: EdgeError | None
    announced: bool


def roll_call(
    trust: Trust,
    peers: Sequence[Peer],
    hosts: Sequence[str],
    hints: Sequence[Hint] | None = None,
    seconds: float = ASK_SECONDS,
) -> list[ProbeResult]:
    """Ask all `peers` at the addresses where they were last seen, and those that do not answer at the addresses that
    they announce: in `hints`, or else on the interfaces with the addresses `hosts`. Return the results in the order of
    `peers`. Errors of a device are returned, not raised.
    """
    answers = run_there(_ask_all(trust, [(peer, peer.addresses) for peer in peers], seconds)).result()
    missing = {answer.peer.id.short for answer in answers if answer.welcomed is None}
    if not missing or not (hosts or hints):
        return answers
    if hints is None:
        hints = browse(
            ServiceKind.DEVICE, hosts, LOOK_SECONDS, all_of(missing), longest=longest_look(len(missing), len(answers)),
            some=any_of(missing),
        )  # fmt: skip
    return [_with_hints(trust, answer, hints, seconds) for answer in answers]


def all_of(shorts: Collection[str]) -> Enough:
    """Return a predicate: each of these devices, by short ID, is among the hints."""
    return lambda found: {hint.short for hint in found} >= set(shorts)


def any_of(shorts: Collection[str]) -> Enough:
    """Return a predicate: at least one of these devices, by short ID, is among the hints."""
    return lambda found: any(hint.short in shorts for hint in found)


def longest_look(missing: int, wanted: int) -> float:
    """Return the longest time to search, in seconds: if some devices answer, the others are probably off."""
    return LONGEST_LOOK if missing == wanted else LOOK_SECONDS


def ask_at(trust: Trust, address: Address, seconds: float = ASK_SECONDS) -> PeerInfo:
    """Ask whichever paired device is at an address. Raises the errors of `edgellm.rpc.trust.handshake.meet`."""
    return run_there(ask(address, trust, None, seconds)).result()


def _with_hints(trust: Trust, answer: ProbeResult, hints: Iterable[Hint], seconds: float) -> ProbeResult:
    """Ask the device again at its announced addresses that were not tried yet."""
    heard = [place for hint in hints if hint.short == answer.peer.id.short for place in hint.addresses]
    places = [place for place in heard if place not in answer.peer.addresses]
    again = run_there(_ask(trust, answer.peer, places, seconds)).result() if places else answer
    return replace(again, announced=bool(heard))


async def _ask_all(trust: Trust, whom: Sequence[tuple[Peer, Sequence[Address]]], seconds: float) -> list[ProbeResult]:
    return list(await asyncio.gather(*(_ask(trust, peer, places, seconds) for peer, places in whom)))


async def _ask(trust: Trust, peer: Peer, places: Sequence[Address], seconds: float) -> ProbeResult:
    """Ask at all addresses at once and take the first answer."""
    trouble: EdgeError | None = None
    tasks = [asyncio.create_task(ask(place, trust, peer.id, seconds)) for place in places]
    try:
        for next_one in asyncio.as_completed(tasks):
            try:
                welcomed = await next_one
            except EdgeError as error:
                # a refusal says more than no answer
                trouble = error if trouble is None or isinstance(trouble, VerifierUnreachable) else trouble
            else:
                return ProbeResult(peer, welcomed, None, False)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if trouble is None:
        trouble = NotPaired(f"Nobody knows where {peer.name} is.", "Give its address with --peer HOST:PORT.")
    return ProbeResult(peer, None, trouble, False)
