"""A worker's line to the next stage: rows go there directly, one hop, and not through the coordinator."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import grpc.aio

from edgellm.errors import EdgeError
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO_SECONDS, open_channel
from edgellm.rpc.lines import alike, places_of
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.handshake import meet
from edgellm.rpc.trust.trust import Trust

MET_SECONDS = 15.0  # the next stage may wait for its coordinator first
_CARRY = "/edgellm.v1.Mesh/Carry"


class LineBroken(EdgeError):
    """The next stage was met, and cannot be reached any more."""


class StageForwarder:
    """To the stage that `prepare` names. It is met in the background; until that is decided, parcels wait."""

    def __init__(self, prepare: pb.Prepare, trust: Trust | None, near: bool) -> None:
        """`near`: the coordinator is on this machine, so it may have this device dial on loopback."""
        self._prepare, self._trust, self._near = prepare, trust, near
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self._meeting = asyncio.create_task(self._meet())

    async def met(self) -> bool:
        """Return whether the next stage was reached; if not, the coordinator has to pass parcels on from now on."""
        return await asyncio.shield(self._meeting)

    async def send(self, parcel: pb.MeshParcel) -> None:
        """Send a parcel to the next stage. Raises LineBroken."""
        try:
            if self._call is not None:
                await self._call.write(pb.Carried(parcel=parcel).SerializeToString())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise LineBroken(f"The next stage at {self._prepare.next} is gone.", "Prepare the stage again.") from None

    def hang_up(self) -> None:
        """Cancel the stream, and close the channel in the background."""
        self._meeting.cancel()
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            self._closing = asyncio.ensure_future(self._channel.close(None))

    async def _meet(self) -> bool:
        nobody = LineBroken("The next stage cannot be reached.", "The coordinator passes on.")
        with suppress(EdgeError):
            place = self._place()
            async with alike(self._near or self._trust is None, _ERRORS, nobody), asyncio.timeout(MET_SECONDS):
                self._channel = await self._dial(place)
                call = self._channel.stream_stream(_CARRY, bytes, bytes)()  # type: ignore[call-arg]  # written to
                meeting = pb.Meeting(protocol=self._prepare.protocol, stage=self._prepare.next_stage)
                await call.write(pb.Carried(meeting=meeting).SerializeToString())
                if isinstance(await call.read(), bytes):
                    self._call = call
                    return True
                raise nobody
        if self._channel is not None:
            channel, self._channel = self._channel, None
            with suppress(grpc.aio.AioRpcError):
                await channel.close(None)
        return False

    def _place(self) -> Address:
        """Return the address of the next stage.

        Raises:
            LineBroken: this device does not know it to be there; then the coordinator passes on.
        """
        asked, device = self._prepare.next, bytes(self._prepare.next_device)
        if self._trust is None:
            return Address.parse(asked)
        peers = [peer for peer in self._trust.peers.all() if not device or peer.id.digest == device]
        for place in (place for peer in peers for place in places_of(peer, asked, self._near)):
            if str(place) == asked:
                return place
        raise LineBroken(f"No paired device is known to be at {asked}.", "The coordinator passes on.")

    async def _dial(self, place: Address) -> grpc.aio.Channel:
        if self._trust is None:
            return open_channel(place)
        device = DeviceID(self._prepare.next_device) if self._prepare.next_device else None
        return (await meet(place, self._trust, device, HELLO_SECONDS))[0]


_ERRORS = (EdgeError, grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, ValueError)
