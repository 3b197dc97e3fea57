"""The parts of `rpc_engine.proto` that both sides share: its names, and the bytes between a socket and a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import cast

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
_MAX_BUFFER = 16 * 2**20
"""Bytes that wait on either side of a socket, at most. A busy device stops for tens of milliseconds at a time, and the
others go on meanwhile."""

Read = Callable[[], Awaitable[object]]
Write = Callable[[bytes], Awaitable[None]]


class Socket(asyncio.Protocol):
    """A connection of llama.cpp, which sends each message in three parts, to be read together."""

    def __init__(self, made: Callable[[Socket], None] = lambda _socket: None) -> None:
        """`made` is called once it is connected."""
        self._made = made
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._arrived, self._writable = asyncio.Event(), asyncio.Event()
        self._writable.set()
        self._ended = False

    @property
    def peer_port(self) -> int:
        """Return the port of the other side."""
        return 0 if self._transport is None else int(self._transport.get_extra_info("peername")[1])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_MAX_BUFFER)
        self._made(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._arrived.set()
        if len(self._buffer) >= _MAX_BUFFER and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        self._ended = True
        self._arrived.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def read(self) -> bytes:
        """Return the bytes that have arrived, at most `MAX_DATA`; none at the end."""
        await self._arrived.wait()
        await asyncio.sleep(0)  # the other parts of a message are here, too
        data = bytes(self._buffer[:MAX_DATA])
        del self._buffer[:MAX_DATA]
        if not self._buffer and not self._ended:
            self._arrived.clear()
        if len(self._buffer) <= _MAX_BUFFER // 2 and self._transport is not None and not self._ended:
            self._transport.resume_reading()
        return data

    async def write(self, data: bytes) -> bool:
        """Send bytes, as fast as they are taken; return whether the connection still stands."""
        if self._ended or self._transport is None:
            return False
        self._transport.write(data)
        await self._writable.wait()
        return not self._ended

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()


class StreamTraffic:
    """The bytes that streams have carried, as a `Traffic`."""

    def __init__(self) -> None:
        self._moved = 0
        self._asked_at: float | None = None

    @property
    def moved(self) -> int:
        """Return the bytes carried both ways."""
        return self._moved

    @property
    def asked_at(self) -> float | None:
        """Return the `monotonic` time of the last bytes to the stream, None if some have come back since."""
        return self._asked_at

    def sent(self, n: int) -> None:
        """Note that the stream has taken `n` bytes."""
        self._moved, self._asked_at = self._moved + n, monotonic()

    def received(self, n: int) -> None:
        """Note that `n` bytes have come back."""
        self._moved, self._asked_at = self._moved + n, None


async def carry(
    socket: Socket, read: Read, write: Write, session: bytes = b"", traffic: StreamTraffic | None = None
) -> None:
    """Carry bytes between a socket and a stream of frames, both ways, until either ends. Each side is read only as fast
    as the other takes it. `session` is named in the first frame, which is sent at once. `traffic` counts the bytes."""
    counted = traffic or StreamTraffic()
    out = asyncio.ensure_future(_to_stream(socket, write, session, counted))
    back = asyncio.ensure_future(_to_socket(socket, read, counted))
    try:
        done, _ = await asyncio.wait((out, back), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        socket.abort()  # a cancelled await would skip the abort
        for task in (out, back):
            task.cancel()
        await asyncio.gather(out, back, return_exceptions=True)


async def _to_stream(socket: Socket, write: Write, session: bytes, traffic: StreamTraffic) -> None:
    if session:
        await write(pb.RpcFrame(session=session).SerializeToString())
    while data := await socket.read():
        await write(pb.RpcFrame(data=data).SerializeToString())
        traffic.sent(len(data))


async def _to_socket(socket: Socket, read: Read, traffic: StreamTraffic) -> None:
    """Raise ProtocolError for a frame that is too long, or no frame."""
    while isinstance(data := await read(), bytes):
        frame = parse_message(pb.RpcFrame, data)
        if len(frame.data) > MAX_DATA:
            raise ProtocolError(f"A frame has {len(frame.data)} bytes.", SAME_VERSION)
        traffic.received(len(frame.data))
        if not await socket.write(frame.data):
            return


def ended(data: object) -> bool:
    """Return whether a stream's data is its end."""
    return not isinstance(data, bytes)
