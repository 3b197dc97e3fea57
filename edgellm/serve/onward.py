"""A worker's line to the next stage: rows go there directly, one hop, and not through the coordinator."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import grpc.aio

from edgellm.errors import EdgeError
from edgellm.link import mesh_pb2 as pb
from edgellm.link.address import Address
from edgellm.link.channel import HELLO_SECONDS, open_channel
from edgellm.link.device import DeviceID
from edgellm.link.trust import Trust
from edgellm.link.welcome import meet

MET_SECONDS = 15.0  # the next stage may wait for its coordinator first
_CARRY = "/edgellm.v1.Mesh/Carry"


class LineBroken(EdgeError):
    """The next stage was met, and cannot be reached any more."""


class Line:
    """To the stage that `prepare` names. It is met in the background; until that is decided, parcels wait."""

    def __init__(self, prepare: pb.Prepare, trust: Trust | None) -> None:
        self._prepare, self._trust = prepare, trust
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self._meeting = asyncio.create_task(self._meet())

    async def met(self) -> bool:
        """Whether the next stage is there; else the coordinator has to pass parcels on, from now on."""
        return await asyncio.shield(self._meeting)

    async def send(self, parcel: pb.MeshParcel) -> None:
        """Raises LineBroken."""
        try:
            if self._call is not None:
                await self._call.write(pb.Carried(parcel=parcel).SerializeToString())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise LineBroken(f"The next stage at {self._prepare.next} is gone.", "Prepare the stage again.") from None

    def hang_up(self) -> None:
        """Ends it; the loop does so soon."""
        self._meeting.cancel()
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            self._closing = asyncio.ensure_future(self._channel.close(None))

    async def _meet(self) -> bool:
        try:
            async with asyncio.timeout(MET_SECONDS):
                address = Address.parse(self._prepare.next)
                if self._trust is None:
                    self._channel = open_channel(address)
                else:
                    device = DeviceID(self._prepare.next_device) if self._prepare.next_device else None
                    self._channel, _ = await meet(address, self._trust, device, HELLO_SECONDS)
                call = self._channel.stream_stream(_CARRY, bytes, bytes)()  # type: ignore[call-arg]  # written to
                meeting = pb.Meeting(protocol=self._prepare.protocol, stage=self._prepare.next_stage)
                await call.write(pb.Carried(meeting=meeting).SerializeToString())
                if isinstance(await call.read(), bytes):
                    self._call = call
                    return True
        except (EdgeError, grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, ValueError):
            pass  # strangers to each other, or no way from there to there
        if self._channel is not None:
            channel, self._channel = self._channel, None
            with suppress(grpc.aio.AioRpcError):
                await channel.close(None)
        return False
