"""Where this device dials another one because a third asks it to: only where it knows that other device to be, so that
nobody learns through it what listens on this machine or in networks that only this machine reaches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address

from edgellm.errors import EdgeError
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.rpc.discovery.mdns import ServiceKind, browse
from edgellm.rpc.trust.auth_interceptor import Context, caller
from edgellm.rpc.trust.peer_store import Peer

FAILED_SECONDS = 4.0  # every failure takes so long, whatever it was


def on_this_machine(context: Context) -> bool:
    """Whether who calls is on this machine, where it could dial by itself."""
    return _loopback(caller(context))


def places_of(peer: Peer, asked: str, near: bool) -> list[Address]:
    """Return where a paired device may be dialled for somebody who wants it dialled at `asked`, IP:PORT or nothing.

    That is any port of a host that it was met at, and every address that it was met at. Names are not resolved.
    Loopback is for those who are `near`, on this machine.
    """
    known = [place for place in peer.addresses if near or not _loopback(place.host)]
    hosts = {place.host for place in known}
    try:
        wanted = [Address.parse(asked)] if asked else []
    except EdgeError:
        wanted = []
    wanted = [place for place in wanted if place.host in hosts or (near and place.loopback)]
    return [place for place in dict.fromkeys([*wanted, *known]) if _is_ip(place.host)]


def announced_places(peer: Peer, seconds: float) -> list[Address]:
    """Return where the device announces itself, in `seconds` at most: it may have moved since it was met."""
    hints = browse(
        ServiceKind.DEVICE, chosen_hosts(), seconds, lambda found: any(hint.short == peer.id.short for hint in found)
    )
    return [place for hint in hints if hint.short == peer.id.short for place in hint.addresses]


@asynccontextmanager
async def alike(near: bool, errors: Sequence[type[BaseException]], failed: EdgeError) -> AsyncIterator[None]:
    """Raise `failed`, FAILED_SECONDS after the `with` began, in the place of any of these `errors`: what was met on the
    way shows neither in words nor in time. Who is `near` need not wait."""
    until = asyncio.get_running_loop().time() + FAILED_SECONDS
    try:
        yield
    except tuple(errors):
        if not near:
            await asyncio.sleep(until - asyncio.get_running_loop().time())
        raise failed from None


def _loopback(host: str) -> bool:
    return _is_ip(host) and ip_address(host).is_loopback


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
