"""Measuring the bandwidth between two devices, both ways, and the round-trip time."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from edgellm.engine.timing import lower_quartile
from edgellm.errors import DeviceLost, ProtocolError
from edgellm.rpc.address import Address
from edgellm.rpc.layers.codec import PROTOCOL, REPLY_SECONDS, error_from_status, method
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import Context
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.versions import parsed

SECONDS = 0.8  # for each way, about
_FRAME = 2**16
_FIRST, _MOST = 2**18, 2**25  # bytes
_SENT_MOST = 2**26
_ROUND_TRIPS = 9
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The connection from one device to another: round trip in seconds, bits/s there (`up`) and back (`down`).

    Raise ProtocolError for numbers that cannot have been measured.
    """

    round_trip: float
    up: float
    down: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(number) and number > 0.0 for number in (self.round_trip, self.up, self.down)):
            raise ProtocolError("The device sent an invalid bandwidth measurement.", "Measure it again.")


async def answer_flow(_frames: Any, stream: Context) -> None:
    """Serve a measurement on the device's side: count received bytes, report the count, and send bytes on request."""
    arrived, first, last = 0, 0.0, 0.0
    while isinstance(data := await stream.read(), bytes):
        frame = parsed(pb.FlowFrame, data)
        if frame.data:
            last = time.perf_counter()
            first = first or last
            arrived += len(frame.data)
        elif frame.want:
            if frame.want > _SENT_MOST:
                raise ProtocolError(f"{frame.want} bytes are too many to measure a line.", "Ask for fewer.")
            for size in _sizes(frame.want):
                await stream.write(pb.FlowFrame(data=bytes(size)))
        else:
            await stream.write(pb.FlowFrame(come=arrived, seconds=last - first))


async def measure_line(channel: grpc.aio.Channel, who: str) -> LinkSpeed:
    """Measure the connection from this device to the other end of `channel`; this takes some seconds.

    The burst that a network lets through after a pause is left out: each way is measured only after a first part of
    the bytes has arrived.

    Raises:
        NotPermitted: this device has no right to compute there.
        ProtocolError, DeviceLost: the other device cannot measure, or is gone.
    """
    start: Any = channel.stream_stream(method("Flow"), pb.FlowFrame.SerializeToString, pb.FlowFrame.FromString)
    call = start()
    try:
        async with asyncio.timeout(REPLY_SECONDS):
            round_trips = [await _round_trip(call) for _ in range(_ROUND_TRIPS)]
            up, down = await _rates(call)
            return LinkSpeed(lower_quartile(round_trips), up, down)
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error.code(), error.details(), who) from None
    except asyncio.InvalidStateError:
        raise error_from_status(await call.code(), await call.details(), who) from None
    except TimeoutError:
        raise DeviceLost(f"The line to {who} is too slow to be measured.", "Try nearer to the access point.") from None
    finally:
        call.cancel()


async def _round_trip(call: Any) -> float:
    """Return the seconds of a message there and back."""
    began = time.perf_counter()
    await _ask(call)
    return time.perf_counter() - began


async def _ask(call: Any) -> tuple[int, float]:
    """Return how many bytes have arrived at the other end, and in how many seconds."""
    await call.write(pb.FlowFrame())
    reply = await _read(call)
    return reply.come, reply.seconds


async def _rates(call: Any) -> tuple[float, float]:
    """Return the bits/s there and back, measured in turns; the lower quartile of the times counts."""
    there, back = _round_size(*await _send(call, _FIRST)), _round_size(*await _receive(call, _FIRST))
    up: list[float] = []
    down: list[float] = []
    until = time.perf_counter() + 2.0 * SECONDS
    while not up or (len(up) < _ROUNDS and time.perf_counter() < until):
        before = await _send(call, there // 4)
        after = await _send(call, there)
        up.append(max(after[1] - before[1], 1e-9) / max(8 * (after[0] - before[0]), 1))
        size, taken = await _receive(call, back)
        down.append(max(taken, 1e-9) / (8 * size))
    return 1.0 / lower_quartile(up), 1.0 / lower_quartile(down)


async def _send(call: Any, size: int) -> tuple[int, float]:
    for part in _sizes(size):
        await call.write(pb.FlowFrame(data=bytes(part)))
    return await _ask(call)


async def _receive(call: Any, size: int) -> tuple[int, float]:
    await call.write(pb.FlowFrame(want=size))
    arrived, first = 0, 0.0
    marks = []
    while arrived < size:
        arrived += len((await _read(call)).data)
        now = time.perf_counter()
        first = first or now
        marks.append((arrived, now - first))
    first_part = next(mark for mark in marks if mark[0] >= size // 5)
    return marks[-1][0] - first_part[0], marks[-1][1] - first_part[1]


def _round_size(size: int, taken: float) -> int:
    """Return the bytes for one round, such that all rounds take about SECONDS if `size` bytes took `taken` seconds."""
    return int(min(_MOST, max(_FIRST, SECONDS / _ROUNDS * size / max(taken, 1e-6))))


def _sizes(size: int) -> list[int]:
    return [_FRAME] * (size // _FRAME) + ([size % _FRAME] if size % _FRAME else [])


async def _read(call: Any) -> pb.FlowFrame:
    reply = await call.read()
    if not isinstance(reply, pb.FlowFrame):
        raise ProtocolError("The other device ends the measurement.", "Run the same version on both sides.")
    return reply


async def ask_line(channel: grpc.aio.Channel, who: str, device: DeviceID, address: Address | None) -> LinkSpeed:
    """Have a device measure its connection to another one.

    Raises:
        MeasureFailed: it cannot; most often, the two are not paired.
        NotPermitted, ProtocolError, DeviceLost: as for `measure_line`.
    """
    call = channel.unary_unary(method("Line"), pb.LineRequest.SerializeToString, pb.LineReply.FromString)
    asked = pb.LineRequest(protocol=PROTOCOL, device=device.digest, address=str(address or ""))
    try:
        reply: pb.LineReply = await call(asked, timeout=REPLY_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error.code(), error.details(), who) from None
    return LinkSpeed(reply.round_trip, reply.up, reply.down)
