"""This device's identity and its paired devices, with the rights of each here and the addresses where it was last seen,
and phones with the page; and the TLS credentials that follow from them.

gRPC checks a certificate against the paired ones, which are its only roots. That alone is not relied on: the server
checks the fingerprint of the client's certificate for every call (`AuthInterceptor`), and as gRPC does not let a
client see the server's certificate, the server proves its identity with a signature (`handshake`)."""

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import islice
from pathlib import Path
from time import sleep
from typing import Any, Self, TypeAlias, TypeVar

import grpc

from edgellm.errors import EdgeError, InvalidOption, NotPaired, PairingRequired, TrustUnusable
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.interfaces import NetworkCard
from edgellm.rpc.trust.identity import Certificate, DeviceID, Identity, parse_short, trust_folder
from edgellm.state import MALFORMED, lock_folder, read_private, write_private


class Right(StrEnum):
    """A right of a paired device on this device."""

    VERIFY = "verify"
    COMPUTE = "compute"
    FILES = "files"


Rights = frozenset[Right]


def read_rights(names: Iterable[str]) -> Rights:
    """Return the rights with these names; names of a later version are ignored."""
    names = set(names)
    return frozenset(right for right in Right if right in names)


MAX_NAME = 40  # characters
MAX_ADDRESSES = 8  # addresses, and network cards, of each device, the newest first
_SEEN_AGAIN = timedelta(minutes=1)  # least time between two writes for a device seen again


def read_cards(texts: Iterable[str]) -> tuple[NetworkCard, ...]:
    """Return the cards that another device tells of; those that are none are left out."""
    found = []
    for text in islice(texts, MAX_ADDRESSES):
        with suppress(ValueError):
            found.append(NetworkCard.parse(text))
    return tuple(found)


