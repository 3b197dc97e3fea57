"""The handshake over mutual TLS: each side's identity, and the rights of the client; and the authorization of callers,
checked for every call after the handshake, and again while the call lasts."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio

from edgellm.errors import EdgeError, IdentityClash, NotPaired, NotPermitted, ProtocolError, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO_SECONDS, open_channel
from edgellm.rpc.discovery.interfaces import NetworkCard, PortState, own_cards, own_hosts, probe_port
from edgellm.rpc.protos import MAX_GREETING, PROTOCOL, check_version, parse_message, program_version
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust.identity import DeviceID, pem_id
from edgellm.rpc.trust.trust import Peer, Right, Rights, Trust, read_cards, read_rights

_SERVICE = pb.DESCRIPTOR.services_by_name["Devices"]
_WELCOME = f"/{_SERVICE.full_name}/Welcome"
_NONCE = 32  # bytes
LABEL = b"edgellm welcome 1\0"
_PAIR = "Run `edgellm pair` on one of the two, and the command that it shows on the other."
_DOCTOR = "Check that it is on and serves; `edgellm doctor` looks for the cause."
_NO_ANSWER = {
    PortState.REFUSED: "No answer from {}: the machine is up, but nothing listens at that port.",
    PortState.SILENT: "No answer from {}: the machine is off, or a firewall drops the packets.",
    PortState.UNKNOWN: "No answer from {}: there is no route to that address.",
}


class NothingListens(VerifierUnreachable):
    """A device is on, and serves nothing at an address."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A device that has proved its identity. `rights`: the rights of this device there; `seconds`: the round trip of a
    call; `cards`: those of its network cards that are in a home's network."""

    peer: Peer
    address: Address
    version: str
    rights: Rights
    offers: tuple[pb.Offer, ...]
    seconds: float
    cards: tuple[NetworkCard, ...] = ()


def welcome_handlers(
    trust: Trust, guard: "AuthInterceptor", offers: Sequence[pb.Offer]
) -> "grpc.GenericRpcHandler[Any, Any]":
    """Return the server's side, for `add_generic_rpc_handlers`. The `offers` may grow."""

    async def welcome(data: bytes, context: Context) -> pb.WelcomeReply:
        try:
            request = parse_message(pb.WelcomeRequest, data, MAX_GREETING)
            if len(request.nonce) != _NONCE:
                raise ProtocolError(f"The nonce has {len(request.nonce)} bytes.", f"Send {_NONCE}.")
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.what)
            raise  # abort does not return
        client = caller_id(context)
        peer = guard.check(client, None)
        await asyncio.to_thread(trust.peers.record_seen, client)
        own_id = trust.identity.id
        signature = trust.identity.sign(_statement(request.nonce, own_id, client))
        return pb.WelcomeReply(
            protocol=PROTOCOL, device=own_id.digest, signature=signature, version=program_version(),
            rights=sorted(peer.rights), models=offers,
            cards=map(str, own_cards()),
        )  # fmt: skip

    method = grpc.unary_unary_rpc_method_handler(guard.wrap(welcome), None, pb.WelcomeReply.SerializeToString)
    return grpc.method_handlers_generic_handler(_SERVICE.full_name, {"Welcome": method})


async def check_open(address: Address) -> None:
    """Raise VerifierUnreachable with the reason, which gRPC would not say, where nothing listens at an address."""
    if (found := await probe_port(address, 2.0)) is not PortState.OPEN:
        kind = NothingListens if found is PortState.REFUSED else VerifierUnreachable
        raise kind(_NO_ANSWER[found].format(address), _DOCTOR)


