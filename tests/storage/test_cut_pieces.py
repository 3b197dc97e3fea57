"""Pieces that are cut here for a stage: once, within the store's limit, and removed before those that were brought."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.engine import Model, ModelFile
from edgellm.engine.trial import probe
from edgellm.engine.trial.probe import LoadTrial, Probe
from edgellm.errors import LayersMissing, LayersRefused, ModelCorrupt, StoreFull
from edgellm.layer_range import LayerRange
from edgellm.storage.layers import store as layers
from edgellm.storage.layers.manifest import LayerPiece, known_pieces
from edgellm.storage.layers.store import CUT, LayerStore
from tests.storage.pieces import bytes_of, layerwise

X = "aa" * 32


def room_for(pieces: int, folder: Path, model: Path) -> LayerStore:
    return LayerStore(folder / "layers", pieces * layerwise(model).pieces[1].size)


def cut(store: LayerStore, model: Path, layer: int) -> LayerPiece:
    return store.cut(ModelFile.open(model), LayerRange(layer, layer + 1), layerwise(model).pieces[1].size)


def bring(store: LayerStore, model: Path, layer: int, owner: str) -> LayerPiece:
    manifest = layerwise(model)
    piece = manifest.pieces[layer]
    with store.receiving(manifest, [piece], owner) as receiving:
        if store.find(piece) is None:
            with receiving(piece) as partial:
                partial.append(bytes_of(model, manifest, piece))
                partial.finish()
    return piece


def test_what_is_cut_is_the_piece_that_others_are_sent(
    draft_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, piece = room_for(3, tmp_path, draft_path), layerwise(draft_path).pieces[2]
    assert cut(store, draft_path, 2) == piece
    assert (store.find(piece), store.size) == (store.root / "pieces" / f"{piece.sha256}.gguf", piece.size)
    assert [(held.owner, held.pieces) for held in store.models()] == [(CUT, (piece,))]
    monkeypatch.setattr(layers, "cut_piece", None)
    assert cut(store, draft_path, 2) == piece, "it is there, and not cut again"
    assert bring(store, draft_path, 2, X) == piece, "nor sent"
    assert store.clean(owner=X).pieces == 0, "it is not only theirs"
    assert store.clean(layerwise(draft_path).fingerprint).pieces == 1


@pytest.mark.parametrize("how", ["cut", "brought"])
def test_a_piece_is_tried_when_it_is_stored_and_not_at_a_cold_start(
    how: str, draft_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_PROBE", "on")
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    tried: list[Path] = []

    def trial(found: Probe, *_: object) -> LoadTrial:
        tried.extend(found.paths)
        return LoadTrial(new=True)

    monkeypatch.setattr(probe, "try_in_child", trial)
    store = room_for(3, tmp_path, draft_path)
    piece = cut(store, draft_path, 2) if how == "cut" else bring(store, draft_path, 2, X)
    path = store.find(piece)
    assert path is not None
    assert tried == [path]
    with Model.load(path) as model:
        assert model.n_layer == 1
    assert tried == [path]


def test_it_makes_room_first_and_takes_none_from_what_was_brought(draft_path: Path, tmp_path: Path) -> None:
    store = room_for(3, tmp_path, draft_path)
    theirs, oldest = bring(store, draft_path, 1, X), cut(store, draft_path, 2)
    newer = cut(store, draft_path, 3)
    for at, piece in enumerate((theirs, oldest, newer)):
        os.utime(store.root / "pieces" / f"{piece.sha256}.gguf", (at, at))
    os.utime(store.root / "pieces" / f"{theirs.sha256}.gguf")
    last = cut(store, draft_path, 4)
    assert [store.find(piece) is not None for piece in (theirs, oldest, newer, last)] == [True, False, True, True]
    with store.using([newer, last]), pytest.raises(StoreFull, match="no room for layer 6 of"):
        cut(store, draft_path, 5)
    os.utime(store.root / "pieces" / f"{theirs.sha256}.gguf", (1, 1))  # long ago, and still what was cut goes first
    bring(store, draft_path, 6, "bb" * 32)
    bring(store, draft_path, 5, "bb" * 32)
    assert [store.find(piece) is not None for piece in (theirs, newer, last)] == [True, False, False]
    assert store.size <= store.limit


def test_one_that_fails_leaves_nothing(draft_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = room_for(3, tmp_path, draft_path)

    def shorter(*_: object) -> Iterator[bytes]:
        yield b"x" * 1000
        raise ModelCorrupt("The file ends within a tensor.", "Leave it alone.")

    with monkeypatch.context() as patch:
        patch.setattr(layers, "cut_piece", shorter)
        with pytest.raises(ModelCorrupt):
            cut(store, draft_path, 1)
    assert list((store.root / "pieces").iterdir()) == []
    (store.root / "pieces" / "cut.half").write_bytes(b"by a process that was killed")
    assert cut(store, draft_path, 1) == layerwise(draft_path).pieces[1]
    with pytest.raises(LayersMissing):
        store.clean("0" * 64)


def test_what_the_disk_does_not_keep_gets_no_name(
    draft_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole piece is not checked against its hash again, so it is there for good before it gets its name."""
    store, known = room_for(3, tmp_path, draft_path), known_pieces(layerwise(draft_path).fingerprint)

    def broken(_file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(LayersRefused, match="Input/output error"):
            cut(store, draft_path, 0)
    assert not list(store.root.rglob("*.gguf"))
    assert known_pieces(layerwise(draft_path).fingerprint) == known
