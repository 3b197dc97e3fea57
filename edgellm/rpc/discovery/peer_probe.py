"""Which of the paired devices are there now, and what they offer: all are asked at once, wherever they may be."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from edgellm.errors import EdgeError, NotPaired, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.mdns import Enough, Hint, ServiceKind, browse
from edgellm.rpc.event_loop import run_there
from edgellm.rpc.trust.handshake import Welcomed, ask
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.trust import Trust

LOOK_SECONDS = 1.5  # for announcements; most come within a tenth of that
LONGEST_LOOK = 6.0  # seconds, where nobody was found by then: machines that are busy answer late
ASK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A paired device, and its greeting or what is in the way of it. `announced`: it was found by multicast."""

    peer: Peer
    welcomed: Welcomed | None
    trouble: EdgeError | None
    announced: bool


def roll_call(
    trust: Trust,
    peers: Sequence[Peer],
    hosts: Sequence[str],
    hints: Sequence[Hint] | None = None,
    seconds: float = ASK_SECONDS,
) -> list[ProbeResult]:
    """Asks `peers` where they were last seen; those that do not answer, where they announce themselves: as `hints` say,
    or what is heard on the interfaces with the addresses `hosts`. In the order of `peers`. Raises nothing of what a
    device may do.
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
    """Return whether each of these devices, by short ID, is among the hints."""
    return lambda found: {hint.short for hint in found} >= set(shorts)


def any_of(shorts: Collection[str]) -> Enough:
    """Return whether one of these devices, by short ID, is among the hints."""
    return lambda found: any(hint.short in shorts for hint in found)


def longest_look(missing: int, wanted: int) -> float:
    """Return the seconds to look for announcements at most: where some devices answer, the others are probably off."""
    return LONGEST_LOOK if missing == wanted else LOOK_SECONDS


def ask_at(trust: Trust, address: Address, seconds: float = ASK_SECONDS) -> Welcomed:
    """The paired device at an address, whichever it is. Raises what `edgellm.rpc.trust.handshake.meet` raises."""
    return run_there(ask(address, trust, None, seconds)).result()


def _with_hints(trust: Trust, answer: ProbeResult, hints: Iterable[Hint], seconds: float) -> ProbeResult:
    """Asks once more where the device has announced itself, if that is a place that it was not asked at."""
    heard = [place for hint in hints if hint.short == answer.peer.id.short for place in hint.addresses]
    places = [place for place in heard if place not in answer.peer.addresses]
    again = run_there(_ask(trust, answer.peer, places, seconds)).result() if places else answer
    return replace(again, announced=bool(heard))


async def _ask_all(trust: Trust, whom: Sequence[tuple[Peer, Sequence[Address]]], seconds: float) -> list[ProbeResult]:
    return list(await asyncio.gather(*(_ask(trust, peer, places, seconds) for peer, places in whom)))


async def _ask(trust: Trust, peer: Peer, places: Sequence[Address], seconds: float) -> ProbeResult:
    """Knocks at all places at once; who answers first is taken."""
    trouble: EdgeError | None = None
    tasks = [asyncio.create_task(ask(place, trust, peer.id, seconds)) for place in places]
    try:
        for next_one in asyncio.as_completed(tasks):
            try:
                welcomed = await next_one
            except EdgeError as error:
                # that somebody refuses says more than that nobody is there
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