def now() -> datetime:
    """Return the time as the list has it: UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


@dataclass(frozen=True, slots=True)
class Peer:
    """A paired device. `rights` is what it may do here, `granted` what this device may do there, as of the last
    handshake. `paired` and `seen` are as by `now`; the newest address and card come first.
    `wakes`: this device wakes it up for a reply."""

    name: str
    certificate: Certificate
    rights: Rights = frozenset()
    granted: Rights = frozenset()
    addresses: tuple[Address, ...] = ()
    paired: datetime = field(default_factory=now)
    seen: datetime = field(default_factory=now)
    cards: tuple[NetworkCard, ...] = ()
    wakes: bool = True

    @property
    def id(self) -> DeviceID:
        return self.certificate.id


@dataclass(frozen=True, slots=True)
class Phone:
    """A phone, or another browser, with a key to the page, of which `id` is the hash. Times are as in `Peer`."""

    name: str
    id: DeviceID
    paired: datetime = field(default_factory=now)
    seen: datetime = field(default_factory=now)


Known: TypeAlias = dict[DeviceID, Peer | Phone]
_Entry = TypeVar("_Entry", Peer, Phone, Peer | Phone)


class Peers:
    """The list in `folder`, which any number of processes may use: each reads it again when another has changed it.
    Every method raises `TrustUnusable` if the file cannot be read or written, or is damaged. Then no device is
    trusted."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or trust_folder()) / "peers.json"
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] | None = None
        self._known: Known = {}

    def all(self) -> list[Peer]:
        """Return the devices, sorted by name."""
        return [one for one in self.with_phones() if isinstance(one, Peer)]

    def with_phones(self) -> list[Peer | Phone]:
        """Return the devices and the phones, sorted by name."""
        return sorted(self._read().values(), key=lambda one: one.name.casefold())

    def get(self, device: DeviceID) -> Peer | None:
        return found if isinstance(found := self._read().get(device), Peer) else None

    def phone(self, key: str) -> Phone | None:
        """Return the phone with this key."""
        return found if isinstance(found := self._read().get(DeviceID.of(key.encode())), Phone) else None

    def find(self, text: str) -> Peer:
        """Return the device that a user means by a name, a short ID or a full ID. Raise NotPaired without one."""
        return _found(text, self.all())

    def find_any(self, text: str) -> Peer | Phone:
        """Return the device or the phone that a user means, as `find` does."""
        return _found(text, self.with_phones())

    def add(self, peer: Peer) -> Peer:
        """Put a device on the list, replacing its old entry; if another device has its name, append a number to it."""
        with self._changing() as known:
            return _put(known, peer)

    def add_phone(self, name: str, earlier: Phone | None = None) -> tuple[Phone, str]:
        """Put a phone on the list, in place of its `earlier` entry, whose name it keeps; return it, and its key, of
        which only the hash is stored."""
        key = secrets.token_urlsafe(32)
        device = DeviceID.of(key.encode())
        with self._changing() as known:
            before = None if earlier is None else known.pop(earlier.id, None)
            name = printable_name(name, device) if before is None else before.name
            return _put(known, Phone(name, device)), key

    def remove(self, device: DeviceID) -> None:
        """Remove a device from the list, for every process at once. Raise NotPaired if it is not there."""
        with self._changing() as known:
            del known[_require(known, device).id]

    def rename(self, device: DeviceID, name: str) -> Peer | Phone:
        """Rename a device. Raises NotPaired if it is not on the list, InvalidOption if the name is bad or taken."""
        wanted = checked_name(name)
        with self._changing() as known:
            if wanted.casefold() in {other.name.casefold() for other in known.values() if other.id != device}:
                raise InvalidOption(f"Another device is called {wanted!r}.", "Choose another name.")
            known[device] = renamed = replace(_require(known, device), name=wanted)
            return renamed

    def grant(self, device: DeviceID, rights: Iterable[Right]) -> Peer:
        """Grant a device rights here. Raises NotPaired if it is not on the list."""
        return self._edit(device, lambda peer: replace(peer, rights=peer.rights | frozenset(rights)))

    def wake(self, device: DeviceID, wakes: bool) -> Peer:
        """Have this device wake another one up for a reply, or not. Raises NotPaired as `grant` does."""
        return self._edit(device, lambda peer: replace(peer, wakes=wakes))

    def revoke(self, device: DeviceID, rights: Iterable[Right]) -> Peer:
        """Revoke rights of a device here, also during a call. Raises NotPaired as `grant` does."""
        return self._edit(device, lambda peer: replace(peer, rights=peer.rights - frozenset(rights)))

    def record_seen(
        self, device: DeviceID, address: Address | None = None, granted: Rights | None = None,
        cards: Iterable[NetworkCard] = (),
    ) -> None:  # fmt: skip
        """Record that the device was seen now, its `address` to listen at, the rights that it has `granted`, and its
        `cards`. Ignore an unknown device, and errors of the file."""
        when = now()

        def updated(peer: Peer) -> Peer:
            newest = () if address is None else (address,)
            addresses = tuple(dict.fromkeys([*newest, *peer.addresses]))[:MAX_ADDRESSES]
            known = tuple(dict.fromkeys([*cards, *peer.cards]))[:MAX_ADDRESSES]
            rights = peer.granted if granted is None else granted
            return replace(peer, seen=when, addresses=addresses, granted=rights, cards=known)

        with suppress(EdgeError):
            peer = self.get(device)
            if peer is not None and (
                replace(updated(peer), seen=peer.seen) != peer or abs(when - peer.seen) >= _SEEN_AGAIN
            ):
                self._edit(device, updated)

    def record_used(self, phone: Phone) -> None:
        """Record that a phone asks now. Ignore one that was removed meanwhile, and errors of the file."""
        if abs((when := now()) - phone.seen) >= _SEEN_AGAIN:
            with suppress(EdgeError), self._changing() as known:
                known[phone.id] = replace(_require(known, phone.id), seen=when)

    def _edit(self, device: DeviceID, change: Callable[[Peer], Peer]) -> Peer:
        with self._changing() as known:
            if not isinstance(found := _require(known, device), Peer):
                raise InvalidOption(
                    f"{found.name} is a phone, which has the page, and nothing else to grant, revoke or wake.",
                    f"Take the page from it with: edgellm peers rm {found.id.short}",
                )
            known[device] = changed = change(found)
            return changed

    @contextmanager
    def _changing(self) -> Iterator[Known]:
        """Yield a copy of the list, which becomes the list; not if it cannot be changed."""
        with lock_folder(self.path.parent):
            known = dict(self._read())
            yield known
            rows: dict[str, Any] = {"version": 1, "peers": [], "phones": []}
            for one in known.values():
                rows["peers" if isinstance(one, Peer) else "phones"].append(_row(one))
            write_private(self.path, json.dumps(rows, indent=1).encode() + b"\n")

    def _read(self) -> Known:
        stamp: tuple[int, ...] = ()
        with suppress(OSError):
            found = self.path.stat()
            stamp = found.st_ino, found.st_mtime_ns, found.st_size
        with self._lock:
            if stamp != self._stamp:
                self._known, self._stamp = {}, None
                data = read_private(self.path)
                self._known = _peers(data, self.path) if data is not None else {}
                self._stamp = stamp
            return self._known


