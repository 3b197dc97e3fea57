"""Doors to knock at: servers by mutual TLS with a secret behind them, and some that lie."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from edgellm.rpc.address import Address
from edgellm.rpc.channel import CONTRACT, HELLO, SESSION, bind, new_server
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.protos.trust_pb2 import Offer
from edgellm.rpc.trust import handshake
from edgellm.rpc.trust.handshake import AuthInterceptor
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.services.server.listener import Listener, Notify, Service
from tests.rpc.strangers import device

OFFER = Offer(model="big", size=123, vocabulary=bytes.fromhex("ab" * 32))
SECRET, STREAM = HELLO, SESSION
Said = list[str]


class Secrets(Service):
    """Calls with a secret for whoever may verify."""

    contract, right = CONTRACT, Right.VERIFY

    async def hello(self, _request: bytes, _context: Any) -> bytes:
        return b"the secret"

    tokenizer = hello

    async def session(self, _request: Any, context: Any) -> None:
        """Says something, then waits to be asked."""
        await context.write(b"hello")
        while isinstance(await context.read(), bytes):
            await context.write(b"more")


class Door(Listener):
    """A server with one service."""

    def __init__(
        self, trust: Trust | None, said: Said, make: Callable[[Notify, AuthInterceptor | None], Service]
    ) -> None:
        super().__init__(Address("127.0.0.1", 0), trust, said.append)
        self.services.append(make(self._notify, self.guard))
        self._offers.append(OFFER)


@asynccontextmanager
async def serving(
    trust: Trust | None, said: Said | None = None, make: Callable[[Notify, AuthInterceptor | None], Service] = Secrets
) -> AsyncIterator[Address]:
    """A device with a service, for paired devices alone where there is trust."""
    door = Door(trust, [] if said is None else said, make)
    try:
        yield await asyncio.to_thread(door.start)
    finally:
        await asyncio.to_thread(door.stop, 0.0)


async def ask_for(channel: grpc.aio.Channel, method: str) -> Any:
    call: Any = channel.unary_unary
    return await call(method)(b"", timeout=60)


def open_stream(channel: grpc.aio.Channel) -> Any:
    """A stream that says hello, and more whenever it is written to."""
    call: Any = channel.stream_stream
    return call(STREAM)()


async def ended(channel: grpc.aio.Channel, path: str, *frames: Message | bytes, close: bool = True) -> str:
    """How a stream ends to which these frames are sent: its status, and why."""
    begin: Any = channel.stream_stream
    call = begin(path)()
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # its status is read below
        for frame in frames:
            await call.write(frame if isinstance(frame, bytes) else frame.SerializeToString())
        if close:
            await call.done_writing()
        while isinstance(await call.read(), bytes):
            pass
    async with asyncio.timeout(60.0):
        return f"{(await call.code()).name} {await call.details()}"


async def steal(channel: grpc.aio.Channel) -> bytes:
    async with channel:
        return await ask_for(channel, SECRET)


async def code_of(channel: grpc.aio.Channel) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await steal(channel)
    return caught.value.code()


def impostor(genuine: Trust, folder: Path, identity: Identity) -> Trust:
    """Knows whom `genuine` knows, and is somebody else."""
    made = device(folder, identity)
    for peer in genuine.peers.all():
        made.peers.add(peer)
    return made


@asynccontextmanager
async def answering(
    trust: Trust, change: Callable[[pb.WelcomeReply], Any], replay: pb.WelcomeReply | None = None
) -> AsyncIterator[Address]:
    """A server by mutual TLS whose welcome is not as it should be."""

    async def welcome(request: pb.WelcomeRequest, context: Any) -> pb.WelcomeReply:
        client = handshake.caller_id(context)
        mine = trust.identity.id
        reply = pb.WelcomeReply(
            protocol=PROTOCOL,
            device=mine.digest,
            signature=trust.identity.sign(handshake._statement(request.nonce, mine, client)),
        )
        change(reply)
        return replay or reply

    async with greeting(trust, welcome) as address:
        yield address


@asynccontextmanager
async def greeting(trust: Trust, welcome: Any) -> AsyncIterator[Address]:
    """A server by mutual TLS with a welcome of its own."""
    method = grpc.unary_unary_rpc_method_handler(
        welcome, pb.WelcomeRequest.FromString, pb.WelcomeReply.SerializeToString
    )
    name = pb.DESCRIPTOR.services_by_name["Devices"].full_name
    server = new_server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Welcome": method}),))
    address = bind(server, Address("127.0.0.1", 0), trust)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
