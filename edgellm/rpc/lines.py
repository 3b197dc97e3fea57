"""The addresses that this device dials because another device asks it to: only known addresses of a paired device, so
that no one can use it to scan this machine or networks that only this machine reaches."""

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

FAILED_SECONDS = 4.0  # how long every failure takes, whatever its cause


def on_this_machine(context: Context) -> bool:
    """Return whether the caller is on this machine, where it could dial loopback addresses itself."""
    return _loopback(caller(context))


def places_of(peer: Peer, asked: str, near: bool) -> list[Address]:
    """Return where a paired device may be dialled for a caller that asks for `asked`, IP:PORT or empty.

    This is `asked` itself, if the device was met at that host on any port, and every address where it was met. Names
    are not resolved. Loopback is only for callers that are `near`, on this machine; they may ask for any port of it.
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
    """Return the addresses that the device announces within `seconds`: it may have moved since it was met."""
    hints = browse(
        ServiceKind.DEVICE, chosen_hosts(), seconds, lambda found: any(hint.short == peer.id.short for hint in found)
    )
    return [place for hint in hints if hint.short == peer.id.short for place in hint.addresses]


@asynccontextmanager
async def alike(near: bool, errors: Sequence[type[BaseException]], failed: EdgeError) -> AsyncIterator[None]:
    """Raise `failed`, FAILED_SECONDS after the `with` began, in the place of any of these `errors`, so that neither the
    message nor the time reveals the cause. Callers that are `near` need not wait."""
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
