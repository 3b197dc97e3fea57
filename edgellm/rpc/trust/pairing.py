"""Pairing: a window that one device opens for two minutes and one guess, and the other device that comes through it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn, Self

import grpc
import grpc.aio

from edgellm.errors import EdgeError, IdentityClash, NotPaired, PairingFailed, ProtocolError, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind_pairing, new_pairing_server, open_pairing_channel
from edgellm.rpc.event_loop import run_there
from edgellm.rpc.proto_parse import parsed
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import Context, caller, own_identity
from edgellm.rpc.trust.identity import Certificate
from edgellm.rpc.trust.pairing_code import Code
from edgellm.rpc.trust.peer_store import ADDRESSES_MOST, Peer, shown_name
from edgellm.rpc.trust.rights import Rights, read_rights
from edgellm.rpc.trust.spake2_exchange import Exchange
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import PAIRING, check_version, program

PAIRING_PORT = 50150
WINDOW_SECONDS = 120.0
STEP_SECONDS = 15.0  # for all that follows the first word

_SERVICE = pb.DESCRIPTOR.services_by_name["Pairing"]
_PAIR = f"/{_SERVICE.full_name}/Pair"


@dataclass(frozen=True, slots=True)
class About:
    """What a device tells the one it pairs with: its name, what the other may do here, and where it serves."""

    name: str
    rights: Rights
    addresses: tuple[Address, ...]

    def to_bytes(self) -> bytes:
        words = pb.Introduction(
            name=self.name,
            rights=sorted(self.rights),
            addresses=[str(address) for address in self.addresses],
            version=program(),
        )
        return words.SerializeToString()


class Window:
    """The side that shows the code. The first device has the only guess; then, or after a timeout, it closes."""

    def __init__(self, trust: Trust, code: Code, about: About, seconds: float = WINDOW_SECONDS) -> None:
        self._trust, self._code, self._about, self._seconds = trust, code, about, seconds
        self._server: grpc.aio.Server | None = None
        self._taken = False  # the guess, by whomever
        self._over: Future[Peer] = Future()

    def open(self, hosts: Sequence[str], port: int = PAIRING_PORT) -> list[Address]:
        """Listen at each of these hosts, in plain text that anyone may read; return the addresses. If `port` is taken,
        the system chooses one.

        Raises:
            InvalidOption: this machine does not have one of the addresses.
            PortTaken: the port that was chosen is taken at another of the addresses.
        """
        return run_there(self._open(hosts, port)).result()

    def wait(self, seconds: float | None = None) -> Peer:
        """Wait for the paired device, which is then on the list of paired devices. Raises TimeoutError after `seconds`.

        Raises:
            PairingFailed: nobody came in time, or the guess was wrong.
            TrustUnusable: the list cannot be written.
        """
        return self._over.result(seconds)

    def close(self) -> None:
        """Close the window."""
        self._end(PairingFailed("The window was closed before another device came.", _AGAIN))
        if self._server is not None:
            run_there(self._server.stop(1.0)).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    async def _open(self, hosts: Sequence[str], port: int) -> list[Address]:
        self._server = new_pairing_server()
        method = grpc.stream_stream_rpc_method_handler(self._pair)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE.full_name, {"Pair": method}),)
        )
        addresses = bind_pairing(self._server, hosts, port)
        await self._server.start()
        late = PairingFailed(f"Nobody came within {self._seconds:g} seconds.", _AGAIN)
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
        try:
            async with asyncio.timeout(STEP_SECONDS):
                exchange, certificate = self._admitted(await _read(stream, "hello"), stream)
        except (EdgeError, TimeoutError) as error:  # no guess was made
            await _refuse(stream, error)
        try:
            async with asyncio.timeout(STEP_SECONDS):
                peer = await self._exchange(exchange, certificate, stream)
        except (EdgeError, TimeoutError) as error:
            failed = PairingFailed("The other device did not finish in time.", _AGAIN)
            self._end(error if isinstance(error, EdgeError) else failed)
            await _refuse(stream, error)
        except BaseException:
            self._end(PairingFailed("The other device left in the middle.", _AGAIN))
            raise
        if not self._over.done():
            self._over.set_result(peer)

    def _admitted(self, hello: pb.PairHello, stream: Context) -> tuple[Exchange, Certificate]:
        """Check the first frame, and use up the only guess if it is in order."""
        check_version(hello.protocol, PAIRING, "the other device")
        certificate = Certificate.of(hello.certificate)
        if certificate.id == self._trust.identity.id:
            raise own_identity(certificate.id, caller(stream))
        if self._taken:
            raise ProtocolError("The window is closed: it takes one guess, and two minutes.", _AGAIN)
        exchange = Exchange("B", self._code, self._trust.identity)
        exchange.agree(certificate, hello.spake)
        self._taken = True
        return exchange, certificate

    async def _exchange(self, exchange: Exchange, certificate: Certificate, stream: Context) -> Peer:
        own = self._trust.identity.certificate.der
        await _write(stream, pb.PairFrame(hello=_hello(own, exchange.spake)))
        said = await _read(stream, "confirm")
        words = exchange.check(said.mac, said.sealed, said.signature)
        peer = introduced(certificate, words, self._about.rights, caller(stream))
        await _write(stream, _confirm(exchange, self._about))
        exchange.check_done((await _read(stream, "done")).mac)
        return await asyncio.to_thread(self._trust.peers.add, peer)


def join(address: Address, code: Code, trust: Trust, about: About, seconds: float = 2 * STEP_SECONDS) -> Peer:
    """Pair with the device whose window is at `address`, and put it on the list of paired devices.

    Raises:
        PairingFailed: a wrong code, no window, or somebody in between; nothing was changed here.
        IdentityClash: the other device has the identity of this one.
        PeerTooOld, PeerTooNew: says which of the two.
        VerifierUnreachable: nobody answers.
        TrustUnusable: the list of paired devices cannot be written.
    """
    return run_there(_join(address, code, trust, about, seconds)).result()


async def _join(address: Address, code: Code, trust: Trust, about: About, seconds: float) -> Peer:
    async with open_pairing_channel(address) as channel:
        call = channel.stream_stream(_PAIR, bytes, bytes)(timeout=seconds)  # type: ignore[call-arg]  # written to
        try:
            peer = await _through(call, code, trust, about, address)
            await call.done_writing()
            if isinstance(await call.read(), bytes):
                raise ProtocolError("The other device says more than it should.", _UPDATE)
        except grpc.aio.AioRpcError as error:
            raise _why(error, address) from None
        except asyncio.InvalidStateError:  # ended between two frames
            raise PairingFailed("The other device left in the middle.", _AGAIN) from None
        finally:
            call.cancel()
    return await asyncio.to_thread(trust.peers.add, peer)


async def _through(call: Any, code: Code, trust: Trust, about: About, address: Address) -> Peer:
    exchange = Exchange("A", code, trust.identity)
    await _write(call, pb.PairFrame(hello=_hello(trust.identity.certificate.der, exchange.spake)))
    hello = await _read(call, "hello")
    check_version(hello.protocol, PAIRING, "the other device")
    certificate = Certificate.of(hello.certificate)
    if certificate.id == trust.identity.id:
        raise own_identity(certificate.id, address.host)
    exchange.agree(certificate, hello.spake)
    await _write(call, _confirm(exchange, about))
    said = await _read(call, "confirm")
    words = exchange.check(said.mac, said.sealed, said.signature)
    peer = introduced(certificate, words, about.rights, address.host)
    await _write(call, pb.PairFrame(done=pb.PairDone(mac=exchange.done())))
    return peer


def _hello(certificate: bytes, spake: bytes) -> pb.PairHello:
    return pb.PairHello(protocol=PAIRING, certificate=certificate, spake=spake)


def _confirm(exchange: Exchange, about: About) -> pb.PairFrame:
    mac, sealed, signature = exchange.confirm(about.to_bytes())
    return pb.PairFrame(confirm=pb.PairConfirm(mac=mac, sealed=sealed, signature=signature))


async def _write(stream: Any, frame: pb.PairFrame) -> None:
    await stream.write(frame.SerializeToString())


async def _read(stream: Any, kind: str) -> Any:
    """Return the next frame, which must be of this kind."""
    data = await stream.read()
    if not isinstance(data, bytes):
        raise PairingFailed("The other device left in the middle.", _AGAIN)
    frame = parsed(pb.PairFrame, data)
    if frame.WhichOneof("frame") != kind:
        raise ProtocolError(f"{kind!r} was to come, and {frame.WhichOneof('frame')!r} came.", _UPDATE)
    return getattr(frame, kind)


def introduced(certificate: Certificate, words: bytes, rights: Rights, host: str) -> Peer:
    """Return the device as it goes on the list: seen at `host`, described by its own `words`.

    Raises:
        ProtocolError: the words are not an Introduction.
    """
    said = parsed(pb.Introduction, words)
    told = []
    for text in said.addresses[:ADDRESSES_MOST]:
        try:
            told.append(Address.parse(text))
        except EdgeError:
            continue
    seen = [Address(host, told[0].port)] if told and host else []
    # what listens on loopback is anybody's of this machine, until the device was met there
    addresses = [address for address in dict.fromkeys([*seen, *told]) if not address.loopback]
    now = datetime.now(UTC).replace(microsecond=0)
    return Peer(
        name=shown_name(said.name, certificate.id),
        certificate=certificate,
        rights=rights,
        granted=read_rights(said.rights),
        addresses=tuple(addresses)[:ADDRESSES_MOST],
        paired=now,
        seen=now,
    )


async def _refuse(stream: Context, error: EdgeError | TimeoutError) -> NoReturn:
    code = grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(error, PairingFailed):
        code = grpc.StatusCode.PERMISSION_DENIED
    elif isinstance(error, (NotPaired, IdentityClash)):
        code = grpc.StatusCode.INVALID_ARGUMENT
    elif isinstance(error, TimeoutError):
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    await stream.abort(code, str(error) or "Too late.")
    raise error  # abort does not return


def _why(error: grpc.aio.AioRpcError, address: Address) -> EdgeError:
    code, details = error.code(), error.details() or ""
    if code in (
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
    ):
        return PairingFailed(f"The device at {address} refuses.", details or _AGAIN)
    if code is grpc.StatusCode.UNAVAILABLE:
        return VerifierUnreachable(
            f"No device waits at {address} to be paired.", "Run `edgellm pair` there, and copy what it shows."
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return PairingFailed(f"What answers at {address} pairs with nobody.", "Check the port on the other screen.")
    return PairingFailed(f"The device at {address} did not finish: {details or code.name}.", _AGAIN)


_AGAIN = "Run `edgellm pair` again for a new code."
_UPDATE = "Run the same version of edgellm on both sides."