async def connect_authenticated(
    address: Address, trust: Trust, device: DeviceID | None = None, seconds: float = HELLO_SECONDS
) -> tuple[grpc.aio.Channel, PeerInfo]:
    """Return a channel to a paired device, or only to the given `device`, and its greeting; the caller closes it."""
    channel = open_channel(address, trust, device)
    try:
        await check_open(address)
        info = await _call_welcome(channel, address, trust, device, seconds)
    except BaseException:
        await channel.close(None)
        raise
    await asyncio.to_thread(trust.peers.record_seen, info.peer.id, address, info.rights, info.cards)
    return channel, info


async def fetch_peer_info(address: Address, trust: Trust, device: DeviceID | None = None) -> PeerInfo:
    """Return a device's greeting; its `seconds` are those of a second call, over the open connection."""
    channel, _first = await connect_authenticated(address, trust, device)
    async with channel:
        return await _call_welcome(channel, address, trust, device, HELLO_SECONDS)


async def _call_welcome(
    channel: grpc.aio.Channel, address: Address, trust: Trust, expected: DeviceID | None, seconds: float
) -> PeerInfo:
    call = channel.unary_unary(_WELCOME, pb.WelcomeRequest.SerializeToString, bytes)
    request = pb.WelcomeRequest(protocol=PROTOCOL, nonce=os.urandom(_NONCE))
    began = time.monotonic()
    try:
        data = await call(request, timeout=seconds)
    except grpc.aio.AioRpcError as error:
        raise _error_from_status(error, address, seconds) from None
    return read_welcome(data, request.nonce, trust, expected, address, time.monotonic() - began)


def read_welcome(
    data: bytes, nonce: bytes, trust: Trust, expected: DeviceID | None, address: Address, took: float
) -> PeerInfo:
    """Return a server's greeting, which took `took` seconds, checked to come from a paired device."""
    reply = parse_message(pb.WelcomeReply, data, MAX_GREETING)
    check_version(reply.protocol, "the other device")
    peer = _verified_peer(reply, nonce, trust, expected, address)
    offers = tuple(
        pb.Offer(
            model=one.model[:200],
            size=one.size,
            vocabulary=one.vocabulary[:32],
            behind=one.behind[:200],
            tokenizer=one.tokenizer[:32],
        )
        for one in reply.models
    )
    rights, cards = read_rights(reply.rights), read_cards(reply.cards)
    return PeerInfo(peer, address, reply.version[:40], rights, offers, took, cards)


def _verified_peer(
    reply: pb.WelcomeReply, nonce: bytes, trust: Trust, expected: DeviceID | None, address: Address
) -> Peer:
    """Return the server as a paired device, proved by its fingerprint and a signature with its key. The signature
    covers this device's ID as the server has seen it in TLS: a paired device that relays the request to another one, to
    impersonate it, gets an answer that names the wrong client."""
    device, own_id = DeviceID(reply.device), trust.identity.id
    if device == own_id:
        raise identity_clash(device, address.host)
    peer = trust.peers.get(device)
    if peer is None:
        raise NotPaired(f"The device {device.short} at {address} is not paired with this one.", _PAIR)
    if expected is not None and device != expected:
        raise NotPaired(
            f"The device at {address} is {peer.name} ({device.short}), not the expected one.", "Check the address."
        )
    if not peer.certificate.signed(reply.signature, _statement(nonce, device, own_id)):
        raise NotPaired(
            f"The device at {address} claims to be {peer.name}, but cannot prove it.",
            "The connection may be intercepted: do not use this address until you know the reason.",
        )
    return peer


def _statement(nonce: bytes, server: DeviceID, client: DeviceID) -> bytes:
    return LABEL + nonce + server.digest + client.digest


