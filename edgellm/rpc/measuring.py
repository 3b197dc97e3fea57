"""Measurements of a device and of the line to it."""

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, fields

import grpc.aio

from edgellm.engine.cores import BUSY, is_plausible, lower_quartile
from edgellm.engine.gguf.synthetic_layers import HEADER_MOST, Blocks
from edgellm.errors import SAME_VERSION, ProtocolError
from edgellm.rpc.layers import REPLY_SECONDS, ask
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import layers_pb2 as pb

SECONDS = 0.8  # approximate time for each way
_FIRST, MOST_SENT = 2**18, 2**23  # bytes
_ROUNDS = 7


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
    network lets through after a pause is left out: a first part of the bytes goes before each timed one. Raise
    NotPermitted, and ProtocolError or DeviceLost if the other device cannot measure, or is gone."""

    async def flow(up: int, down: int) -> float:
        request, began = pb.FlowRequest(data=bytes(up), want=down), time.perf_counter()
        reply = await ask(channel, "Flow", name, request, pb.FlowReply, REPLY_SECONDS)
        if len(reply.data) != down:
            raise ProtocolError(f"{name} has sent {len(reply.data)} bytes in place of {down}.", SAME_VERSION)
        return time.perf_counter() - began

    async def bits_per_second(one_way: Callable[[int], Awaitable[float]]) -> float:
        size, found, began = _FIRST, list[float](), time.perf_counter()
        await one_way(size)
        size = int(min(MOST_SENT, max(size, SECONDS / _ROUNDS * size / await one_way(size))))
        while not found or (len(found) < _ROUNDS and time.perf_counter() - began < 2.0 * SECONDS):
            await one_way(size // 4)
            taken = await one_way(size)
            found.append((taken - min(round_trip, taken / 2)) / (8 * size))
        return 1.0 / lower_quartile(found)

    round_trip = lower_quartile([await flow(0, 0) for _ in range(_ROUNDS)])
    up = await bits_per_second(lambda size: flow(size, 0))
    return LinkSpeed(round_trip, up, await bits_per_second(lambda size: flow(0, size)))


MEASURE_SECONDS = 120.0  # limit for the whole measurement


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
            0 < len(self.rows) == len(self.seconds)
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
    return read_figures(await ask(channel, "Measure", name, request, pb.Figures, MEASURE_SECONDS))
