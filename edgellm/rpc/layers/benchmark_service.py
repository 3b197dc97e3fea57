"""The device's side of being measured, and the guard of the calls of `layers.proto`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from edgellm.engine.gguf.synthetic_layers import Blocks
from edgellm.errors import EdgeError, MeasureFailed, ProtocolError
from edgellm.rpc.discovery.peer_probe import LOOK_SECONDS
from edgellm.rpc.layers.bandwidth_probe import answer_flow, measure_line
from edgellm.rpc.layers.codec import BEAT_SECONDS, PROTOCOL, details, status
from edgellm.rpc.layers.device_figures import Figures, read_blocks, write_figures
from edgellm.rpc.lines import FAILED_SECONDS, alike, announced_places, on_this_machine, places_of
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, Context, Method
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.handshake import meet
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import check_version

Measurer = Callable[[Blocks, float, Callable[[str], None]], Figures]
"""Measures this device with the given layers, unless its last figures are at most that many seconds old; reports its
progress to the callback."""


class MeasureService:
    """Measures this device and its connections for others. Lives in one event loop; one measurement at a time."""

    def __init__(
        self, guard: AuthInterceptor | None, tell: Callable[[str], None], measurer: Measurer | None, trust: Trust | None
    ) -> None:
        self._guard, self._tell, self._measurer, self._trust = guard, tell, measurer, trust
        self._one = asyncio.Lock()

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        def guarded(method: Method) -> Any:
            return answered(method, self._guard, Right.COMPUTE, self._tell)

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
        """Measure in a thread, with signs of life meanwhile; send the figures last."""
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
            raise MeasureFailed("This device has no lines to others.", "Pair them first.")
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
                channel = await _met(self._trust, peer, request.address, near)
            async with channel:
                line = await measure_line(channel, peer.name)
        return pb.LineReply(round_trip=line.round_trip, up=line.up, down=line.down)


async def _met(trust: Trust, peer: Peer, asked: str, near: bool) -> grpc.aio.Channel:
    """Open a channel to a paired device, at the addresses where it was met or announces itself. Raises an EdgeError."""
    places = places_of(peer, asked, near)
    if not any(asked == str(place) for place in places) and not near:
        places += await asyncio.to_thread(announced_places, peer, LOOK_SECONDS)
    trouble: EdgeError = MeasureFailed(f"Nobody knows where {peer.name} is.", "Pair the two again.")
    for place in dict.fromkeys(places):
        try:
            return (await meet(place, trust, peer.id))[0]
        except EdgeError as error:
            trouble = error
    raise trouble


def answered(method: Method, guard: AuthInterceptor | None, right: Right, tell: Callable[[str], None]) -> Any:
    """Wrap `method`: callers need this right if there is a `guard`, and an EdgeError ends the call with its message."""

    async def answering(request: Any, context: Context) -> Any:
        try:
            return await method(request, context)
        except EdgeError as error:
            tell(error.what)
            await context.abort(status(error), details(error))

    return answering if guard is None else guard.over(answering, right)
