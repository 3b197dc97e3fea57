"""Pairing: one device opens a window for two minutes and one guess, and another device joins with the code.

The password-authenticated key exchange is bound to both certificates: their fingerprints are the identities of its two
sides, and each side's confirmation covers the certificates as it has seen them. An attacker in the middle who
substitutes a certificate leaves the two sides with different keys.

Certificates are public, so knowing the code does not prove ownership of one. Each side therefore also signs the
transcript with its certificate's private key, so that an attacker cannot pair, or rename, a device without its key.
"""

import asyncio
import difflib
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import grpc
import grpc.aio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from edgellm.errors import (
    SAME_VERSION,
    EdgeError,
    IdentityClash,
    InvalidOption,
    NotPaired,
    PairingFailed,
    ProtocolError,
    VerifierUnreachable,
)
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind_pairing, new_server, open_pairing_channel, run_in_network_loop
from edgellm.rpc.discovery.interfaces import own_cards
from edgellm.rpc.protos import PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust.handshake import Context, caller_host, identity_clash
from edgellm.rpc.trust.identity import Certificate, Identity
from edgellm.rpc.trust.trust import MAX_ADDRESSES, Peer, Rights, Trust, printable_name, read_cards, read_rights

NUMBERS = 99
WINDOW_SECONDS = 120.0
STEP_SECONDS = 15.0  # limit for all steps after the first word
_SERVICE = pb.DESCRIPTOR.services_by_name["Pairing"]
_PAIR = f"/{_SERVICE.full_name}/Pair"
_LABEL = b"edgellm pairing 2"
_SIGNED = {"A": b"edgellm pairing 2 signature A\0", "B": b"edgellm pairing 2 signature B\0"}
_NONCE = bytes(12)  # each key seals one message
_KEY = 32  # bytes
_NEW_CODE = "Run `edgellm pair` again for a new code."
_WRONG = ("The code is wrong, or the connection was tampered with; nothing was paired.", _NEW_CODE)
_NOT_ITS_OWN = (
    "The other device knows the code, but does not hold the key of the certificate it shows; nothing was paired.",
    "It may be impersonating another device. Pair only with a device in front of you, with a new code.",
)
_GONE = ("The other device disconnected during pairing.", _NEW_CODE)
_REFUSALS: dict[type[Exception], grpc.StatusCode] = {
    PairingFailed: grpc.StatusCode.PERMISSION_DENIED,
    NotPaired: grpc.StatusCode.INVALID_ARGUMENT,
    IdentityClash: grpc.StatusCode.INVALID_ARGUMENT,
}

WORDS = tuple(Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())
"""256 words, 8 bits each. No two begin with the same three letters, and to make one of another takes three changes."""


