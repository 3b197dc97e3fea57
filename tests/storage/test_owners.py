"""Pieces that several devices bring to one store, and those cut here: nobody removes or replaces another's."""

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.engine import Model, ModelFile
from edgellm.engine.trial import probe
from edgellm.engine.trial.probe import Probe, TrialOutcome
from edgellm.errors import LayersMissing, LayersRefused, ModelCorrupt, StoreFull
from edgellm.layer_range import LayerRange
from edgellm.state import MONTH
from edgellm.storage import layer_pieces
from edgellm.storage.layer_pieces import LayerPiece, Manifest, known_pieces
from edgellm.storage.layer_store import CUT, MAX_MODELS, LayerStore
from tests.storage.pieces import layerwise, part, put

X, Y = "aa" * 32, "bb" * 32


def test_a_device_removes_what_it_brought_alone(store: LayerStore, draft_path: Path, manifest: Manifest) -> None:
    mine, both, theirs = manifest.pieces[1:4]
    for owner, pieces in ((X, (mine, both)), (Y, (both, theirs))):
        put(store, draft_path, manifest, pieces, owner)
    assert [held.pieces for held in store.models(X)] == [(mine, both)]
    gone = store.clean(owner=X)
    assert (gone.pieces, gone.size, gone.in_use) == (1, mine.size, 0)
    assert store.models(X) == []
    assert [held.pieces for held in store.models(Y)] == [(both, theirs)]
    with pytest.raises(LayersMissing):
        store.clean(manifest.fingerprint, X)
    with store.using(both):
        assert store.clean(manifest.fingerprint, Y).in_use == 1
    assert [held.pieces for held in store.models(Y)] == [(both,)]
    assert store.clean(owner=Y).pieces == 1
    assert (store.models(), store.size) == ([], 0)


def test_the_user_of_the_device_removes_everything(store: LayerStore, draft_path: Path, manifest: Manifest) -> None:
    put(store, draft_path, manifest, [manifest.pieces[1]], X)
    put(store, draft_path, manifest, [manifest.pieces[2]], Y, share=0.5)
    assert store.clean().pieces == 2
    assert (store.models(), store.size) == ([], 0)


def test_room_is_made_at_nobody_elses_cost(draft_path: Path, manifest: Manifest, tmp_path: Path) -> None:
    one = manifest.pieces[1].size
    store = LayerStore(tmp_path / "small", 2 * one)
    put(store, draft_path, manifest, [manifest.pieces[1]], Y)
    put(store, draft_path, manifest, [manifest.pieces[2]], X)
    put(store, draft_path, manifest, [manifest.pieces[3]], X)  # X's own earlier piece makes room.
    assert [store.find(piece) is not None for piece in manifest.pieces[1:4]] == [True, False, True]
    with pytest.raises(StoreFull, match="belong to other devices"):
        store.reserve(part(manifest, *manifest.pieces[2:4]), X)
    assert store.find(manifest.pieces[1]) is not None
    long_ago = time.time() - MONTH - 1.0
    (path,) = [path for path in store.root.glob("pieces/*") if path.name.startswith(manifest.pieces[1].sha256)]
    os.utime(path, (long_ago, long_ago))
    put(store, draft_path, manifest, [manifest.pieces[2]], X)
    assert store.find(manifest.pieces[1]) is None


def test_what_arrives_from_one_gets_nothing_of_another(store: LayerStore, draft_path: Path, manifest: Manifest) -> None:
    piece = manifest.pieces[1]
    put(store, draft_path, manifest, [piece], Y, share=0.5)
    assert store.reserve(part(manifest, piece), X) == [0]
    assert store.append(piece, 0, b"garbage", X) == len(b"garbage")
    assert store.arrived(piece, Y) == piece.size // 2
    put(store, draft_path, manifest, [piece], Y)
    assert store.append(piece, 7, b"garbage", X) == piece.size  # whole meanwhile
    assert store.find(piece) is not None


