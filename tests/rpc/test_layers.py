"""Layers over the link: brought once, gone on with, and only by whom and as announced."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import DeviceLost, LayersCorrupt, ProtocolError, StoreBusy
from edgellm.rpc.channel import open_channel
from edgellm.rpc.layers import WINDOW, Cut, RateLimiter, method, write_manifest
from edgellm.rpc.link import Timing
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server import layer_service, listener
from edgellm.services.server.layer_service import LayerService
from edgellm.services.server.listener import Stream, next_message
from edgellm.storage.layer_pieces import IncomingPiece, LayerPiece, Manifest
from edgellm.storage.layer_store import LayerStore
from tests.rpc.doors import ended, serving
from tests.rpc.layering import bring, taking
from tests.rpc.strangers import befriend, device

PLENTY = 10**9


async def test_a_model_that_has_changed_meanwhile_is_noticed(store: LayerStore, manifest: Manifest, cut: Cut) -> None:
    def other(piece: LayerPiece) -> Iterator[bytes | memoryview]:
        for portion in cut(piece):
            yield bytes(portion).replace(b"\x00", b"\x01")

    async with taking(store) as address:
        with pytest.raises(LayersCorrupt, match="desk: The bytes that arrived are not layer 2"):
            await bring(address, manifest, [1], other)
        assert store.arrived(manifest.pieces[1]) == 0
        with pytest.raises(LayersCorrupt, match="has changed on this device"):
            await bring(address, manifest, [1], lambda _piece: iter([b"short"]))


async def test_the_same_device_may_begin_again_and_another_one_need_not_wait(
    store: LayerStore, manifest: Manifest, cut: Cut, tmp_path: Path
) -> None:
    worker, owner, other = (device(tmp_path / name) for name in ("worker", "owner", "other"))
    befriend(worker, owner, "files")
    befriend(worker, other, "files")
    async with taking(store, worker) as address:
        slow = asyncio.create_task(bring(address, manifest, list(range(12)), cut, owner, rate=5e5))
        while not store.size:
            await asyncio.sleep(0.01)
        assert (await bring(address, manifest, [11], cut, other))[-1][1] == manifest.pieces[11].size
        told = await bring(address, manifest, list(range(12)), cut, owner)
        assert told[-1][0] == sum(piece.size for piece in manifest.pieces)
        with pytest.raises(StoreBusy, match="another upload"):
            await slow


def test_the_pace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("edgellm.rpc.layers.time.monotonic", lambda: 100.0)
    monkeypatch.setattr("edgellm.rpc.layers.asyncio.sleep", sleep)
    pace = RateLimiter(1e6)
    for _ in range(3):
        asyncio.run(pace.take(50_000))
    assert pauses == pytest.approx([0.0, 0.05, 0.1])


async def test_who_serves_none_says_so(tmp_path: Path, manifest: Manifest, host: Trust, guest: Trust, cut: Cut) -> None:
    async with serving(host) as address:
        with pytest.raises(ProtocolError, match="does not store layers"):
            await bring(address, manifest, [1], cut, guest)


def wanted(manifest: pb.Recipe, *places: int, protocol: int = PROTOCOL) -> pb.PutFrame:
    return pb.PutFrame(wanted=pb.Wanted(protocol=protocol, recipe=manifest, pieces=places))


def portion(place: int, offset: int, data: bytes) -> pb.PutFrame:
    return pb.PutFrame(portion=pb.Portion(piece=place, offset=offset, data=data))


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
            assert (await ended(channel, method("Put"), *frames)).startswith(said)
    assert not list(store.root.rglob("*.gguf"))


async def test_a_sender_that_falls_silent_does_not_block_the_store(
    store: LayerStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_service, "SILENT_SECONDS", 0.2)
    async with taking(store) as address, open_channel(address) as channel:
        first = wanted(write_manifest(manifest), 1)
        assert "No portion has arrived" in await ended(channel, method("Put"), first, close=False)
        with store.receiving(manifest, manifest.pieces[1:2]):
            pass


async def test_no_more_is_on_the_way_than_agreed(store: LayerStore, manifest: Manifest, cut: Cut) -> None:
    """The sender stops where nothing is acknowledged, and what is not acknowledged is sent again at most once."""
    frames = list[pb.PutFrame]()
    async with serving(None, make=lambda *_: Silent(store, frames)) as address:
        task = asyncio.create_task(bring(address, manifest, [0], cut))
        async with asyncio.timeout(60):
            while sum(len(frame.portion.data) for frame in frames) < WINDOW:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # in which more would come
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert sum(len(frame.portion.data) for frame in frames) == WINDOW <= manifest.pieces[0].size


class Silent(LayerService):
    """A device that hears, and acknowledges nothing more."""

    def __init__(self, store: LayerStore, frames: list[pb.PutFrame]) -> None:
        super().__init__(store, lambda _what: None)
        self._frames = frames

    async def put(self, _frames: Any, stream: Stream) -> None:
        await stream.read()
        first = pb.Arrived(piece=0, size=0)
        for reply in (pb.PutReply(there=pb.There(pieces=[first])), pb.PutReply(arrived=first)):
            await stream.write(reply.SerializeToString())
        while (frame := await next_message(stream, pb.PutFrame)) is not None:
            self._frames.append(frame)


async def test_who_gives_no_sign_of_life_is_lost(
    store: LayerStore, manifest: Manifest, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.rpc.layers.UPLOAD_TIMING", Timing(silent_beats=1))
    async with serving(None, make=lambda *_: Silent(store, [])) as address:
        with pytest.raises(DeviceLost, match="stopped responding"):
            await bring(address, manifest, [0], cut)
    with pytest.raises(DeviceLost, match="was lost"):
        await bring(address, manifest, [0], cut)


async def test_signs_of_life_are_given_while_the_disk_is_read(
    store: LayerStore, manifest: Manifest, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a sender that waits a shorter time than the device needs does not give up."""
    finish = IncomingPiece.finish

    def slow(self: IncomingPiece) -> Path:
        time.sleep(0.8)
        return finish(self)

    monkeypatch.setattr(IncomingPiece, "finish", slow)
    monkeypatch.setattr(listener, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr("edgellm.rpc.layers.UPLOAD_TIMING", Timing(beat=0.05, silent_beats=8))
    async with taking(store) as address:
        assert (await bring(address, manifest, [1], cut))[-1][0] == manifest.pieces[1].size