@dataclass(frozen=True, slots=True)
class Code:
    """A code shown on one screen and typed at the other device. The words hold 16 bits, and one guess is allowed."""

    number: int
    words: tuple[str, str]

    def __str__(self) -> str:
        return "-".join((str(self.number), *self.words))

    @classmethod
    def new(cls, number: int) -> Self:
        return cls(number, (secrets.choice(WORDS), secrets.choice(WORDS)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the code in text as people type it: any case, spaces for dashes, three letters or more of each word.
        Raise InvalidOption for a wrong word, before it costs the only guess."""
        number, *words = text.lower().replace("-", " ").replace("_", " ").split() or [""]
        valid_number = number.isascii() and number.isdigit() and len(number) <= 3 and 1 <= int(number) <= NUMBERS
        if not valid_number or len(words) != 2:
            raise InvalidOption(f"{text!r} is not a pairing code.", "A code is a number and two words: 7-lamp-otter.")
        return cls(int(number), (_word(words[0]), _word(words[1])))


def _word(typed: str) -> str:
    found = [word for word in WORDS if word == typed] or [
        word for word in WORDS if len(typed) >= 3 and word.startswith(typed)
    ]
    if found:
        return found[0]
    near = difflib.get_close_matches(typed, WORDS, n=1, cutoff=0.5)
    hint = f" Is it {near[0]!r}?" if near else ""
    raise InvalidOption(f"{typed!r} is not a word of any code.{hint}", "Compare it with the other screen.")


class Exchange:
    """One side of one exchange: send `spake`, pass the other side's to `agree`, then check each other's confirmation.
    Side A is the device on which the code is typed; it confirms first, so that a guess costs the window."""

    def __init__(self, side: Literal["A", "B"], code: Code, own: Identity) -> None:
        self._side, self._own = side, own
        self._other: Certificate | None = None
        from spake2 import SPAKE2_A, SPAKE2_B  # the import computes tables

        self._spake = (SPAKE2_A if side == "A" else SPAKE2_B)(str(code).encode())
        self.spake: bytes = self._spake.start()
        self._transcript = b""
        self._mac: dict[str, bytes] = {}
        self._seal: dict[str, bytes] = {}

    def agree(self, other: Certificate, spake: bytes) -> None:
        """Derive the keys from the code and from everything that both sides have seen. Raise PairingFailed."""
        self._other = other
        own, received = (self._own.certificate, self.spake), (other, spake)
        (cert_a, spake_a), (cert_b, spake_b) = (own, received) if self._side == "A" else (received, own)
        self._spake.idA, self._spake.idB = cert_a.id.digest, cert_b.id.digest
        try:
            shared = self._spake.finish(spake)
        except Exception as error:  # noqa: BLE001 - whatever the library says of a stranger's bytes
            raise PairingFailed(f"The other side sent no SPAKE2 message ({type(error).__name__}).", _NEW_CODE) from None
        parts = (_LABEL, cert_a.der, cert_b.der, spake_a, spake_b)
        self._transcript = hashlib.sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()
        keys = HKDF(hashes.SHA256(), 4 * _KEY, None, self._transcript).derive(shared)
        mac_a, mac_b, seal_a, seal_b = (keys[at : at + _KEY] for at in range(0, 4 * _KEY, _KEY))
        self._mac, self._seal = {"A": mac_a, "B": mac_b}, {"A": seal_a, "B": seal_b}

    def confirm(self, words: bytes) -> tuple[bytes, bytes, bytes]:
        """Return the MAC that proves knowledge of the key, `words` encrypted with it, and the signature that proves
        ownership of this side's certificate."""
        sealed = ChaCha20Poly1305(self._seal[self._side]).encrypt(_NONCE, words, self._transcript)
        return self._tag(self._side, sealed), sealed, self._own.sign(self._statement(self._side, sealed))

    def check(self, mac: bytes, sealed: bytes, signature: bytes) -> bytes:
        other = "B" if self._side == "A" else "A"
        if not hmac.compare_digest(mac, self._tag(other, sealed)):
            raise PairingFailed(*_WRONG)
        if self._other is None or not self._other.signed(signature, self._statement(other, sealed)):
            raise PairingFailed(*_NOT_ITS_OWN)
        try:
            return ChaCha20Poly1305(self._seal[other]).decrypt(_NONCE, sealed, self._transcript)
        except InvalidTag:
            raise PairingFailed(*_WRONG) from None

    def done(self) -> bytes:
        """Return side A's last MAC, which says that A has checked B's confirmation."""
        return self._tag("A", b"done")

    def _statement(self, side: str, sealed: bytes) -> bytes:
        """Return the bytes that `side` signs: everything that both have seen, and its own words (name and rights)."""
        return _SIGNED[side] + self._transcript + hashlib.sha256(sealed).digest()

    def _tag(self, side: str, words: bytes) -> bytes:
        return hmac.digest(self._mac[side], self._transcript + words, "sha256")


def introduce(name: str, rights: Rights, addresses: Sequence[Address]) -> pb.Introduction:
    """Return this device's description for the one it pairs with: its name, the rights of the other one here, and the
    addresses of its server."""
    return pb.Introduction(name=name, rights=sorted(rights), addresses=map(str, addresses), cards=map(str, own_cards()))


class PairingWindow:
    """The side that shows the code. The first device has the only guess; then, or after a timeout, it closes."""

    def __init__(self, trust: Trust, code: Code, about: pb.Introduction, seconds: float = WINDOW_SECONDS) -> None:
        self._trust, self._code, self._introduction, self._seconds = trust, code, about, seconds
        self._server: grpc.aio.Server | None = None
        self._taken = False  # whether the guess was used
        self._over: Future[Peer] = Future()

    def open(self, hosts: Sequence[str], port: int | None = None) -> list[Address]:
        """Listen at each of these hosts, in plain text that anyone may read; return the addresses. Raise InvalidOption
        or PortTaken as `bind_pairing` does."""
        return run_in_network_loop(self._open(hosts, port)).result()

    def wait(self, seconds: float | None = None) -> Peer:
        """Return the paired device, once it is on the list of paired devices."""
        return self._over.result(seconds)

    def close(self) -> None:
        self._end(PairingFailed("Pairing was cancelled before another device joined.", _NEW_CODE))
        if self._server is not None:
            run_in_network_loop(self._server.stop(1.0)).result()

    async def _open(self, hosts: Sequence[str], port: int | None) -> list[Address]:
        self._server = new_server(pairing=True)
        method = grpc.stream_stream_rpc_method_handler(self._pair)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE.full_name, {"Pair": method}),)
        )
        addresses = bind_pairing(self._server, hosts, port)
        await self._server.start()
        late = PairingFailed(f"No device joined within {self._seconds:g} seconds.", _NEW_CODE)
        asyncio.get_running_loop().call_later(self._seconds, self._time_is_up, late)
        return addresses

    def _time_is_up(self, late: EdgeError) -> None:
        if not self._taken:  # a pairing under way has its own deadline
            self._taken = True
            self._end(late)

    def _end(self, error: EdgeError) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    async def _pair(self, _frames: Any, stream: Context) -> None:
        exchange = None
        try:
            async with asyncio.timeout(STEP_SECONDS):
                exchange, certificate = self._admitted(await _read(stream, "hello"), stream)
            async with asyncio.timeout(STEP_SECONDS):
                await _write(stream, _hello(self._trust, exchange))
                confirmation, host = await _read(stream, "confirm"), caller_host(stream)
                peer = _introduced(exchange, certificate, confirmation, self._introduction, host)
                await _write(stream, _confirm(exchange, self._introduction))
                if not hmac.compare_digest((await _read(stream, "done")).mac, exchange.done()):
                    raise PairingFailed(*_WRONG)
                peer = await asyncio.to_thread(self._trust.peers.add, peer)
        except (EdgeError, TimeoutError) as error:
            if exchange is not None:  # the guess was made
                late = PairingFailed("The other device did not finish in time.", _NEW_CODE)
                self._end(error if isinstance(error, EdgeError) else late)
            await _refuse(stream, error)
        except BaseException:
            if exchange is not None:
                self._end(PairingFailed(*_GONE))
            raise
        if not self._over.done():
            self._over.set_result(peer)

    def _admitted(self, hello: pb.PairHello, stream: Context) -> tuple[Exchange, Certificate]:
        check_version(hello.protocol, "the other device")
        certificate = Certificate.of(hello.certificate)
        if certificate.id == self._trust.identity.id:
            raise identity_clash(certificate.id, caller_host(stream))
        if self._taken:
            raise ProtocolError("The pairing window is closed: it allows one guess within two minutes.", _NEW_CODE)
        exchange = Exchange("B", self._code, self._trust.identity)
        exchange.agree(certificate, hello.spake)
        self._taken = True
        return exchange, certificate