def test_a_device_brings_layers_of_so_many_models_at_most(store: LayerStore, manifest: Manifest) -> None:
    for number in range(MAX_MODELS):
        one = replace(manifest, fingerprint=f"{number:064x}")
        store.reserve(part(one, one.pieces[1]), X)
    with pytest.raises(StoreFull, match=f"of {MAX_MODELS} models"):
        store.reserve(part(manifest, manifest.pieces[0]), X)
    store.reserve(part(manifest, manifest.pieces[0]), Y)


def test_damaged_records_are_none(store: LayerStore, draft_path: Path, manifest: Manifest) -> None:
    put(store, draft_path, manifest, [manifest.pieces[1]], Y)
    (store.root / "records.json").write_text("[" * 100_000)
    assert store.models() == []
    assert store.find(manifest.pieces[1]) is not None
    put(store, draft_path, manifest, [manifest.pieces[1]], Y)
    assert [(held.owner, held.pieces) for held in store.models()] == [(Y, manifest.pieces[1:2])]


def test_what_is_received_is_never_written_through_a_link(
    store: LayerStore, draft_path: Path, manifest: Manifest, tmp_path: Path
) -> None:
    precious, piece = tmp_path / "precious", manifest.pieces[1]
    precious.write_text("mine")
    put(store, draft_path, manifest, [piece], X, share=0.5)
    (partial,) = store.root.glob("pieces/*.partial")
    partial.unlink()
    partial.symlink_to(precious)
    with pytest.raises(LayersRefused, match="cannot be used"):
        put(store, draft_path, manifest, [piece], X)
    assert precious.read_text() == "mine"


def test_a_store_is_closed_to_other_users(store: LayerStore, draft_path: Path, manifest: Manifest) -> None:
    store.root.mkdir(mode=0o777)
    store.root.chmod(0o777)
    put(store, draft_path, manifest, manifest.pieces[1:2], X)
    folders = [store.root, *(path for path in store.root.rglob("*") if path.is_dir())]
    assert {oct(path.stat().st_mode & 0o777) for path in folders} == {"0o700"}


def room_for(pieces: int, folder: Path, model: Path) -> LayerStore:
    return LayerStore(folder / "layers", pieces * layerwise(model).pieces[1].size)


def cut(store: LayerStore, model: Path, layer: int) -> LayerPiece:
    return store.cut(ModelFile.open(model), LayerRange(layer, layer + 1), layerwise(model).pieces[1].size)


def bring(store: LayerStore, model: Path, layer: int, owner: str) -> LayerPiece:
    manifest = layerwise(model)
    put(store, model, manifest, [manifest.pieces[layer]], owner)
    return manifest.pieces[layer]


def test_what_is_cut_is_what_others_are_sent(draft_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, piece = room_for(3, tmp_path, draft_path), layerwise(draft_path).pieces[2]
    assert cut(store, draft_path, 2) == piece
    assert (store.find(piece), store.size) == (store.root / "pieces" / f"{piece.sha256}.gguf", piece.size)
    assert [(held.owner, held.pieces) for held in store.models()] == [(CUT, (piece,))]
    monkeypatch.setattr(layer_pieces, "cut_piece", None)
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

    def trial(found: Probe, *_: object) -> TrialOutcome:
        tried.extend(found.file.paths)
        return TrialOutcome()

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
    with store.using(newer), store.using(last), pytest.raises(StoreFull, match="no room for layer 6 of"):
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
        patch.setattr(layer_pieces, "cut_piece", shorter)
        with pytest.raises(ModelCorrupt):
            cut(store, draft_path, 1)
    assert list((store.root / "pieces").iterdir()) == []
    (store.root / "pieces" / "cut.half").write_bytes(b"by a process that was killed")
    assert cut(store, draft_path, 1) == layerwise(draft_path).pieces[1]
    with pytest.raises(LayersMissing):
        store.clean("0" * 64)


def test_what_no_disk_keeps_gets_no_name(draft_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
