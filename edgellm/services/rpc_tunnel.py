"""The parts of `rpc_engine.proto` that both sides share: its names, and the bytes between a socket and a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

from edgellm.errors import SAME_VERSION, ProtocolError
from edgellm.rpc.protos import rpc_engine_pb2 as pb
from edgellm.rpc.versions import parse_message
from edgellm.services.streams import first_of

RPC_ENGINE = 1
"""Version of `rpc_engine.proto`."""
RPC_SERVICE = pb.DESCRIPTOR.services_by_name["RpcEngine"].full_name
OFFER, SERVE, TUNNEL = (f"/{RPC_SERVICE}/{name}" for name in ("Offer", "Serve", "Tunnel"))
SESSION_BYTES = 16
MAX_DATA = 2**20
"""Bytes of a frame."""
MAX_BUFFER = 16 * 2**20
"""Bytes that wait on either side of a socket: a busy device stops for tens of milliseconds at a time, and the others go
on meanwhile."""

Socket = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Moved:
    """The bytes that streams have `moved` both ways, and the `monotonic` time of the last bytes to the server, None if
    some have come back since."""

    moved: int = 0
    asked_at: float | None = None

    def sent(self, count: int) -> None:
        """Count bytes to the server."""
        self.moved += count
        self.asked_at = monotonic()

    def received(self, count: int) -> None:
        """Count bytes from the server."""
        self.moved += count
        self.asked_at = None


async def carry(
    socket: Socket, read: Callable[[], Awaitable[object]], write: Callable[[bytes], Awaitable[None]],
    session: bytes = b"", traffic: Moved | None = None,
) -> None:  # fmt: skip
    """Carry bytes between a socket and a stream of frames, both ways, until either ends. Each side is read only as fast
    as the other takes it. `session` is named in the first frame, which is sent at once. `traffic` counts the bytes."""
    reader, writer = socket
    counted = traffic or Moved()
    writer.transport.set_write_buffer_limits(MAX_BUFFER)

    async def to_stream() -> None:
        if session:
            await write(pb.RpcFrame(session=session).SerializeToString())
        while data := await reader.read(MAX_DATA):
            await write(pb.RpcFrame(data=data).SerializeToString())
            counted.sent(len(data))

    async def to_socket() -> None:
        while isinstance(message := await read(), bytes):
            data = parse_message(pb.RpcFrame, message).data
            if len(data) > MAX_DATA:
                raise ProtocolError(f"A frame has {len(data)} bytes.", SAME_VERSION)
            counted.received(len(data))
            writer.write(data)
            await writer.drain()

    try:
        await first_of(to_stream(), to_socket())
    except ConnectionError:  # the socket is closed
        return
    finally:
        writer.transport.abort()