def join(address: Address, code: Code, trust: Trust, introduction: pb.Introduction) -> Peer:
    """Pair with the device whose window is at `address`; return it, now on the list of paired devices."""
    return run_in_network_loop(_join(address, code, trust, introduction)).result()


async def _join(address: Address, code: Code, trust: Trust, introduction: pb.Introduction) -> Peer:
    async with open_pairing_channel(address) as channel:
        call = channel.stream_stream(_PAIR, bytes, bytes)(timeout=2 * STEP_SECONDS)  # type: ignore[call-arg]  # written to
        try:
            exchange = Exchange("A", code, trust.identity)
            await _write(call, _hello(trust, exchange))
            hello = await _read(call, "hello")
            check_version(hello.protocol, "the other device")
            certificate = Certificate.of(hello.certificate)
            if certificate.id == trust.identity.id:
                raise identity_clash(certificate.id, address.host)
            exchange.agree(certificate, hello.spake)
            await _write(call, _confirm(exchange, introduction))
            peer = _introduced(exchange, certificate, await _read(call, "confirm"), introduction, address.host)
            await _write(call, pb.PairFrame(done=pb.PairDone(mac=exchange.done())))
            await call.done_writing()
            if isinstance(await call.read(), bytes):
                raise ProtocolError("The other device sent a frame after the last one.", SAME_VERSION)
        except grpc.aio.AioRpcError as error:
            raise _why(error, address) from None
        except asyncio.InvalidStateError:  # the stream ended between two frames
            raise PairingFailed(*_GONE) from None
        finally:
            call.cancel()
    return await asyncio.to_thread(trust.peers.add, peer)