def _error_from_status(error: grpc.aio.AioRpcError, address: Address, seconds: float) -> EdgeError:
    """Return the error for a failed call to a port that is open. gRPC does not report a failed handshake as such."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return NotPermitted(f"The device at {address} refuses.", details or "Ask the device's owner for the right.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"The server at {address} is not edgellm, or is too old.", "Update edgellm there.")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return VerifierUnreachable(f"No answer from {address} within {seconds:g} seconds.", _DOCTOR)
    return NotPaired(f"The server at {address} and this device do not trust each other, or no longer do.", _PAIR)


Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Method: TypeAlias = Callable[[Any, Context], Awaitable[Any]]

RECHECK_SECONDS = 0.25  # seconds between two checks of open calls against the list of paired devices
DRAIN_SECONDS = 2.0  # longest time for which a refused caller's requests are still read
QUIET_SECONDS = 0.25  # silence after which a caller is taken to await the reply


class AuthInterceptor:
    """Checks the callers of a service's methods. Runs in one event loop."""

    def __init__(self, trust: Trust, notify: Callable[[str], None]) -> None:
        """Set up the checks; `notify` is called with a line for every refused call."""
        self._trust = trust
        self._notify = notify

    def wrap(self, method: Method, right: Right | None = None) -> Method:
        """Return `method`, restricted to paired devices with this right, or to all paired devices without `right`. It
        is ended for a device that is no longer trusted."""

        async def guarded(request: Any, context: Context) -> Any:
            working: asyncio.Future[Any] | None = None
            try:
                device = caller_id(context)
                self.check(device, right, caller_host(context))
                working = asyncio.ensure_future(method(request, context))
                while not (await asyncio.wait({working}, timeout=RECHECK_SECONDS))[0]:
                    self.check(device, right)
            except EdgeError as error:
                await _stop(working)
                await self._refuse(error, context)
            finally:
                await _stop(working)
            return working.result()

        return guarded

    def check(self, device: DeviceID, right: Right | None, host: str = "") -> Peer:
        """Return the paired device with this ID, which calls from `host`. Raise NotPaired for an unknown device,
        IdentityClash for this device's own identity, NotPermitted without the right, and TrustUnusable where the list
        of paired devices cannot be read, so that no device is trusted."""
        if device == self._trust.identity.id:
            raise identity_clash(device, host)
        peer = self._trust.peers.get(device)
        if peer is None:
            raise NotPaired(f"The device {device.short} is not paired with this one.", "Pair the devices: edgellm pair")
        if right is not None and right not in peer.rights:
            raise NotPermitted(
                f"{peer.name} ({device.short}) has no right to {right} here.",
                f"Grant it on this device: edgellm peers grant {device.short} {right}",
            )
        return peer

    async def _refuse(self, error: EdgeError, context: Context) -> NoReturn:
        self._notify(f"Refused {caller_host(context) or 'an unknown caller'}: {error.what}")
        await drain(context)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        raise error  # abort does not return


async def _stop(working: asyncio.Future[Any] | None) -> None:
    if working is not None:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def drain(context: Context) -> None:
    """Read on until a refused caller pauses: gRPC hides the reason from one that is writing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while isinstance(await asyncio.wait_for(context.read(), QUIET_SECONDS), bytes):
                pass


def caller_id(context: Context) -> DeviceID:
    """Return the device ID of the caller's client certificate, whose key the caller has proved to hold. Raise NotPaired
    without a certificate."""
    shown = b"".join((context.auth_context() or {}).get("x509_pem_cert", ()))
    if not shown:
        raise NotPaired("The caller has shown no certificate.", "Connect with mutual TLS.")
    return pem_id(shown)


def caller_host(context: Context) -> str:
    """Return the host of the caller, or an empty string if it is unknown."""
    _kind, _, rest = unquote(context.peer()).partition(":")
    return rest.rpartition(":")[0].strip("[]")


def identity_clash(device: DeviceID, host: str) -> IdentityClash:
    if host in own_hosts():
        return IdentityClash(
            f"The device {device.short} has connected to itself.", "On one machine, use 127.0.0.1 without pairing."
        )
    return IdentityClash(
        f"The device at {host or 'the other end'} has this device's identity, {device.short}: its files were copied.",
        "On the device with the copy, remove trust/identity.pem from edgellm's data folder, and pair it again.",
    )
