"""Measurement of the bandwidth between two devices, both ways, and of the round-trip time."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from edgellm.engine.timing import lower_quartile
from edgellm.errors import SAME_VERSION, DeviceLost, ProtocolError
from edgellm.rpc.address import Address
from edgellm.rpc.layers.codec import PROTOCOL, REPLY_SECONDS, call_errors, error_from_status, method
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import Context
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.versions import parse_message

SECONDS = 0.8  # approximate time for each way
_FRAME = 2**16
_FIRST, _MOST = 2**18, 2**25  # bytes
_SENT_MOST = 2**26
_ROUND_TRIPS = 9
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The connection from one device to another: round trip in seconds, bits/s there (`up`) and back (`down`). Raises
    ProtocolError for numbers that cannot have been measured."""

    round_trip: float
    up: float
    down: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(number) and number > 0.0 for number in (self.round_trip, self.up, self.down)):
            raise ProtocolError("The device sent an invalid bandwidth measurement.", "Measure it again.")


async def serve_measurement(_frames: Any, stream: Context) -> None:
    """Serve a measurement on the device's side: count received bytes, report the count, and send bytes on request."""
    received, first, last = 0, 0.0, 0.0
    while isinstance(data := await stream.read(), bytes):
        frame = parse_message(pb.FlowFrame, data)
        if frame.data:
            last = time.perf_counter()
            first = first or last
            received += len(frame.data)
        elif frame.want:
            if frame.want > _SENT_MOST:
                raise ProtocolError(
                    f"A measurement of {frame.want} bytes is too large.", f"Ask for at most {_SENT_MOST}."
                )
            for size in _sizes(frame.want):
                await stream.write(pb.FlowFrame(data=bytes(size)))
        else:
            await stream.write(pb.FlowFrame(come=received, seconds=last - first))


async def measure_link(channel: grpc.aio.Channel, name: str) -> LinkSpeed:
    """Measure the connection from this device to the other end of `channel`; this takes some seconds. The burst that a
    network lets through after a pause is left out: each way is measured only after a first part of the bytes has
    arrived. Raise NotPermitted, and ProtocolError or DeviceLost if the other device cannot measure, or is gone."""
    start: Any = channel.stream_stream(method("Flow"), pb.FlowFrame.SerializeToString, pb.FlowFrame.FromString)
    call = start()
    try:
        with call_errors(name):
            async with asyncio.timeout(REPLY_SECONDS):
                return await _measure(call)
    except asyncio.InvalidStateError:
        raise error_from_status(await call.code(), await call.details(), name) from None
    except TimeoutError:
        raise DeviceLost(
            f"The connection to {name} is too slow to measure.", "Move the device closer to the access point."
        ) from None
    finally:
        call.cancel()


async def _measure(call: Any) -> LinkSpeed:
    round_trips: list[float] = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        await _send(call, 0)
        round_trips.append(time.perf_counter() - began)
    up_size, down_size = _round_size(*await _send(call, _FIRST)), _round_size(*await _receive(call, _FIRST))
    up: list[float] = []  # seconds a bit
    down: list[float] = []
    until = time.perf_counter() + 2.0 * SECONDS
    while not up or (len(up) < _ROUNDS and time.perf_counter() < until):
        before = await _send(call, up_size // 4)
        after = await _send(call, up_size)
        up.append(max(after[1] - before[1], 1e-9) / max(8 * (after[0] - before[0]), 1))
        size, taken = await _receive(call, down_size)
        down.append(max(taken, 1e-9) / (8 * size))
    return LinkSpeed(lower_quartile(round_trips), 1.0 / lower_quartile(up), 1.0 / lower_quartile(down))


async def _send(call: Any, size: int) -> tuple[int, float]:
    """Send bytes; return how many have arrived at the other end in all, and the seconds that they took."""
    for part in _sizes(size):
        await call.write(pb.FlowFrame(data=bytes(part)))
    await call.write(pb.FlowFrame())
    reply = await _read(call)
    return reply.come, reply.seconds


async def _receive(call: Any, size: int) -> tuple[int, float]:
    await call.write(pb.FlowFrame(want=size))
    received, times = 0, list[tuple[int, float]]()
    while received < size:
        received += len((await _read(call)).data)
        times.append((received, time.perf_counter()))
    warmup = next(entry for entry in times if entry[0] >= size // 5)
    return times[-1][0] - warmup[0], times[-1][1] - warmup[1]


def _round_size(size: int, taken: float) -> int:
    return int(min(_MOST, max(_FIRST, SECONDS / _ROUNDS * size / max(taken, 1e-6))))


def _sizes(size: int) -> list[int]:
    return [_FRAME] * (size // _FRAME) + ([size % _FRAME] if size % _FRAME else [])


async def _read(call: Any) -> pb.FlowFrame:
    reply = await call.read()
    if not isinstance(reply, pb.FlowFrame):
        raise ProtocolError("The other device has ended the measurement early.", SAME_VERSION)
    return reply


async def request_link_measurement(
    channel: grpc.aio.Channel, name: str, device: DeviceID, address: Address | None
) -> LinkSpeed:
    """Have a device measure its connection to another device."""
    call = channel.unary_unary(method("Line"), pb.LineRequest.SerializeToString, pb.LineReply.FromString)
    request = pb.LineRequest(protocol=PROTOCOL, device=device.digest, address=str(address or ""))
    with call_errors(name):
        reply: pb.LineReply = await call(request, timeout=REPLY_SECONDS)
    return LinkSpeed(reply.round_trip, reply.up, reply.down)
