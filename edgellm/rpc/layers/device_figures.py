"""A device's measurements of itself: the record, its conversion to and from protobuf, and the call that asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from edgellm.engine.gguf.synthetic_layers import HEADER_MOST, Blocks
from edgellm.engine.timing import BUSY, possible
from edgellm.errors import ProtocolError
from edgellm.rpc.layers.codec import PROTOCOL, method, told
from edgellm.rpc.protos import layers_pb2 as pb

MEASURE_SECONDS = 120.0  # for the whole measurement
_ROWS_MOST = 64


@dataclass(frozen=True, slots=True)
class Figures:
    """A device's measurements, when they were taken (seconds since 1970, UTC) and why then.

    `seconds[i]` is the time of a pass of `rows[i]` tokens through one layer of the shape and quantisation `block` (the
    hash of a header), whose weights are `layer` bytes. `disk`: bytes/s of a cold load. `memory`: bytes free for layers.
    `waited`: the share of its time that the process waited for a processor.
    """

    taken: int
    reason: str
    block: str
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    layer: int
    disk: float
    disk_reason: str
    memory: int
    memory_reason: str
    threads: int
    processor: str
    version: str
    waited: float = 0.0

    def __post_init__(self) -> None:
        """Raise ProtocolError for numbers that cannot have been measured."""
        numbers = (*self.rows, *self.seconds, self.layer, self.disk)
        if not (
            0 < len(self.rows) == len(self.seconds) <= _ROWS_MOST
            and all(math.isfinite(number) and number > 0 for number in numbers)
            and self.memory >= 0
            and 0.0 <= self.waited <= 1.0
        ):
            raise ProtocolError("The figures of a device are none.", "Measure it again.")

    @property
    def doubt(self) -> str:
        """Why these figures are doubtful; empty if they are not."""
        if self.waited > BUSY:
            return f"measured while the machine was busy ({self.waited:.0%} of the time was waiting for a processor)"
        return "" if possible(self.rows, self.seconds) else "no device can take such times"


def write_figures(figures: Figures) -> pb.Figures:
    return pb.Figures(
        taken=figures.taken, reason=figures.reason, block=bytes.fromhex(figures.block), rows=figures.rows,
        seconds=figures.seconds, layer=figures.layer, disk=figures.disk, disk_reason=figures.disk_reason,
        memory=figures.memory, memory_reason=figures.memory_reason, threads=figures.threads,
        processor=figures.processor, version=figures.version, waited=figures.waited,
    )  # fmt: skip


def read_figures(said: pb.Figures) -> Figures:
    """Convert figures from their message. Raises ProtocolError for numbers that cannot have been measured."""
    return Figures(
        said.taken, said.reason[:200], said.block.hex()[:64], tuple(said.rows), tuple(said.seconds), said.layer,
        said.disk, said.disk_reason[:200], said.memory, said.memory_reason[:200], said.threads, said.processor[:100],
        said.version[:40], said.waited,
    )  # fmt: skip


def read_blocks(asked: pb.MeasureRequest) -> Blocks:
    """Convert the layers of a request. Raises ProtocolError for values that cannot be valid."""
    if not (0 < len(asked.header) <= HEADER_MOST and 0 < asked.layers <= 512 and 0 < asked.width <= 2**20):
        raise ProtocolError("There is nothing of that kind to measure.", "Run the same version on both sides.")
    return Blocks(asked.header, asked.data, asked.layers, asked.width)


async def measure(channel: grpc.aio.Channel, who: str, blocks: Blocks, oldest: float) -> Figures:
    """Have a device measure itself; figures that are at most `oldest` seconds old are good enough.

    Raises:
        NotPermitted: this device has no right to compute there.
        MeasureFailed: the device cannot be measured.
        ProtocolError, DeviceLost: the device does not know this call, or is gone.
    """
    asked = pb.MeasureRequest(
        protocol=PROTOCOL, header=blocks.header, data=blocks.data, layers=blocks.layers, width=blocks.width,
        oldest=oldest,
    )  # fmt: skip
    line: Any = channel.unary_stream(method("Measure"), pb.MeasureRequest.SerializeToString, pb.MeasureReply.FromString)
    try:
        async for reply in line(asked, timeout=MEASURE_SECONDS):
            if reply.WhichOneof("reply") == "figures":
                return read_figures(reply.figures)
    except grpc.aio.AioRpcError as error:
        raise told(error.code(), error.details(), who) from None
    raise ProtocolError(f"{who} has measured itself, and says nothing of it.", "Measure it again.")
