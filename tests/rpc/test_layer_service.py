"""Layers over the link: brought once, gone on with, and only by whom and as announced."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.errors import DeviceLost, LayersCorrupt, LayersMissing, NotPermitted, ProtocolError, StoreBusy, StoreFull
from edgellm.rpc.channel import open_channel
from edgellm.rpc.layers.upload import Cut, RateLimiter, clean, list_layers
from edgellm.rpc.trust.trust import Trust
from edgellm.storage.layers.manifest import LayerPiece, Manifest
from edgellm.storage.layers.store import CleanResult, LayerStore
from tests.rpc.doors import in_loop, serving
from tests.rpc.layering import bring, taking
from tests.rpc.strangers import befriend, device

PLENTY = 10**9


@in_loop
async def test_layers_come_once_and_are_told_of(store: LayerStore, manifest: Manifest, cut: Cut) -> None:
    said: list[str] = []
    async with taking(store, said=said) as address:
        size = sum(piece.size for piece in manifest.pieces[2:5])
        done, told = await bring(address, manifest, [2, 3, 4], cut)
        assert (done.arrived, done.total, done.sent) == (size, size, size)
        assert [one.arrived for one in told] == sorted(one.arrived for one in told)
        again, _ = await bring(address, manifest, [2, 3, 4, 5], cut)
        assert (again.arrived, again.sent) == (size + manifest.pieces[5].size, manifest.pieces[5].size)
        async with open_channel(address) as channel:
            facts = await list_layers(channel, "desk")
            (there,) = facts.models
            assert there.manifest == replace(manifest, pieces=manifest.pieces[2:6])
            assert (there.pieces, there.arriving) == (manifest.pieces[2:6], 0)
            assert (facts.limit, facts.size) == (PLENTY, store.size)
            assert facts.free > 0
            with pytest.raises(LayersMissing):
                await clean(channel, "desk", "0" * 64)
            assert await clean(channel, "desk", manifest.fingerprint) == CleanResult(4, again.arrived, 0)
            assert (await list_layers(channel, "desk")).models == ()
    assert said[0] == f"3 pieces of {manifest.name} are complete."


@in_loop
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


@in_loop
async def test_a_store_without_room_says_so_before_anything_is_sent(
    tmp_path: Path, manifest: Manifest, cut: Cut
) -> None:
    async with taking(LayerStore(tmp_path, 10**6)) as address:
        with pytest.raises(StoreFull, match=r"desk: 12 pieces .* limit of 0.00 GB"):
            await bring(address, manifest, list(range(12)), cut)


@in_loop
async def test_only_paired_devices_with_the_right_to_files(
    store: LayerStore, manifest: Manifest, cut: Cut, tmp_path: Path
) -> None:
    worker, owner, verifier = (device(tmp_path / name) for name in ("worker", "owner", "verifier"))
    befriend(worker, owner, "files")
    befriend(worker, verifier, "verify compute")
    async with taking(store, worker) as address:
        done, _ = await bring(address, manifest, [3], cut, owner)
        assert done.sent == manifest.pieces[3].size
        with pytest.raises(NotPermitted, match="no right to files"):
            await bring(address, manifest, [4], cut, verifier)
        with pytest.raises(NotPermitted):
            async with open_channel(address, verifier) as channel:
                await list_layers(channel, "desk")
        with pytest.raises(DeviceLost):
            await bring(address, manifest, [4], cut)  # in plain text
    assert store.find(manifest.pieces[4]) is None


@in_loop
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
        done, _ = await bring(address, manifest, [11], cut, other)
        assert done.sent == manifest.pieces[11].size
        done, _ = await bring(address, manifest, list(range(12)), cut, owner)
        assert done.arrived == done.total
        with pytest.raises(StoreBusy, match="another upload"):
            await slow


@in_loop
async def test_the_pace_is_kept() -> None:
    pace = RateLimiter(1e6)
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(pace.take(50_000) for _ in range(5)))
    assert asyncio.get_running_loop().time() - began >= 0.19


@in_loop
async def test_who_serves_no_layers_says_so(
    tmp_path: Path, manifest: Manifest, host: Trust, guest: Trust, cut: Cut
) -> None:
    async with serving(host) as address:
        with pytest.raises(ProtocolError, match="does not store layers"):
            await bring(address, manifest, [1], cut, guest)
