"""Layers over the link: brought once, gone on with, and only by whom and as announced."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message

from edgellm.errors import DeviceLost, LayersCorrupt, ProtocolError
from edgellm.rpc.channel import open_channel
from edgellm.rpc.layers import PORTION, Cut, RateLimiter, method, write_manifest
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.layer_service import LayerService
from edgellm.services.server.listener import Stream
from edgellm.storage.layer_pieces import LayerPiece, Manifest
from edgellm.storage.layer_store import LayerStore
from tests.rpc.doors import serving
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
        everything = list(range(12))
        slow = asyncio.create_task(bring(address, manifest, everything, cut, owner, rate=5e5))
        while not store.size:
            await asyncio.sleep(0.01)
        assert (await bring(address, manifest, [11], cut, other))[-1][1] == manifest.pieces[11].size
        for told in (await bring(address, manifest, everything, cut, owner), await slow):
            assert told[-1][0] == sum(piece.size for piece in manifest.pieces)


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


def wanted(manifest: pb.Recipe, *places: int, protocol: int = PROTOCOL) -> pb.Wanted:
    found = pb.Wanted(protocol=protocol, recipe=manifest)
    del found.recipe.pieces[:]
    found.recipe.pieces.extend(manifest.pieces[place] for place in places)
    return found


async def test_whoever_breaks_the_contract_is_told_how(store: LayerStore, manifest: Manifest) -> None:
    good = write_manifest(manifest)
    huge, escaping = write_manifest(manifest), write_manifest(manifest)
    huge.pieces[1].size = 2**64 - 1
    escaping.pieces[1].sha256 = b"../../../etc"
    piece = good.pieces[1]
    reserving: list[tuple[Message, str]] = [
        (wanted(good, 1, protocol=2), "FAILED_PRECONDITION The other device speaks protocol version 2"),
        (wanted(good), "INVALID_ARGUMENT The manifest is invalid: it has 0 pieces"),
        (wanted(good, 2, 1), "INVALID_ARGUMENT The manifest is invalid: it has 2 pieces, too many or not in ascending"),
        (wanted(huge, 1), "RESOURCE_EXHAUSTED layer 2 of edgellm verifier would take"),
        (wanted(escaping, 1), "INVALID_ARGUMENT The manifest is invalid: it has a piece with the hash"),
        (wanted(good, 1), "OK"),
    ]
    putting: list[tuple[Message, str]] = [
        (pb.Portion(piece=good.pieces[2], data=b"x"), "NOT_FOUND No room is set aside for layer 3"),
        (pb.Portion(piece=escaping.pieces[1], data=b"x"), "INVALID_ARGUMENT The manifest is invalid: it has a piece"),
        (pb.Portion(piece=piece, data=b""), "INVALID_ARGUMENT A portion has 0 bytes"),
        (pb.Portion(piece=piece, data=bytes(PORTION + 1)), "INVALID_ARGUMENT A portion has 1048577 bytes"),
        (pb.Portion(piece=piece, data=bytes(piece.size + 1)), "INVALID_ARGUMENT Layer 2 was announced with"),
        (pb.Portion(piece=piece, data=bytes(piece.size)), "DATA_LOSS The bytes that arrived are not layer 2"),
    ]
    async with taking(store) as address, open_channel(address) as channel:
        for call, cases in (("Reserve", reserving), ("Put", putting)):
            for message, said in cases:
                answer = channel.unary_unary(method(call), None, None)(message.SerializeToString())
                assert f"{(await answer.code()).name} {await answer.details()}".startswith(said)
    assert not list(store.root.rglob("*.gguf"))


async def test_who_does_not_answer_is_lost(
    store: LayerStore, manifest: Manifest, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.rpc.layers.REPLY_SECONDS", 0.2)
    async with serving(None, make=lambda *_: Silent(store, lambda _what: None)) as address:
        with pytest.raises(DeviceLost, match="was lost"):
            await bring(address, manifest, [0], cut)


class Silent(LayerService):
    """A device that hears, and answers nothing more."""

    async def put(self, _data: bytes, _stream: Stream) -> pb.Arrived:
        await asyncio.Event().wait()
        raise AssertionError
