"""Discovery of devices on the home network by multicast DNS. Announcements are only hints: trust comes from TLS.

An announcement holds the device's short ID, its port, the version of the contract, and a fresh random number. It holds
no name, no model, and nothing about requests.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Any

from zeroconf import Error, IPVersion, ServiceBrowser, ServiceInfo, Zeroconf

from edgellm.errors import EdgeError, InvalidOption
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.interfaces import own_hosts
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.trust.identity import parse_short
from edgellm.rpc.trust.pairing import NUMBERS
from edgellm.rpc.trust.trust import MAX_ADDRESSES

_MAX_RESOLVED = 64  # names resolved in one search; flooding the network with more gains nothing


class ServiceKind(StrEnum):
    """The kind of an announcement: a device that serves, a device that shows a pairing code, or a test."""

    DEVICE = "_edgellm._tcp.local."
    PAIRING = "_edgellm-pair._tcp.local."
    TEST = "_edgellm-test._tcp.local."


@dataclass(frozen=True, slots=True)
class Hint:
    """An announcement from the network, not to be trusted. `instance` is 16 hex digits."""

    short: str
    protocol: int
    instance: str
    addresses: tuple[Address, ...]

    @property
    def number(self) -> int:
        return code_number(self.instance)

    @property
    def own(self) -> bool:
        return any(address.host in own_hosts() for address in self.addresses)


def new_instance() -> str:
    return secrets.token_hex(8)


def code_number(instance: str) -> int:
    """Return the number of a pairing code; it follows from the announcement's name, so it is not announced itself."""
    return int(instance, 16) % NUMBERS + 1


@contextmanager
def announce(
    kind: ServiceKind, short: str, port: int, hosts: Sequence[str], instance: str | None = None
) -> Iterator[bool]:
    """Announce this device at the IPv4 addresses `hosts` while the `with` lasts; yield whether that succeeded."""
    instance = instance or new_instance()
    info = ServiceInfo(
        kind.value,
        f"{instance}.{kind.value}",
        port=port,
        properties={"id": short, "v": str(PROTOCOL), "i": instance},
        server=f"edgellm-{instance}.local.",
        parsed_addresses=list(hosts),
    )
    with _multicast(hosts) as zeroconf:
        registered = False
        if zeroconf is not None:
            with suppress(Error, OSError):
                zeroconf.register_service(info, cooperating_responders=True)  # a random name is unique
                registered = True
        yield registered


@contextmanager
def keep_announced(kind: ServiceKind, short: str, port: int, hosts: Callable[[], Sequence[str]]) -> Iterator[bool]:
    """Announce this device while the `with` lasts at the addresses that `hosts` returns, also when they change, as
    after sleep or in another network; yield whether it has succeeded at first."""
    over = threading.Event()

    def follow(known: list[str]) -> None:
        while not over.wait(1.0):
            there: list[str] = []
            with suppress(InvalidOption):  # the interface is gone
                there += hosts()
            if there != known:
                known = there
                announced.close()
                announced.enter_context(announce(kind, short, port, there))

    with ExitStack() as announced:
        first = list(hosts())
        begun = announced.enter_context(announce(kind, short, port, first))
        following = threading.Thread(target=follow, args=(first,), name="edgellm-announce", daemon=True)
        following.start()
        try:
            yield begun
        finally:
            over.set()
            following.join()


def browse(
    kind: ServiceKind,
    hosts: Sequence[str],
    seconds: float,
    enough: Callable[[Sequence[Hint], float], bool] = lambda _found, _elapsed: False,
) -> list[Hint]:
    """Return the announcements received within `seconds` on the interfaces with the addresses `hosts`, including this
    device's own; before that when `enough` accepts what was found in so many seconds. A slow machine, here or there,
    answers late."""
    found: dict[str, Hint] = {}
    resolving: set[str] = set()
    changed = threading.Condition()
    local = all(ip_address(host).is_loopback for host in hosts)

    def on_service(zeroconf: Zeroconf, service_type: str, name: str, **_: Any) -> None:
        """Resolve a new name in a thread of its own: this runs in zeroconf's loop, which must not block."""
        if len(resolving) < _MAX_RESOLVED and name not in resolving:
            resolving.add(name)
            threading.Thread(target=resolve, args=(zeroconf, service_type, name), daemon=True).start()

    def resolve(zeroconf: Zeroconf, service_type: str, name: str) -> None:
        with suppress(Error, OSError, RuntimeError):  # the search may have ended meanwhile
            info = zeroconf.get_service_info(service_type, name, int(1_000 * seconds))
            if info is not None and (hint := parse_announcement(info, local)):
                with changed:
                    found[name] = hint
                    changed.notify_all()

    with _multicast(hosts) as zeroconf, changed:
        browser = None if zeroconf is None else ServiceBrowser(zeroconf, kind.value, handlers=[on_service])
        began = time.monotonic()
        while browser is not None and (elapsed := time.monotonic() - began) < seconds:
            if enough(list(found.values()), elapsed):
                break
            changed.wait(min(0.1, seconds - elapsed))
        return sorted(found.values(), key=lambda hint: (hint.short, hint.instance))


@contextmanager
def _multicast(hosts: Sequence[str]) -> Iterator[Zeroconf | None]:
    """Yield zeroconf on these interfaces only, or None if `hosts` is empty or the machine does not permit it. What was
    announced by it is withdrawn in the end."""
    zeroconf = None
    if hosts:
        with suppress(Error, OSError):
            zeroconf = Zeroconf(interfaces=list(hosts), ip_version=IPVersion.V4Only)
    try:
        yield zeroconf
    finally:
        if zeroconf is not None:
            zeroconf.close()


def parse_announcement(info: ServiceInfo, local: bool) -> Hint | None:
    """Return the content of an announcement, or None if it is not valid. Anyone can send one, so loopback addresses are
    believed only, and then exclusively, if the search is on loopback alone (`local`)."""
    properties = {
        key: value for key, value in (info.properties or {}).items() if value is not None and len(value) <= 32
    }
    try:
        short = parse_short(properties[b"id"].decode())
        protocol = int(properties[b"v"].decode()[:4])
        instance = properties[b"i"].decode()
        int(instance, 16)
        hosts = [host for host in info.parsed_addresses(IPVersion.V4Only) if _is_usable_host(host, local)]
        addresses = tuple(Address.of(host, info.port or 0) for host in hosts[:MAX_ADDRESSES])
    except (KeyError, ValueError, InvalidOption, EdgeError):
        return None
    return Hint(short, protocol, instance, addresses) if addresses and info.port and len(instance) == 16 else None


def _is_usable_host(host: str, local: bool) -> bool:
    found = ip_address(host)
    return not (found.is_multicast or found.is_unspecified) and found.is_loopback == local


def multicast_error(host: str) -> str:
    """Return why this machine cannot send multicast from the address `host`, or an empty string if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))
            sender.sendto(b"", ("224.0.0.251", 5353))
        except OSError as error:
            return error.strerror or str(error)
    return ""
