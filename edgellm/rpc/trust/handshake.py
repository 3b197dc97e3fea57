"""The handshake over mutual TLS: each side's identity, and the rights of the client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio

from edgellm.errors import SAME_VERSION, EdgeError, NotPaired, NotPermitted, ProtocolError, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO_SECONDS, open_channel
from edgellm.rpc.discovery.interfaces import NetworkCard, PortState, call_with_retry, own_cards, probe_port
from edgellm.rpc.protos import DEVICES_PROTOCOL, MAX_GREETING, check_version, parse_message, program_version
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, Context, caller_id, identity_clash
from edgellm.rpc.trust.identity import DeviceID
from edgellm.rpc.trust.trust import Peer, Rights, Trust, read_cards, read_rights

_SERVICE = pb.DESCRIPTOR.services_by_name["Devices"]
_WELCOME = f"/{_SERVICE.full_name}/Welcome"
_NONCE = 32  # bytes
_MAX_OFFERS = 16
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
class OfferedModel:
    """A model that a device lets others use; `size` in bytes, 0 if it is unknown, `vocabulary` a fingerprint in hex.
    `behind` names the verifier behind the device, and how it verifies, for people; empty: the device itself."""

    role: str
    model: str
    size: int
    vocabulary: str
    behind: str = ""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A device that has proved its identity. `rights`: the rights of this device there; `seconds`: the round trip of a
    call; `clock_ahead`: by how many seconds its clock is ahead of this device's; `cards`: those of its network cards
    that are in a home's network."""

    peer: Peer
    address: Address
    version: str
    rights: Rights
    offers: tuple[OfferedModel, ...]
    seconds: float
    clock_ahead: float
    cards: tuple[NetworkCard, ...] = ()


def welcome_handlers(
    trust: Trust, guard: AuthInterceptor, offers: Sequence[OfferedModel]
) -> grpc.GenericRpcHandler[Any, Any]:
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
        models = [pb.Offer(**(asdict(one) | {"vocabulary": bytes.fromhex(one.vocabulary)})) for one in offers]
        return pb.WelcomeReply(
            protocol=DEVICES_PROTOCOL, device=own_id.digest, signature=signature, version=program_version(),
            rights=sorted(peer.rights), models=models, time=int(time.time()),
            cards=map(str, own_cards()),
        )  # fmt: skip

    method = grpc.unary_unary_rpc_method_handler(guard.wrap(welcome), None, pb.WelcomeReply.SerializeToString)
    return grpc.method_handlers_generic_handler(_SERVICE.full_name, {"Welcome": method})


async def connect_authenticated(
    address: Address, trust: Trust, device: DeviceID | None = None, seconds: float = HELLO_SECONDS
) -> tuple[grpc.aio.Channel, PeerInfo]:
    """Return a channel to a paired device, or only to the given `device`, and its greeting; the caller closes it."""
    channel = open_channel(address, trust, device)
    try:
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
    request = pb.WelcomeRequest(protocol=DEVICES_PROTOCOL, nonce=os.urandom(_NONCE), version=program_version())

    async def attempt(deadline: float) -> tuple[bytes, float]:
        began = time.monotonic()
        return await call(request, timeout=deadline), time.monotonic() - began

    try:
        data, elapsed = await call_with_retry(attempt, address, seconds)
    except grpc.aio.AioRpcError as error:
        raise await _error_from_status(error, address, seconds) from None
    return read_welcome(data, request.nonce, trust, expected, address, elapsed)


def read_welcome(
    data: bytes, nonce: bytes, trust: Trust, expected: DeviceID | None, address: Address, took: float
) -> PeerInfo:
    """Return a server's greeting, which took `took` seconds, checked to come from a paired device."""
    reply = parse_message(pb.WelcomeReply, data, MAX_GREETING)
    check_version(reply.protocol, DEVICES_PROTOCOL, "the other device")
    peer = _verified_peer(reply, nonce, trust, expected, address)
    offers = tuple(
        OfferedModel(one.role[:40], one.model[:200], one.size, one.vocabulary.hex()[:64], one.behind[:200])
        for one in reply.models[:_MAX_OFFERS]
    )
    ahead = reply.time - time.time()
    rights, cards = read_rights(reply.rights), read_cards(reply.cards)
    return PeerInfo(peer, address, reply.version[:40], rights, offers, took, ahead, cards)


def _verified_peer(
    reply: pb.WelcomeReply, nonce: bytes, trust: Trust, expected: DeviceID | None, address: Address
) -> Peer:
    """Return the server as a paired device, proved by its fingerprint and a signature with its key. The signature
    covers this device's ID as the server has seen it in TLS: a paired device that relays the request to another one, to
    impersonate it, gets an answer that names the wrong client."""
    if len(reply.device) != 32:
        raise ProtocolError(f"A device ID has {len(reply.device)} bytes.", SAME_VERSION)
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


async def _error_from_status(error: grpc.aio.AioRpcError, address: Address, seconds: float) -> EdgeError:
    """Return the error for a failed call. gRPC does not report a failed handshake as such, so probe the port."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return NotPermitted(f"The device at {address} refuses.", details or "Ask the device's owner for the right.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"The server at {address} is not edgellm, or is too old.", "Update edgellm there.")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return VerifierUnreachable(f"No answer from {address} within {seconds:g} seconds.", _DOCTOR)
    found = await probe_port(address)
    if found is PortState.OPEN:
        return NotPaired(f"The server at {address} and this device do not trust each other, or no longer do.", _PAIR)
    kind = NothingListens if found is PortState.REFUSED else VerifierUnreachable
    return kind(_NO_ANSWER[found].format(address), _DOCTOR)
