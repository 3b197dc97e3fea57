"""The network interfaces of this device, and whether a port is reachable."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import TypeVar

import grpc
import grpc.aio
import psutil

from edgellm.errors import InvalidOption
from edgellm.rpc.address import Address

# Tunnels and the bridges of containers and virtual machines: devices there are not on the home network. (An empty
# docker0 chosen by mistake is the commonest reason why two devices do not find each other.)
_VIRTUAL = re.compile(
    r"docker|br-|virbr|veth|vmnet|vboxnet|cni|flannel|cali|lxc|podman|tun|tap|utun|awdl|llw|vEthernet"
)


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up, its IPv4 addresses, and whether it is used by default, with the reason."""

    name: str
    hosts: tuple[str, ...]
    chosen: bool
    reason: str


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an IPv4 address."""
    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        hosts = tuple(address.address for address in addresses if address.family == socket.AF_INET)
        if name in up and hosts:
            found.append(Interface(name, hosts, *_judged(name, hosts)))
    return found


def own_hosts() -> frozenset[str]:
    """Return every address of this machine, IPv4 and IPv6."""
    found = {address.address.partition("%")[0] for listed in psutil.net_if_addrs().values() for address in listed}
    return frozenset(found)


def chosen_hosts(names: Sequence[str] = ()) -> list[str]:
    """Return the IPv4 addresses of the interfaces with these names or addresses.

    Without `names`, use the interfaces in `EDGELLM_INTERFACE` (separated by commas), or else those chosen by default.

    Raises:
        InvalidOption: there is no such interface.
    """
    known = interfaces()
    names = names or [name.strip() for name in os.environ.get("EDGELLM_INTERFACE", "").split(",") if name.strip()]
    if not names:
        return [host for one in known if one.chosen for host in one.hosts]
    hosts: list[str] = []
    for name in names:
        found = [host for one in known for host in one.hosts if name in (one.name, host)]
        if not found:
            there = ", ".join(one.name for one in known) or "none"
            raise InvalidOption(f"There is no interface {name!r} with an IPv4 address.", f"There are: {there}.")
        hosts += found
    return hosts


def _judged(name: str, hosts: tuple[str, ...]) -> tuple[bool, str]:
    if all(ip_address(host).is_loopback for host in hosts):
        return False, "this machine only"
    if _VIRTUAL.match(name):
        return False, "a bridge or tunnel of this machine"
    if not all(ip_address(host).is_private for host in hosts):
        return False, "a public address"
    return True, "leads to the home's devices"


T = TypeVar("T")
PATIENCE = 3.0


class Reach(StrEnum):
    """The outcome of connecting to a TCP port."""

    OPEN = "open"
    REFUSED = "refused"  # the machine is there, but nothing listens
    SILENT = "silent"  # no answer: off, elsewhere, or behind a firewall
    UNKNOWN = "unknown"  # no such name, or no route


async def reach(address: Address, seconds: float = 1.0) -> Reach:
    """Connect and hang up, and return the outcome."""
    try:
        async with asyncio.timeout(seconds):
            _reader, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return Reach.SILENT
    except ConnectionRefusedError:
        return Reach.REFUSED
    except socket.gaierror:
        return Reach.UNKNOWN
    except OSError:
        return Reach.UNKNOWN
    writer.transport.abort()
    return Reach.OPEN


async def answered(ask: Callable[[float], Awaitable[T]], address: Address, seconds: float) -> T:
    """Return the result of `ask`, a call with a deadline in seconds. If there is none within `seconds`, but something
    listens at `address`, as on a busy machine, try a second time with `PATIENCE` times the deadline.

    Raises:
        grpc.aio.AioRpcError: the error of `ask`; DEADLINE_EXCEEDED if no answer came in time.
    """
    try:
        return await ask(seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or await reach(address) is not Reach.OPEN:
            raise
    return await ask(PATIENCE * seconds)


async def listening(addresses: Sequence[Address], seconds: float = 1.0) -> Address:
    """Return the first of a device's addresses at which something listens, as not all of its networks may be reachable
    from here; return the first address if nothing listens at any.
    """
    found = await asyncio.gather(*(reach(address, seconds) for address in addresses))
    return next((address for address, what in zip(addresses, found, strict=True) if what is Reach.OPEN), addresses[0])
