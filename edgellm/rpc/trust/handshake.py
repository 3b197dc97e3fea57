"""The first words over mutual TLS: which device is this, and what may be done there?"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from edgellm.errors import EdgeError, NotPaired, NotPermitted, ProtocolError, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO_SECONDS, open_channel
from edgellm.rpc.discovery.interfaces import Reach, answered, reach
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, Context, own_identity, who
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import Rights, read_rights
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import LINK, SMALL, check_version, parsed, program

_SERVICE = pb.DESCRIPTOR.services_by_name["Devices"]
_WELCOME = f"/{_SERVICE.full_name}/Welcome"
_NONCE = 32  # bytes
_OFFERS_MOST = 16
LABEL = b"edgellm welcome 1\0"


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model that a device lets others use; `size` in bytes, `vocabulary` a fingerprint in hex."""

    role: str
    model: str
    size: int
    vocabulary: str


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """A device that has proved who it is. `rights` is what this device may do there; `seconds` is how long a word there
    and back takes; its clock is `clock_ahead` seconds ahead of ours."""

    peer: Peer
    address: Address
    version: str
    rights: Rights
    offers: tuple[OfferedModel, ...]
    seconds: float
    clock_ahead: float


def welcome_handlers(
    trust: Trust, guard: AuthInterceptor, offers: Sequence[OfferedModel]
) -> grpc.GenericRpcHandler[Any, Any]:
    """Return the server's side, for `add_generic_rpc_handlers`."""
    told = [
        pb.Offer(role=one.role, model=one.model, size=one.size, vocabulary=bytes.fromhex(one.vocabulary))
        for one in offers
    ]

    async def welcome(data: bytes, context: Context) -> pb.WelcomeReply:
        try:
            request = parsed(pb.WelcomeRequest, data, SMALL)
            if len(request.nonce) != _NONCE:
                raise ProtocolError(f"The nonce has {len(request.nonce)} bytes.", f"Send {_NONCE}.")
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.what)
            raise  # abort does not return
        client = who(context)
        peer = guard.check(client, None)
        await asyncio.to_thread(trust.peers.saw, client)
        mine = trust.identity.id
        return pb.WelcomeReply(
            protocol=LINK,
            device=mine.digest,
            signature=trust.identity.sign(_statement(request.nonce, mine, client)),
            version=program(),
            rights=sorted(peer.rights),
            models=told,
            time=int(time.time()),
        )

    method = grpc.unary_unary_rpc_method_handler(guard.over(welcome), None, pb.WelcomeReply.SerializeToString)
    return grpc.method_handlers_generic_handler(_SERVICE.full_name, {"Welcome": method})


async def meet(
    address: Address, trust: Trust, device: DeviceID | None = None, seconds: float = HELLO_SECONDS
) -> tuple[grpc.aio.Channel, PeerInfo]:
    """Connect to a paired device, or to the given `device` only; the caller closes the channel.

    Raises:
        PairingRequired: no device is paired.
        NotPaired: the answering device is not paired, is not `device`, or does not trust this one.
        IdentityClash: the other side has this device's own identity.
        PeerTooOld, PeerTooNew, ProtocolError: the other side speaks another version or protocol.
        VerifierUnreachable: nobody answers.
    """
    channel = open_channel(address, trust, device)
    try:
        welcomed = await _welcome(channel, address, trust, device, seconds)
    except BaseException as error:
        await channel.close(None)
        if isinstance(error, grpc.aio.AioRpcError):
            raise await _explained(error, address, seconds) from None
        raise
    await asyncio.to_thread(trust.peers.saw, welcomed.peer.id, address, welcomed.rights)
    return channel, welcomed


async def ask(address: Address, trust: Trust, device: DeviceID | None = None, seconds: float = 2.0) -> PeerInfo:
    """Meet a device for its greeting only; the result's `seconds` are those of a second call, once connected."""
    channel, _first = await meet(address, trust, device, seconds)
    try:
        return await _welcome(channel, address, trust, device, seconds)
    except grpc.aio.AioRpcError as error:
        raise await _explained(error, address, seconds) from None
    finally:
        await channel.close(None)


