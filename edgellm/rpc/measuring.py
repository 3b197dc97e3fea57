"""Measurements of a device and of the line to it."""

import asyncio
import math
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

import grpc.aio

from edgellm.engine.cores import BUSY, is_plausible, lower_quartile
from edgellm.engine.gguf.synthetic_layers import HEADER_MOST, Blocks
from edgellm.errors import SAME_VERSION, DeviceLost, ProtocolError
from edgellm.rpc.layers import REPLY_SECONDS, call_errors, error_from_status, method
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import layers_pb2 as pb

SECONDS = 0.8  # approximate time for each way
_FRAME = 2**16
_FIRST, MOST_SENT = 2**18, 2**25  # bytes
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
        raise error_from_status((await call.code()).name, await call.details() or "", name) from None
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
    for part in frame_sizes(size):
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
    return int(min(MOST_SENT, max(_FIRST, SECONDS / _ROUNDS * size / max(taken, 1e-6))))


def frame_sizes(size: int) -> list[int]:
    """Return the sizes of frames that have `size` bytes together."""
    return [_FRAME] * (size // _FRAME) + ([size % _FRAME] if size % _FRAME else [])


async def _read(call: Any) -> pb.FlowFrame:
    reply = await call.read()
    if not isinstance(reply, pb.FlowFrame):
        raise ProtocolError("The other device has ended the measurement early.", SAME_VERSION)
    return reply


MEASURE_SECONDS = 120.0  # limit for the whole measurement
_ROWS_MOST = 64


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A device's measurements, their time (seconds since 1970, UTC) and occasion.

    `seconds[i]` is the time of a pass of `rows[i]` tokens through one layer of the shape and quantisation `block` (the
    hash of a header), whose weights are `layer` bytes. `disk`: bytes/s of a cold load. `memory`: bytes free for layers.
    `waited`: the share of its time that the process waited for a processor. `unit`: the graphics cards that compute,
    such as CUDA0, empty for the processor, and `unit_reason` why; `processor`: its maker's name for it.
    """

    taken: int
    reason: str
    block: str
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    layer: int
    disk: float
    memory: int
    processor: str
    version: str
    waited: float
    unit: str
    unit_reason: str

    def __post_init__(self) -> None:
        numbers = (*self.rows, *self.seconds, self.layer, self.disk)
        if not (
            0 < len(self.rows) == len(self.seconds) <= _ROWS_MOST
            and all(math.isfinite(number) and number > 0 for number in numbers)
            and self.memory >= 0
            and 0.0 <= self.waited <= 1.0
        ):
            raise ProtocolError("The device sent invalid measurements of itself.", "Measure it again.")

    @property
    def doubt(self) -> str:
        """Return why these figures are doubtful; empty if they are not."""
        if self.waited > BUSY:
            return f"measured while the machine was busy ({self.waited:.0%} of the time was waiting for a processor)"
        return "" if is_plausible(self.rows, self.seconds) else "the times are not plausible for any device"


_MAX_TEXT = 200  # characters of a text that another device sends


def write_figures(figures: DeviceFigures) -> pb.Figures:
    return pb.Figures(**(asdict(figures) | {"block": bytes.fromhex(figures.block)}))


def read_figures(message: pb.Figures) -> DeviceFigures:
    values = {one.name: getattr(message, one.name) for one in fields(DeviceFigures)}
    texts = {name: value[:_MAX_TEXT] for name, value in values.items() if isinstance(value, str)}
    lists = {name: tuple(values[name]) for name in ("rows", "seconds")}
    return DeviceFigures(**(values | texts | lists | {"block": message.block.hex()[:64]}))


def read_blocks(request: pb.MeasureRequest) -> Blocks:
    if not (0 < len(request.header) <= HEADER_MOST and 0 < request.layers <= 512 and 0 < request.width <= 2**20):
        raise ProtocolError(
            f"The layers to measure are invalid: {request.layers} of width {request.width}.", SAME_VERSION
        )
    return Blocks(request.header, request.data, request.layers, request.width)


async def measure(channel: grpc.aio.Channel, name: str, blocks: Blocks, max_age: float) -> DeviceFigures:
    """Return a device's measurements, taken now unless it has some that are at most `max_age` seconds old."""
    request = pb.MeasureRequest(
        protocol=PROTOCOL, header=blocks.header, data=blocks.data, layers=blocks.layers, width=blocks.width,
        oldest=max_age,
    )  # fmt: skip
    call: Any = channel.unary_stream(method("Measure"), pb.MeasureRequest.SerializeToString, pb.MeasureReply.FromString)
    with call_errors(name):
        async for reply in call(request, timeout=MEASURE_SECONDS):
            if reply.WhichOneof("reply") == "figures":
                return read_figures(reply.figures)
    raise ProtocolError(f"{name} has finished its measurement without sending the result.", "Measure it again.")
