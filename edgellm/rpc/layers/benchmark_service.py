"""The figures of a device, and the service that measures them for another."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from edgellm.engine.gguf.synthetic_layers import HEADER_MOST, Blocks
from edgellm.engine.timing import BUSY, is_plausible
from edgellm.errors import EdgeError, MeasureFailed, ProtocolError
from edgellm.rpc.discovery.peer_probe import LOOK_SECONDS
from edgellm.rpc.layers.bandwidth_probe import answer_flow, measure_line
from edgellm.rpc.layers.codec import BEAT_SECONDS, PROTOCOL, details, error_from_status, method, status
from edgellm.rpc.lines import FAILED_SECONDS, alike, announced_places, on_this_machine, places_of
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, Context, Method
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.handshake import meet
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import check_version

MEASURE_SECONDS = 120.0  # for the whole measurement
_ROWS_MOST = 64


@dataclass(frozen=True, slots=True)
class DeviceFigures:
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
            raise ProtocolError("The device sent invalid measurements of itself.", "Measure it again.")

    @property
    def doubt(self) -> str:
        """Why these figures are doubtful; empty if they are not."""
        if self.waited > BUSY:
            return f"measured while the machine was busy ({self.waited:.0%} of the time was waiting for a processor)"
        return "" if is_plausible(self.rows, self.seconds) else "no device can have such times"


def write_figures(figures: DeviceFigures) -> pb.Figures:
    return pb.Figures(
        taken=figures.taken, reason=figures.reason, block=bytes.fromhex(figures.block), rows=figures.rows,
        seconds=figures.seconds, layer=figures.layer, disk=figures.disk, disk_reason=figures.disk_reason,
        memory=figures.memory, memory_reason=figures.memory_reason, threads=figures.threads,
        processor=figures.processor, version=figures.version, waited=figures.waited,
    )  # fmt: skip


def read_figures(message: pb.Figures) -> DeviceFigures:
    """Convert figures from their message. Raise ProtocolError for numbers that cannot have been measured."""
    return DeviceFigures(
        message.taken, message.reason[:200], message.block.hex()[:64], tuple(message.rows), tuple(message.seconds),
        message.layer, message.disk, message.disk_reason[:200], message.memory, message.memory_reason[:200],
        message.threads, message.processor[:100], message.version[:40], message.waited,
    )  # fmt: skip


def read_blocks(asked: pb.MeasureRequest) -> Blocks:
    """Convert the layers of a request. Raise ProtocolError for values that cannot be valid."""
    if not (0 < len(asked.header) <= HEADER_MOST and 0 < asked.layers <= 512 and 0 < asked.width <= 2**20):
        raise ProtocolError("There is nothing of that kind to measure.", "Run the same version on both sides.")
    return Blocks(asked.header, asked.data, asked.layers, asked.width)


async def measure(channel: grpc.aio.Channel, who: str, blocks: Blocks, oldest: float) -> DeviceFigures:
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
        raise error_from_status(error.code(), error.details(), who) from None
    raise ProtocolError(f"{who} has measured itself without sending the result.", "Measure it again.")


Measurer = Callable[[Blocks, float, Callable[[str], None]], DeviceFigures]
"""Measures this device with the given layers, unless its last figures are at most that many seconds old; reports its
progress to the callback."""


class MeasureService:
    """Measures this device and its connections for others. Lives in one event loop; one measurement at a time."""

    def __init__(
        self,
        guard: AuthInterceptor | None,
        notify: Callable[[str], None],
        measurer: Measurer | None,
        trust: Trust | None,
    ) -> None:
        self._guard, self._notify, self._measurer, self._trust = guard, notify, measurer, trust
        self._one = asyncio.Lock()

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        def guarded(method: Method) -> Any:
            return answered(method, self._guard, Right.COMPUTE, self._notify)

        return {
            "Measure": grpc.unary_stream_rpc_method_handler(
                guarded(self.measure), pb.MeasureRequest.FromString, pb.MeasureReply.SerializeToString
            ),
            "Flow": grpc.stream_stream_rpc_method_handler(guarded(answer_flow), None, pb.FlowFrame.SerializeToString),
            "Line": grpc.unary_unary_rpc_method_handler(
                guarded(self.line), pb.LineRequest.FromString, pb.LineReply.SerializeToString
            ),
        }

    async def measure(self, request: pb.MeasureRequest, stream: Context) -> None:
        """Measure in a thread, and send heartbeats meanwhile. Send the figures last."""
        check_version(request.protocol, PROTOCOL, "the other device")
        if self._measurer is None:
            raise MeasureFailed("This device does not measure itself.", "Start a worker: edgellm serve --role worker")
        blocks, doing = read_blocks(request), ["waiting for another measurement"]
        async with self._one:
            work = asyncio.ensure_future(asyncio.to_thread(self._measurer, blocks, request.oldest, doing.append))
            try:
                while not (await asyncio.wait({work}, timeout=BEAT_SECONDS))[0]:
                    await stream.write(pb.MeasureReply(doing=doing[-1]))
            finally:
                if not work.done():
                    await asyncio.wait({work})
            await stream.write(pb.MeasureReply(figures=write_figures(work.result())))

    async def line(self, request: pb.LineRequest, context: Context) -> pb.LineReply:
        """Measure the connection from here to another device that is paired with this one."""
        check_version(request.protocol, PROTOCOL, "the other device")
        if self._trust is None:
            raise MeasureFailed("This device has no connections to others.", "Pair them first.")
        if len(request.device) != 32:
            raise ProtocolError(f"A device ID has {len(request.device)} bytes.", "Run the same version on both sides.")
        device = DeviceID(bytes(request.device))
        peer = self._trust.peers.get(device)
        if peer is None:
            raise MeasureFailed(
                f"The device {device.short} is not paired with this one.", "Pair the two, to have them talk directly."
            )
        near = on_this_machine(context)
        failed = MeasureFailed(f"{peer.name} cannot be measured from here.", "Is it on, and do the two still trust?")
        async with alike(near, [EdgeError, TimeoutError, grpc.aio.AioRpcError], failed):
            async with asyncio.timeout(FAILED_SECONDS):
                channel = await _connect(self._trust, peer, request.address, near)
            async with channel:
                line = await measure_line(channel, peer.name)
        return pb.LineReply(round_trip=line.round_trip, up=line.up, down=line.down)


async def _connect(trust: Trust, peer: Peer, asked: str, near: bool) -> grpc.aio.Channel:
    """Open a channel to a paired device, at an address that is known or announced. Raise an EdgeError."""
    addresses = places_of(peer, asked, near)
    if not any(asked == str(address) for address in addresses) and not near:
        addresses += await asyncio.to_thread(announced_places, peer, LOOK_SECONDS)
    failure: EdgeError = MeasureFailed(f"Nobody knows where {peer.name} is.", "Pair the two again.")
    for address in dict.fromkeys(addresses):
        try:
            return (await meet(address, trust, peer.id))[0]
        except EdgeError as error:
            failure = error
    raise failure


def answered(method: Method, guard: AuthInterceptor | None, right: Right, notify: Callable[[str], None]) -> Any:
    """Wrap `method`: callers need this right if there is a `guard`, and an EdgeError ends the call with its message."""

    async def answering(request: Any, context: Context) -> Any:
        try:
            return await method(request, context)
        except EdgeError as error:
            notify(error.what)
            await context.abort(status(error), details(error))

    return answering if guard is None else guard.over(answering, right)
