"""A device that may only bring layers does not decide what a worker computes for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from edgellm.engine import ModelFile
from edgellm.errors import EdgeError, LayersCorrupt
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import SeveralSources, StoredLayers, WholeModel
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel, run_in_network_loop
from edgellm.rpc.layers.upload import Cut, RateLimiter, clean, upload
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.servers import WorkerServer
from edgellm.storage.layers.manifest import LayerPiece, Manifest, manifest_of
from edgellm.storage.layers.store import LayerStore
from tests.cli.conftest import Done
from tests.cli.poisoned_layers import claimed, deadly, garbled
from tests.rpc.strangers import befriend, device
from tests.storage.pieces import layerwise

Edge = Callable[..., Done]
SPLIT = "here:1-6,desk:7-12"


class Home:
    """A worker, this user's device, which may bring layers and have them computed, and one that may only bring some."""

    def __init__(self, folder: Path, own: Path | None) -> None:
        self.owner, self.other, self.worker_trust = Trust.load(), device(folder / "other"), device(folder / "desk")
        befriend(self.worker_trust, self.owner, "files compute")
        befriend(self.worker_trust, self.other, "files")
        self.owner.peers.rename(self.worker_trust.identity.id, "desk")
        self.store = LayerStore(folder / "store", 10**9)
        stored = StoredLayers(self.store)
        places = () if own is None else (WholeModel(ModelFile.open(own), self.store),)
        cache = WeightCache(SeveralSources(*places, stored), keep=0.0)
        self.worker = WorkerServer(cache, Address("127.0.0.1", 0), trust=self.worker_trust, stored=stored)

    def attack(self, manifest: Manifest, bad: Manifest, pieces: dict[LayerPiece, bytes]) -> None:
        """Removes what can be removed, and brings the other layers 7 to 12."""

        places = [at for at, piece in enumerate(bad.pieces) if piece.first >= 6]

        async def work() -> None:
            async with open_channel(self.worker.address, self.other) as channel:
                with pytest.raises(EdgeError):
                    await clean(channel, "desk", manifest.fingerprint)
                cut: Cut = lambda piece: iter([pieces[piece]])  # noqa: E731
                await upload(channel, "desk", bad, places, cut, RateLimiter(), lambda _carried: None)

        run_in_network_loop(asyncio.wait_for(work(), 30)).result()


@contextmanager
def home(folder: Path, own: Path | None = None) -> Iterator[Home]:
    made = Home(folder, own)
    with made.worker:
        made.owner.peers.record_seen(made.worker_trust.identity.id, made.worker.address)
        yield made


def written(edge: Edge, split: str = SPLIT) -> Done:
    words = ("--split", split, "--max-tokens", "6", "--retrieval", "off", "--ctx-size", "256")
    return edge("mesh", "run", "edgellm-verifier", "Where is my mug?", *words)


@pytest.mark.parametrize("own", [False, True], ids=["brought", "its own"])
@pytest.mark.parametrize("alike", [False, True], ids=["each layer", "as deployed"])
def test_other_layers_under_the_same_model_are_not_computed(
    edge: Edge, verifier_path: Path, tmp_path: Path, own: bool, alike: bool
) -> None:
    deployed = manifest_of(ModelFile.open(verifier_path), [LayerRange(0, 6), LayerRange(6, 12)])
    manifest = deployed if alike else layerwise(verifier_path)
    bad, pieces = claimed(manifest, garbled(manifest, verifier_path))
    with home(tmp_path, verifier_path if own else None) as there:
        if not own:
            assert edge("mesh", "deploy", "edgellm-verifier", "--split", "desk:7-12").code == 0
        before = written(edge)
        assert before.code == 0, before.err
        assert before.out == written(edge, "here:1-12").out
        there.attack(manifest, bad, pieces)
        assert {piece for piece in bad.pieces if piece.first >= 6} <= there.store.pieces(manifest.fingerprint)
        after = written(edge)
        assert (after.code, after.out, "lost" in after.err) == (0, before.out, False)


def test_who_has_other_layers_refuses_and_the_coordinator_says_so(
    edge: Edge, verifier_path: Path, tmp_path: Path
) -> None:
    manifest = layerwise(verifier_path)
    bad, pieces = claimed(manifest, garbled(manifest, verifier_path))
    with home(tmp_path) as there:
        there.attack(manifest, bad, pieces)
        refused = written(edge)
        said = " ".join(refused.err.split())
        assert "deployed to this device do not match the coordinator's file" in said
        assert "The layers are now on here 1-12" in said
        assert refused.out == written(edge, "here:1-12").out
        assert edge("mesh", "deploy", "edgellm-verifier", "--split", "desk:7-12").code == 0
        assert written(edge).out == written(edge, "here:1-12").out


def test_layers_that_would_end_the_process_are_never_loaded_for_another(
    edge: Edge, verifier_path: Path, tmp_path: Path
) -> None:
    manifest = layerwise(verifier_path)
    bad, pieces = claimed(manifest, deadly(manifest, verifier_path))
    with home(tmp_path) as there:
        assert edge("mesh", "deploy", "edgellm-verifier", "--split", "desk:7-12").code == 0
        before = written(edge)
        with suppress(LayersCorrupt):  # the check of files may refuse them as they come
            there.attack(manifest, bad, pieces)
        assert written(edge).out == before.out
