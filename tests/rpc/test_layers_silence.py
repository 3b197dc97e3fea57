"""What is on the way to a device that says nothing, and how long it is waited for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from edgellm.errors import DeviceLost
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind, new_server
from edgellm.rpc.layers import codec
from edgellm.rpc.layers.codec import WINDOW
from edgellm.rpc.layers.upload import Cut
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.services.server import listener
from edgellm.storage.layers.incoming_piece import IncomingPiece
from edgellm.storage.layers.manifest import Manifest
from edgellm.storage.layers.store import LayerStore
from tests.rpc.doors import in_loop
from tests.rpc.layering import bring, taking


@in_loop
async def test_no_more_is_on_the_way_than_agreed(store: LayerStore, manifest: Manifest, cut: Cut) -> None:
    """The sender stops where nothing is acknowledged, and what is not acknowledged is sent again at most once."""
    async with silent(arrived=0) as (address, frames):
        task = asyncio.create_task(bring(address, manifest, [0], cut))
        async with asyncio.timeout(60):
            while sum(len(frame.portion.data) for frame in frames) < WINDOW:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # in which more would come
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert sum(len(frame.portion.data) for frame in frames) == WINDOW <= manifest.pieces[0].size


class silent:  # noqa: N801  # used as a function
    """A device that hears and acknowledges nothing more."""

    def __init__(self, arrived: int) -> None:
        self._arrived, self._frames = arrived, list[pb.PutFrame]()

    async def __aenter__(self) -> tuple[Address, list[pb.PutFrame]]:
        self._server = new_server()
        handler = grpc.stream_stream_rpc_method_handler(
            self._put, pb.PutFrame.FromString, pb.PutReply.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(codec.CONTRACT.full_name, {"Put": handler}),)
        )
        address = bind(self._server, Address("127.0.0.1", 0))
        await self._server.start()
        return address, self._frames

    async def _put(self, _frames: Any, stream: Any) -> None:
        await stream.read()
        first = pb.Arrived(piece=0, size=self._arrived)
        await stream.write(pb.PutReply(there=pb.There(pieces=[first])))
        await stream.write(pb.PutReply(arrived=first))
        while isinstance(frame := await stream.read(), pb.PutFrame):
            self._frames.append(frame)

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


@in_loop
async def test_who_gives_no_sign_of_life_is_lost(manifest: Manifest, cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.rpc.layers.upload.REPLY_SECONDS", 0.2)
    async with silent(arrived=0) as (address, _frames):
        with pytest.raises(DeviceLost, match="stopped responding"):
            await bring(address, manifest, [0], cut)
    with pytest.raises(DeviceLost, match="was lost"):
        await bring(address, manifest, [0], cut)


@in_loop
async def test_signs_of_life_are_given_while_the_disk_is_read(
    store: LayerStore, manifest: Manifest, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a sender that waits a shorter time than the device needs does not give up."""
    finish = IncomingPiece.finish

    def slow(self: IncomingPiece) -> Path:
        time.sleep(3.0)
        return finish(self)

    monkeypatch.setattr(IncomingPiece, "finish", slow)
    monkeypatch.setattr(listener, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr("edgellm.rpc.layers.upload.REPLY_SECONDS", 2.0)
    async with taking(store) as address:
        done, _ = await bring(address, manifest, [1], cut)
        assert done.arrived == done.total
