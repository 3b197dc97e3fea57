"""A device that may only bring layers does not decide what a worker computes for another one."""

import asyncio
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.engine import ModelFile, check_gguf
from edgellm.errors import EdgeError
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import SeveralSources, StoredLayers, WholeModel
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.channel import open_channel, run_in_network_loop
from edgellm.rpc.layers import Cut, RateLimiter, clean, upload
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.servers import WorkerServer
from edgellm.storage.layer_pieces import LayerPiece, Manifest, manifest_of
from edgellm.storage.layer_store import LayerStore
from tests.cli.conftest import Done, Edge
from tests.rpc.strangers import befriend, device
from tests.services.conftest import ANYWHERE
from tests.storage.pieces import bytes_of, layerwise, part
from tests.waiting import until

Bytes = dict[LayerPiece, bytes]


def garbled(manifest: Manifest, model: Path, folder: Path) -> Bytes:
    """Return layers with other weights, which load and compute nonsense."""
    shutil.copyfile(model, copy := folder / "copy.gguf")
    with copy.open("r+b") as file:
        for tensor in check_gguf(copy).tensors:
            if tensor.name.endswith(("ffn_down.weight", "attn_output.weight")):
                file.seek(tensor.offset)
                file.write(bytes(tensor.nbytes))
    return {piece: bytes_of(copy, piece) for piece in manifest.pieces}


def claimed(manifest: Manifest, pieces: Bytes) -> tuple[Manifest, Bytes]:
    """Return a manifest that claims other bytes as layers of the same model, and its pieces."""
    made = {
        replace(piece, size=len(data), sha256=hashlib.sha256(data).hexdigest()): data for piece, data in pieces.items()
    }
    return replace(manifest, pieces=tuple(made)), made


class Home:
    """A worker, this user's device, which may bring layers and have them computed, and one that may only bring some."""

    def __init__(self, folder: Path, own: Path | None) -> None:
        self.owner, self.other, self.worker_trust = Trust.load(), device(folder / "other"), device(folder / "desk")
        befriend(self.worker_trust, self.owner, "files compute", "desk")
        befriend(self.worker_trust, self.other, "files")
        self.store = LayerStore(folder / "store", 10**9)
        stored = StoredLayers(self.store)
        places = () if own is None else (WholeModel(ModelFile.open(own), self.store),)
        self.cache = WeightCache(SeveralSources(*places, stored))
        self.worker = WorkerServer(self.cache, ANYWHERE, trust=self.worker_trust, stored=stored)

    def attack(self, manifest: Manifest, bad: Manifest, pieces: Bytes) -> None:
        """Remove what can be removed, and bring the other layers 7 to 12."""

        upper = part(bad, *(piece for piece in bad.pieces if piece.first >= 6))

        async def work() -> None:
            async with open_channel(self.worker.address, self.other) as channel:
                with pytest.raises(EdgeError):
                    await clean(channel, "desk", manifest.fingerprint)
                cut: Cut = lambda piece: iter([pieces[piece]])  # noqa: E731
                await upload(channel, "desk", upper, cut, RateLimiter(), lambda *_moved: None)

        run_in_network_loop(asyncio.wait_for(work(), 30)).result()
        until(lambda: self.cache.evict_unused(everything=True) or not self.cache.size)  # the next run loads them anew


@contextmanager
def home(folder: Path, own: Path | None = None) -> Iterator[Home]:
    made = Home(folder, own)
    with made.worker:
        made.owner.peers.record_seen(made.worker_trust.identity.id, made.worker.address)
        yield made


DEPLOY = ("mesh", "deploy", "edgellm-verifier", "--split", "desk:7-12")


def written(edge: Edge, split: str = "here:1-6,desk:7-12") -> Done:
    words = ("--split", split, "--max-tokens", "6", "--retrieval", "off", "--ctx-size", "256")
    return edge("mesh", "run", "edgellm-verifier", "Where is my mug?", *words)


@pytest.mark.parametrize("own", [False, True], ids=["brought", "its own"])
@pytest.mark.parametrize("alike", [False, True], ids=["each layer", "as deployed"])
def test_other_layers_under_the_same_model_are_not_computed(
    edge: Edge, verifier_path: Path, tmp_path: Path, own: bool, alike: bool
) -> None:
    deployed = manifest_of(ModelFile.open(verifier_path), [LayerRange(0, 6), LayerRange(6, 12)])
    manifest = deployed if alike else layerwise(verifier_path)
    bad, pieces = claimed(manifest, garbled(manifest, verifier_path, tmp_path))
    with home(tmp_path, verifier_path if own else None) as there:
        if not own:
            assert edge(*DEPLOY).code == 0
        before = written(edge)
        assert before.code == 0, before.err
        assert before.out == written(edge, "here:1-12").out
        there.attack(manifest, bad, pieces)
        assert {piece for piece in bad.pieces if piece.first >= 6} <= there.store.pieces(manifest.fingerprint)
        after = written(edge)
        assert (after.code, after.out, "lost" in after.err) == (0, before.out, False)


def test_who_has_other_layers_refuses_and_that_is_told(edge: Edge, verifier_path: Path, tmp_path: Path) -> None:
    manifest = layerwise(verifier_path)
    with home(tmp_path) as there:
        there.attack(manifest, *claimed(manifest, garbled(manifest, verifier_path, tmp_path)))
        refused, alone = written(edge), written(edge, "here:1-12")
        said = " ".join(refused.err.split())
        assert "deployed to this device do not match the coordinator's file" in said
        assert "The layers are now on here 1-12" in said
        assert refused.out == alone.out
        assert edge(*DEPLOY).code == 0
        assert written(edge).out == alone.out
