"""The network interfaces of this machine, and a guess at which of them lead to other devices at home."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from edgellm.errors import InvalidOption

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
