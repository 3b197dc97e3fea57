"""What both sides of `rpc_engine.proto` share: its names, and the bytes between a socket and a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from edgellm.errors import SAME_VERSION, ProtocolError
from edgellm.rpc.protos import rpc_engine_pb2 as pb
from edgellm.rpc.versions import parse_message

RPC_ENGINE = 1
"""Version of `rpc_engine.proto`."""
RPC_SERVICE = pb.DESCRIPTOR.services_by_name["RpcEngine"].full_name
OFFER, SERVE, TUNNEL = (f"/{RPC_SERVICE}/{name}" for name in ("Offer", "Serve", "Tunnel"))
SESSION_BYTES = 16
MAX_DATA = 2**20
"""Bytes of a frame."""

Read = Callable[[], Awaitable[object]]
Write = Callable[[bytes], Awaitable[None]]


async def carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, read: Read, write: Write, session: bytes = b""
) -> None:
    """Carry bytes between a socket and a stream of frames, both ways, until either ends. Each side is read only as fast
    as the other takes it. `session` is named in the first frame, which is sent at once."""
    out = asyncio.ensure_future(_to_stream(reader, write, session))
    back = asyncio.ensure_future(_to_socket(writer, read))
    try:
        done, _ = await asyncio.wait((out, back), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        writer.close()  # before anything is awaited, which may be cancelled
        for task in (out, back):
            task.cancel()
        await asyncio.gather(out, back, return_exceptions=True)


async def _to_stream(reader: asyncio.StreamReader, write: Write, session: bytes) -> None:
    if session:
        await write(pb.RpcFrame(session=session).SerializeToString())
    with suppress(OSError):  # a connection that is reset has ended, too
        while data := await reader.read(MAX_DATA):
            await write(pb.RpcFrame(data=data).SerializeToString())


async def _to_socket(writer: asyncio.StreamWriter, read: Read) -> None:
    """Raise ProtocolError for a frame that is too long, or no frame."""
    while isinstance(data := await read(), bytes):
        frame = parse_message(pb.RpcFrame, data)
        if len(frame.data) > MAX_DATA:
            raise ProtocolError(f"A frame has {len(frame.data)} bytes.", SAME_VERSION)
        try:
            writer.write(frame.data)
            await writer.drain()
        except OSError:
            return


def ended(data: object) -> bool:
    """Return whether what a stream has read is its end."""
    return not isinstance(data, bytes)
