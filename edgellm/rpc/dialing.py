"""The addresses to which this device connects at another device's request: only known addresses of paired devices, so
that no caller can scan this machine or its networks through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address

from edgellm.errors import EdgeError
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.rpc.discovery.mdns import ServiceKind, browse
from edgellm.rpc.trust.auth_interceptor import Context, caller_host
from edgellm.rpc.trust.peer_store import Peer

FAILED_SECONDS = 4.0  # the duration of every failure, whatever its cause


def is_local_caller(context: Context) -> bool:
    """Return whether the caller is on this machine, where it could dial loopback addresses itself."""
    return _is_loopback(caller_host(context))


def dialable_addresses(peer: Peer, requested: str, local: bool) -> list[Address]:
    """Return the addresses at which a paired device may be dialled for a caller that asks for `requested`. These are
    `requested` (IP:PORT or empty), if the device was seen at that host on any port, and every address where it was
    seen. Names are not resolved. Loopback is only for `local` callers, who may ask for any port of it."""
    known = [address for address in peer.addresses if local or not _is_loopback(address.host)]
    hosts = {address.host for address in known}
    try:
        wanted = [Address.parse(requested)] if requested else []
    except EdgeError:
        wanted = []
    wanted = [address for address in wanted if address.host in hosts or (local and address.loopback)]
    return [address for address in dict.fromkeys([*wanted, *known]) if _is_ip(address.host)]


def announced_addresses(peer: Peer, seconds: float) -> list[Address]:
    """Return the addresses that the device announces within `seconds`: it may have moved since it was last seen."""
    hints = browse(
        ServiceKind.DEVICE, chosen_hosts(), seconds, lambda found: any(hint.short == peer.id.short for hint in found)
    )
    return [address for hint in hints if hint.short == peer.id.short for address in hint.addresses]


@asynccontextmanager
async def uniform_failure(
    local: bool, errors: Sequence[type[BaseException]], failure: EdgeError
) -> AsyncIterator[None]:
    """Raise `failure` in place of any of these `errors`, FAILED_SECONDS after the `with` began, so that neither the
    message nor the time reveals the cause. `local` callers need not wait."""
    deadline = asyncio.get_running_loop().time() + FAILED_SECONDS
    try:
        yield
    except tuple(errors):
        if not local:
            await asyncio.sleep(deadline - asyncio.get_running_loop().time())
        raise failure from None


def _is_loopback(host: str) -> bool:
    return _is_ip(host) and ip_address(host).is_loopback


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