async def _welcome(
    channel: grpc.aio.Channel, address: Address, trust: Trust, expected: DeviceID | None, seconds: float
) -> PeerInfo:
    nonce = os.urandom(_NONCE)
    call = channel.unary_unary(_WELCOME, pb.WelcomeRequest.SerializeToString, bytes)

    async def once(deadline: float) -> tuple[bytes, float]:
        began = time.monotonic()
        data = await call(pb.WelcomeRequest(protocol=LINK, nonce=nonce, version=program()), timeout=deadline)
        return data, time.monotonic() - began

    data, took = await answered(once, address, seconds)
    return read_welcome(data, nonce, trust, expected, address, took)


def read_welcome(
    data: bytes, nonce: bytes, trust: Trust, expected: DeviceID | None, address: Address, took: float
) -> PeerInfo:
    """Return a server's greeting, which took `took` seconds, checked to come from a paired device.

    Raises: the errors of `meet` for a device that answers.
    """
    reply = parsed(pb.WelcomeReply, data, SMALL)
    check_version(reply.protocol, LINK, "the other device")
    peer = _proved(reply, nonce, trust, expected, address)
    offers = tuple(
        OfferedModel(one.role[:40], one.model[:200], one.size, one.vocabulary.hex()[:64])
        for one in reply.models[:_OFFERS_MOST]
    )
    ahead = reply.time - time.time()
    return PeerInfo(peer, address, reply.version[:40], read_rights(reply.rights), offers, took, ahead)


def _proved(reply: pb.WelcomeReply, nonce: bytes, trust: Trust, expected: DeviceID | None, address: Address) -> Peer:
    """Return the paired device that the server is, proved by its fingerprint and a signature with its key.

    The signature holds this device's ID as the server has seen it in TLS: a paired device that passes the question on
    to another one, to be taken for it, gets an answer that names the wrong client.
    """
    if len(reply.device) != 32:
        raise ProtocolError(f"A device ID has {len(reply.device)} bytes.", "Run the same version on both sides.")
    device, mine = DeviceID(reply.device), trust.identity.id
    if device == mine:
        raise own_identity(device, address.host)
    peer = trust.peers.get(device)
    if peer is None:
        raise NotPaired(f"The device {device.short} at {address} is not paired with this one.", _PAIR)
    if expected is not None and device != expected:
        raise NotPaired(
            f"At {address} answers {peer.name} ({device.short}), and another was meant.", "Check the address."
        )
    if not peer.certificate.signed(reply.signature, _statement(nonce, device, mine)):
        raise NotPaired(
            f"What answers at {address} says that it is {peer.name}, and cannot prove it.",
            "Somebody may be in between: trust nothing there until you know who.",
        )
    return peer


def _statement(nonce: bytes, server: DeviceID, client: DeviceID) -> bytes:
    return LABEL + nonce + server.digest + client.digest


async def _explained(error: grpc.aio.AioRpcError, address: Address, seconds: float) -> EdgeError:
    """Return the error for a failed call. gRPC does not report a failed handshake as such, so probe the port."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return NotPermitted(f"The device at {address} refuses.", details or "Ask its owner.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolError(f"What answers at {address} is not edgellm, or is too old.", "Update edgellm there.")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return VerifierUnreachable(f"Nobody answers at {address} within {seconds:g} seconds.", _DOCTOR)
    found = await reach(address)
    if found is Reach.OPEN:
        return NotPaired(f"What listens at {address} and this device do not trust each other, or no longer.", _PAIR)
    return VerifierUnreachable(_NOBODY[found].format(address), _DOCTOR)


_PAIR = "Run `edgellm pair` on one of the two, and on the other what it shows."
_DOCTOR = "Is it on, and does it serve? `edgellm doctor` looks for what is in the way."
_NOBODY = {
    Reach.REFUSED: "Nobody answers at {}: the machine is there, and nothing listens at that port.",
    Reach.SILENT: "Nobody answers at {}: no sign of the machine, or a firewall swallows what is sent.",
    Reach.UNKNOWN: "Nobody answers at {}: there is no way to that address from here.",
}