def _hello(trust: Trust, exchange: Exchange) -> pb.PairFrame:
    own = trust.identity.certificate.der
    return pb.PairFrame(hello=pb.PairHello(protocol=PROTOCOL, certificate=own, spake=exchange.spake))


def _confirm(exchange: Exchange, introduction: pb.Introduction) -> pb.PairFrame:
    mac, sealed, signature = exchange.confirm(introduction.SerializeToString())
    return pb.PairFrame(confirm=pb.PairConfirm(mac=mac, sealed=sealed, signature=signature))


def _introduced(
    exchange: Exchange, certificate: Certificate, confirmation: pb.PairConfirm, own: pb.Introduction, host: str
) -> Peer:
    words = exchange.check(confirmation.mac, confirmation.sealed, confirmation.signature)
    return read_introduction(certificate, words, read_rights(own.rights), host)


async def _write(stream: Any, frame: pb.PairFrame) -> None:
    await stream.write(frame.SerializeToString())


async def _read(stream: Any, kind: str) -> Any:
    data = await stream.read()
    if not isinstance(data, bytes):
        raise PairingFailed(*_GONE)
    frame = parse_message(pb.PairFrame, data)
    if frame.WhichOneof("frame") != kind:
        raise ProtocolError(f"Expected a frame {kind!r}, but received {frame.WhichOneof('frame')!r}.", SAME_VERSION)
    return getattr(frame, kind)


def read_introduction(certificate: Certificate, words: bytes, rights: Rights, host: str) -> Peer:
    """Return the device as it goes on the list: seen at `host`, described by its own `words`. Raise ProtocolError."""
    introduction = parse_message(pb.Introduction, words)
    addresses = []
    for text in introduction.addresses[:MAX_ADDRESSES]:
        with suppress(EdgeError):
            addresses.append(Address.parse(text))
    seen = [Address(host, addresses[0].port)] if addresses and host else []
    # any program of this machine may listen on loopback, so such addresses count only once the device was seen there
    addresses = [address for address in dict.fromkeys([*seen, *addresses]) if not address.loopback]
    return Peer(
        printable_name(introduction.name, certificate.id), certificate, rights, read_rights(introduction.rights),
        tuple(addresses)[:MAX_ADDRESSES], cards=read_cards(introduction.cards),
    )  # fmt: skip


async def _refuse(stream: Context, error: EdgeError | TimeoutError) -> NoReturn:
    if isinstance(error, TimeoutError):
        await stream.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "The deadline has passed.")
    await stream.abort(_REFUSALS.get(type(error), grpc.StatusCode.FAILED_PRECONDITION), str(error))
    raise error  # abort does not return


def _why(error: grpc.aio.AioRpcError, address: Address) -> EdgeError:
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.FAILED_PRECONDITION, *_REFUSALS.values()):
        return PairingFailed(f"The device at {address} refuses.", details or _NEW_CODE)
    if code is grpc.StatusCode.UNAVAILABLE:
        return VerifierUnreachable(
            f"No device is waiting at {address} to be paired.", "Run `edgellm pair` there, and copy its command."
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return PairingFailed(f"The server at {address} does not pair devices.", "Check the port on the other screen.")
    return PairingFailed(f"The device at {address} did not finish: {details or code.name}.", _NEW_CODE)