def checked_name(name: str) -> str:
    """Return a device's name, stripped. Raise InvalidOption unless it is printable, on one line, and not too long."""
    name = name.strip()
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidOption(f"{name[:60]!r} is not a valid device name.", f"Give 1 to {MAX_NAME} printable characters.")
    return name


def printable_name(name: str, device: DeviceID) -> str:
    """Return the printable part of a device's own name, or its short ID if nothing is left."""
    printable = "".join(char for char in name if char.isprintable()).strip()[:MAX_NAME].strip()
    return printable or device.short


def _found(text: str, entries: Sequence[_Entry]) -> _Entry:
    """Return the one of `entries` that a user means by a name, a short ID or a full ID. Raise NotPaired without one."""
    asked = text.strip().casefold()
    found = [one for one in entries if one.name.casefold() == asked] or [one for one in entries if str(one.id) == asked]
    with suppress(InvalidOption):
        found = found or [one for one in entries if one.id.short == parse_short(text)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(one.name for one in entries)
    if found:
        raise NotPaired(f"{text!r} is the short ID of several devices.", f"Use a name: {names}.")
    known = f"Paired devices: {names}." if names else "Pair one with: edgellm pair"
    raise NotPaired(f"No paired device is called {text!r}.", known)


def _put(known: Known, entry: _Entry) -> _Entry:
    """Put an entry on the list, its name with a number if another one has it."""
    others = {other.name.casefold() for other in known.values() if other.id != entry.id}
    name, number = entry.name, 2
    while name.casefold() in others:
        name, number = f"{entry.name[: MAX_NAME - 4]}-{number}", number + 1
    known[entry.id] = named = replace(entry, name=name)
    return named


def _require(known: Known, device: DeviceID) -> Peer | Phone:
    if device not in known:
        raise NotPaired(f"The device {device.short} is not paired.", "List the paired devices: edgellm peers")
    return known[device]


def _row(peer: Peer | Phone) -> dict[str, Any]:
    row = {"name": peer.name, "id": str(peer.id), "paired": peer.paired.isoformat(), "seen": peer.seen.isoformat()}
    if isinstance(peer, Phone):
        return row
    return row | {  # the certificate counts, and the ID is for people
        "certificate": peer.certificate.pem.decode(),
        "rights": sorted(peer.rights), "granted": sorted(peer.granted), "addresses": list(map(str, peer.addresses)),
        "cards": list(map(str, peer.cards)), "wakes": peer.wakes,
    }  # fmt: skip


def _peers(data: bytes, path: Path) -> Known:
    try:
        found = json.loads(data)
        known: list[Peer | Phone] = [*map(_peer, found["peers"]), *map(_phone, found.get("phones", ()))]
    except MALFORMED as error:
        raise TrustUnusable(
            f"The list of paired devices in {path} is damaged: {error}.",
            "Move the file away, and pair the devices again; until then no device is trusted.",
        ) from None
    return {one.id: one for one in known}


def _phone(row: dict[str, Any]) -> Phone:
    device = DeviceID(bytes.fromhex(row["id"]))
    return Phone(checked_name(row["name"]), device, _utc(row["paired"]), _utc(row["seen"]))


def _peer(row: dict[str, Any]) -> Peer:
    return Peer(
        name=checked_name(row["name"]),
        certificate=Certificate.of_pem(row["certificate"].encode()),
        rights=read_rights(row["rights"]),
        granted=read_rights(row["granted"]),
        addresses=tuple(Address.parse(text) for text in row["addresses"])[:MAX_ADDRESSES],
        paired=_utc(row["paired"]),
        seen=_utc(row["seen"]),
        cards=read_cards(row["cards"]),
        wakes=row["wakes"] is True,
    )


def _utc(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"the time {text} has no time zone")
    return time


_SETTLE_SECONDS = 0.1  # time for new connections to finish with a replaced configuration


@dataclass(frozen=True, slots=True)
class Trust:
    """This device's identity and its list of paired devices."""

    identity: Identity
    peers: Peers

    @classmethod
    def load(cls, folder: Path | None = None) -> Self:
        """Return the trust of this user on this machine; create an identity at the first call. Raise TrustUnusable."""
        return cls(Identity.load(folder), Peers(folder))

    def require_peers(self, address: Address | None = None) -> list[Peer]:
        """Return the paired devices, at least one, to reach `address`. Raise PairingRequired without."""
        if not (peers := self.peers.all()):
            local = address is not None and address.loopback
            plain = f" A verifier of this machine needs no pairing: edgellm chat --verifier {address}." * local
            raise PairingRequired(
                "No device is paired with this one, and only paired devices may connect.",
                "Pair the devices first: run `edgellm pair` here, and the command that it shows on the other device."
                + plain,
            )
        return peers

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for mutual TLS with the devices that are paired at the time of each connection. gRPC asks
        for the configuration before each connection, one at a time. A new configuration replaces the old one, which
        gRPC frees at once, even if other connections are about to use it, and that crashes the process. So it gets a
        configuration only when the list has changed, and after a pause much longer than their microseconds of use."""
        sent = self._roots()

        def changed_configuration() -> grpc.ServerCertificateConfiguration | None:
            nonlocal sent
            roots = self._roots()
            if roots == sent:
                return None
            sleep(_SETTLE_SECONDS)
            sent = roots
            return self._configuration(roots)

        return grpc.dynamic_ssl_server_credentials(self._configuration(sent), changed_configuration, True)  # type: ignore[arg-type]

    def channel_credentials(self, device: DeviceID | None) -> grpc.ChannelCredentials:
        """Return credentials for mutual TLS with one paired device, or with any, which must then prove its identity."""
        peer = None if device is None else self.peers.get(device)
        pem = self.identity.certificate.pem
        return grpc.ssl_channel_credentials(
            self._roots() if peer is None else peer.certificate.pem, self.identity.key_pem, pem
        )

    def _configuration(self, roots: bytes) -> grpc.ServerCertificateConfiguration:
        own = (self.identity.key_pem, self.identity.certificate.pem)
        return grpc.ssl_server_certificate_configuration([own], roots)

    def _roots(self) -> bytes:
        peers: list[Peer] = []
        with suppress(TrustUnusable):  # without a readable list there are none
            peers = self.peers.all()
        return b"".join([self.identity.certificate.pem, *(peer.certificate.pem for peer in peers)])


def trust_for(address: Address) -> Trust | None:
    """Return the trust to connect to `address` with, or None for plain text on loopback if no peer was met there.
    Raises TrustUnusable: it must be TLS, and the identity cannot be read."""
    if not address.loopback:
        return Trust.load()
    try:
        met = any(address in peer.addresses for peer in Peers().all())
    except TrustUnusable:
        met = False
    return Trust.load() if met else None
