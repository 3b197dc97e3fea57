"""Several devices that bring layers to one store: none of them removes, replaces or hides what another one brought."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.errors import LayersMissing, LayersRefused, StoreBusy, StoreFull
from edgellm.storage.layers import store as layers
from edgellm.storage.layers.manifest import LayerPiece, Manifest
from edgellm.storage.layers.store import MAX_MODELS, LayerStore
from tests.storage.pieces import bytes_of

PLENTY = 10**9
X, Y = "aa" * 32, "bb" * 32


def put(store: LayerStore, model: Path, manifest: Manifest, piece: LayerPiece, owner: str, share: float = 1.0) -> None:
    data = bytes_of(model, manifest, piece)
    with store.receiving(manifest, [piece], owner) as receiving:
        if store.find(piece) is None:
            with receiving(piece) as partial:
                partial.append(data[partial.size : int(share * len(data))])
                if share == 1.0:
                    partial.finish()


def test_a_device_removes_what_it_brought_and_nothing_else(
    store: LayerStore, draft_path: Path, manifest: Manifest
) -> None:
    mine, both, theirs = manifest.pieces[1:4]
    for owner, pieces in ((X, (mine, both)), (Y, (both, theirs))):
        for piece in pieces:
            put(store, draft_path, manifest, piece, owner)
    assert [held.pieces for held in store.models(X)] == [(mine, both)]
    gone = store.clean(owner=X)
    assert (gone.pieces, gone.size, gone.in_use) == (1, mine.size, 0)
    assert store.models(X) == []
    assert [held.pieces for held in store.models(Y)] == [(both, theirs)]
    with pytest.raises(LayersMissing):
        store.clean(manifest.fingerprint, X)
    with store.using([both]):
        assert store.clean(manifest.fingerprint, Y).in_use == 1
    assert [held.pieces for held in store.models(Y)] == [(both,)]
    assert store.clean(owner=Y).pieces == 1
    assert (store.models(), store.size) == ([], 0)


def test_the_user_of_the_device_removes_everything(store: LayerStore, draft_path: Path, manifest: Manifest) -> None:
    put(store, draft_path, manifest, manifest.pieces[1], X)
    put(store, draft_path, manifest, manifest.pieces[2], Y, share=0.5)
    with store.receiving(manifest, manifest.pieces[1:2], Y), pytest.raises(StoreBusy):
        store.clean()
    assert store.clean().pieces == 2
    assert (store.models(), store.size) == ([], 0)


def test_room_is_made_at_nobody_elses_cost(draft_path: Path, manifest: Manifest, tmp_path: Path) -> None:
    one = manifest.pieces[1].size
    store = LayerStore(tmp_path / "small", 2 * one)
    put(store, draft_path, manifest, manifest.pieces[1], Y)
    put(store, draft_path, manifest, manifest.pieces[2], X)
    put(store, draft_path, manifest, manifest.pieces[3], X)  # in the place of its own
    assert [store.find(piece) is not None for piece in manifest.pieces[1:4]] == [True, False, True]
    with pytest.raises(StoreFull, match="belong to other devices"), store.receiving(manifest, manifest.pieces[2:4], X):
        pass
    assert store.find(manifest.pieces[1]) is not None
    long_ago = time.time() - layers.UNUSED_SECONDS - 1.0
    (path,) = [path for path in store.root.glob("pieces/*") if path.name.startswith(manifest.pieces[1].sha256)]
    os.utime(path, (long_ago, long_ago))
    put(store, draft_path, manifest, manifest.pieces[2], X)
    assert store.find(manifest.pieces[1]) is None


def test_what_arrives_from_one_is_not_added_to_by_another(
    store: LayerStore, draft_path: Path, manifest: Manifest
) -> None:
    piece = manifest.pieces[1]
    put(store, draft_path, manifest, piece, Y, share=0.5)
    with store.receiving(manifest, [piece], X) as receiving, receiving(piece) as partial:
        assert partial.size == 0
        partial.append(b"garbage")
        assert store.arrived(piece, Y) == piece.size // 2
        put(store, draft_path, manifest, piece, Y)  # though the other one has not ended
    assert store.find(piece) is not None


def test_a_device_brings_layers_of_so_many_models_at_most(store: LayerStore, manifest: Manifest) -> None:
    for number in range(MAX_MODELS):
        one = replace(manifest, fingerprint=f"{number:064x}")
        with store.receiving(one, one.pieces[1:2], X):
            pass
    with pytest.raises(StoreFull, match=f"of {MAX_MODELS} models"), store.receiving(manifest, manifest.pieces[:1], X):
        pass
    with store.receiving(manifest, manifest.pieces[:1], Y):
        pass


def test_damaged_records_are_none(store: LayerStore, draft_path: Path, manifest: Manifest) -> None:
    put(store, draft_path, manifest, manifest.pieces[1], Y)
    (store.root / "records.json").write_text("[" * 100_000)
    assert store.models() == []
    assert store.find(manifest.pieces[1]) is not None
    put(store, draft_path, manifest, manifest.pieces[1], Y)
    assert [(held.owner, held.pieces) for held in store.models()] == [(Y, manifest.pieces[1:2])]


def test_what_is_received_is_never_written_through_a_link(
    store: LayerStore, draft_path: Path, manifest: Manifest, tmp_path: Path
) -> None:
    precious, piece = tmp_path / "precious", manifest.pieces[1]
    precious.write_text("mine")
    put(store, draft_path, manifest, piece, X, share=0.5)
    (partial,) = store.root.glob("pieces/*.partial")
    partial.unlink()
    partial.symlink_to(precious)
    with pytest.raises(LayersRefused, match="cannot be used"):
        put(store, draft_path, manifest, piece, X)
    assert precious.read_text() == "mine"


def test_a_store_is_closed_to_other_users(store: LayerStore, draft_path: Path, manifest: Manifest) -> None:
    store.root.mkdir(mode=0o777)
    store.root.chmod(0o777)
    put(store, draft_path, manifest, manifest.pieces[1], X)
    folders = [store.root, *(path for path in store.root.rglob("*") if path.is_dir())]
    assert {oct(path.stat().st_mode & 0o777) for path in folders} == {"0o700"}
