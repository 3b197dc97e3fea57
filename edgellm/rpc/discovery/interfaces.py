"""The network interfaces of this device, magic packets that wake others up, and probes of TCP ports."""

import asyncio
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Network, ip_address
from typing import Self

import psutil

from edgellm.errors import InvalidOption
from edgellm.rpc.address import Address

# Tunnels and the bridges of containers and virtual machines: devices there are not on the home network. (An empty
# docker0 chosen by mistake is the commonest reason why two devices do not find each other.)
_VIRTUAL = re.compile(
    r"docker|br-|virbr|veth|vmnet|vboxnet|cni|flannel|cali|lxc|podman|tun|tap|utun|awdl|llw|vEthernet"
    r"|tailscale|wg|zt"
)
WAKE_PORT = 9


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up, its IPv4 addresses, and whether it is used by default, with the reason."""

    name: str
    hosts: tuple[str, ...]
    chosen: bool
    reason: str


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an IPv4 address."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        hosts = tuple(address.address for address in addresses if address.family == socket.AF_INET)
        if name in up and hosts:
            found.append(Interface(name, hosts, *_choice(name, hosts)))
    return found


def own_hosts() -> frozenset[str]:
    """Return every address of this machine, IPv4 and IPv6."""
    found = [one for addresses in psutil.net_if_addrs().values() for one in addresses if one.family != psutil.AF_LINK]
    return frozenset(one.address.partition("%")[0] for one in found)


def chosen_hosts() -> list[str]:
    """Return the IPv4 addresses of the interfaces that `EDGELLM_INTERFACE` names, by their names or addresses and
    separated by commas, or else of those chosen by default."""
    known = interfaces()
    names = [name.strip() for name in os.environ.get("EDGELLM_INTERFACE", "").split(",") if name.strip()]
    if not names:
        return [host for interface in known if interface.chosen for host in interface.hosts]
    hosts: list[str] = []
    for name in names:
        found = [host for interface in known for host in interface.hosts if name in (interface.name, host)]
        if not found:
            available = ", ".join(interface.name for interface in known) or "none"
            raise InvalidOption(
                f"EDGELLM_INTERFACE: there is no interface {name!r} with an IPv4 address.", f"Available: {available}."
            )
        hosts += found
    return hosts


def _choice(name: str, hosts: tuple[str, ...]) -> tuple[bool, str]:
    if all(ip_address(host).is_loopback for host in hosts):
        return False, "this machine only"
    if _VIRTUAL.match(name):
        return False, "a bridge or tunnel of this machine"
    if not all(ip_address(host).is_private for host in hosts):
        return False, "no address of a home's network"
    return True, "reaches the home's devices"


@dataclass(frozen=True, slots=True)
class NetworkCard:
    """The MAC address of a device in an IPv4 network, to which a magic packet (Wake-on-LAN) wakes it up."""

    mac: str
    network: IPv4Network

    def __str__(self) -> str:
        return f"{self.mac} {self.network}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse MAC NETWORK. Raise ValueError for anything else."""
        mac, _, network = text.partition(" ")
        digits = bytes.fromhex(re.sub("[:-]", "", mac))
        if len(digits) != 6 or digits[0] & 1 or not any(digits):  # a group of devices; this machine
            raise ValueError(f"{mac[:40]!r} is not a device's MAC address")
        return cls(digits.hex(":"), IPv4Network(network, strict=False))


def own_cards() -> dict[NetworkCard, str]:
    """Return this device's cards at its chosen addresses, and the address at each."""
    hosts, found = set[str](), {}
    with suppress(InvalidOption):  # an interface that EDGELLM_INTERFACE names may be down by now
        hosts.update(chosen_hosts())
    for addresses in psutil.net_if_addrs().values():
        macs = [one.address for one in addresses if one.family == psutil.AF_LINK]
        for one in addresses:
            if one.address in hosts and one.netmask and macs:
                with suppress(ValueError):  # a network without MAC addresses
                    found[NetworkCard.parse(f"{macs[0]} {one.address}/{one.netmask}")] = one.address
    return found


def shared_networks(cards: Iterable[NetworkCard]) -> dict[NetworkCard, str]:
    """Return those of another device's `cards` that are in a network of this device, and this one's address there."""
    own = {card.network: host for card, host in own_cards().items()}
    return {card: own[card.network] for card in cards if card.network in own}


def send_magic_packets(cards: Iterable[NetworkCard]) -> list[str]:
    """Send a magic packet to each card in a network that this device is in, too; return what was sent, for people."""
    sent = []
    for card, host in shared_networks(cards).items():
        place = str(card.network.broadcast_address)
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.bind((host, 0))  # by the interface of this network
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sender.sendto(b"\xff" * 6 + 16 * bytes.fromhex(card.mac.replace(":", "")), (place, WAKE_PORT))
            sent.append(f"a magic packet for {card.mac} to {place}, UDP port {WAKE_PORT}")
    return sent


class PortState(StrEnum):
    """The outcome of connecting to a TCP port."""

    OPEN = "open"
    REFUSED = "refused"  # the machine is up, but nothing listens
    SILENT = "silent"  # no answer: off, elsewhere, or behind a firewall
    UNKNOWN = "unknown"  # no such name, or no route


async def probe_port(address: Address, seconds: float = 1.0) -> PortState:
    """Return the outcome of connecting to a port; the connection is closed at once."""
    try:
        async with asyncio.timeout(seconds):
            _reader, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return PortState.SILENT
    except ConnectionRefusedError:
        return PortState.REFUSED
    except OSError:
        return PortState.UNKNOWN
    writer.transport.abort()
    return PortState.OPEN


async def listening(addresses: Iterable[Address]) -> list[Address]:
    """Return those of a device's addresses at which something listens: not all of its networks may be reachable."""
    places = list(addresses)
    states = await asyncio.gather(*map(probe_port, places))
    return [address for address, state in zip(places, states, strict=True) if state is PortState.OPEN]
