"""The device's side of the contract, asked by somebody who does not keep to it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from edgellm.rpc.channel import open_channel
from edgellm.rpc.layers.codec import method, write_manifest
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.services.server import layer_service
from edgellm.storage.layers.manifest import Manifest
from edgellm.storage.layers.store import LayerStore
from tests.rpc.doors import in_loop
from tests.rpc.layering import taking


def wanted(manifest: pb.Recipe, *places: int, protocol: int = 1) -> pb.PutFrame:
    return pb.PutFrame(wanted=pb.Wanted(protocol=protocol, recipe=manifest, pieces=places))


def portion(place: int, offset: int, data: bytes) -> pb.PutFrame:
    return pb.PutFrame(portion=pb.Portion(piece=place, offset=offset, data=data))


@in_loop
async def test_whoever_breaks_the_contract_is_told_how(store: LayerStore, manifest: Manifest) -> None:
    good = write_manifest(manifest)
    strange, escaping = write_manifest(manifest), write_manifest(manifest)
    strange.pieces[1].size = 2**62
    escaping.pieces[1].sha256 = b"../../../etc"
    first = wanted(good, 1)
    cases: list[tuple[list[pb.PutFrame | bytes], str]] = [
        ([portion(1, 0, b"x")], "INVALID_ARGUMENT The first frame is not Wanted"),
        ([wanted(good, 1, protocol=2)], "FAILED_PRECONDITION The other device speaks protocol version 2"),
        ([wanted(good)], "INVALID_ARGUMENT The list of wanted pieces is invalid"),
        ([wanted(good, 2, 1)], "INVALID_ARGUMENT The list of wanted pieces is invalid"),
        ([wanted(good, 12)], "INVALID_ARGUMENT The list of wanted pieces is invalid"),
        ([wanted(strange, 1)], "INVALID_ARGUMENT The manifest is invalid: it has a piece of"),
        ([wanted(escaping, 1)], "INVALID_ARGUMENT The manifest is invalid: it has a piece with the hash"),
        ([b"\xff\xff\xff"], "INVALID_ARGUMENT A PutFrame cannot be parsed"),
        ([first, portion(2, 0, b"x")], "INVALID_ARGUMENT Expected a portion of piece 1 at 0, but received piece 2"),
        ([first, portion(1, 5, b"x")], "INVALID_ARGUMENT Expected a portion of piece 1 at 0, but received piece 1"),
        ([first, portion(1, 0, b"")], "INVALID_ARGUMENT A portion has 0 bytes"),
        ([first, portion(1, 0, bytes(2**20 + 1))], "INVALID_ARGUMENT A portion has 1048577 bytes"),
        ([first, first], "INVALID_ARGUMENT Expected a portion of piece 1 at 0, but received piece 0"),
        ([first, portion(1, 0, bytes(manifest.pieces[1].size + 1))], "INVALID_ARGUMENT Layer 2 was announced with"),
        ([first, portion(1, 0, bytes(manifest.pieces[1].size))], "DATA_LOSS The bytes that arrived are not layer 2"),
        ([first], "INVALID_ARGUMENT The upload ended before every piece was complete"),
    ]
    async with taking(store) as address, open_channel(address) as channel:
        for frames, said in cases:
            call: Any = channel.stream_stream
            assert (await ended(call(method("Put"))(), frames)).startswith(said)
    assert not list(store.root.rglob("*.gguf"))


async def ended(call: Any, frames: list[pb.PutFrame | bytes], close: bool = True) -> str:
    for frame in frames:
        await call.write(frame if isinstance(frame, bytes) else frame.SerializeToString())
    if close:
        await call.done_writing()
    while True:
        try:
            if not isinstance(await call.read(), bytes):
                return "OK"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"


@in_loop
async def test_a_sender_that_falls_silent_does_not_block_the_store(
    store: LayerStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_service, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(layer_service, "DRAIN_SECONDS", 0.2)
    async with taking(store) as address, open_channel(address) as channel:
        call: Any = channel.stream_stream
        running = call(method("Put"))()
        await running.write(wanted(write_manifest(manifest), 1).SerializeToString())
        assert "No portion has arrived" in await ended(running, [], close=False)
        with store.receiving(manifest, manifest.pieces[1:2]):
            pass
