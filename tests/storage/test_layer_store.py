"""The store of layers: pieces of a real model, by hash, within bounds, and never half of one taken for whole."""

import errno
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import cycle, islice, pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import ModelFile, check_gguf, cut
from edgellm.errors import DiskFull, InvalidOption, LayersMissing, LayersRefused
from edgellm.layer_range import LayerRange
from edgellm.state import from_json
from edgellm.storage import layer_pieces
from edgellm.storage import layer_store as layers
from edgellm.storage.layer_pieces import MAX_PIECES, LayerPiece, Manifest, grid_lines, manifest_of, pieces_of
from edgellm.storage.layer_store import LayerStore
from testkit.gguf.split_file import split
from tests.conftest import Architectures
from tests.storage.pieces import bytes_of, cut_singly, layerwise, part

PLENTY = 10**9


def put_bytes(store: LayerStore, manifest: Manifest, piece: LayerPiece, data: bytes) -> None:
    store.reserve(part(manifest, piece))
    store.append(piece, 0, data)


def test_a_piece_is_the_file_that_cut_writes(draft_path: Path, manifest: Manifest, tmp_path: Path) -> None:
    assert (manifest.layers, len(manifest.pieces)) == (8, 8)
    for piece in (manifest.pieces[0], manifest.pieces[3], manifest.pieces[-1]):
        file = tmp_path / "piece.gguf"
        cut(draft_path, file, piece.first, piece.last, head=piece.last == 7)
        assert hashlib.sha256(file.read_bytes()).hexdigest() == piece.sha256
        assert file.stat().st_size == piece.size


def test_hashes_are_kept_until_forgotten(draft_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile.open(draft_path)
    assert from_json(Manifest, as_json(manifest)) == manifest
    with monkeypatch.context() as patch:
        patch.setattr("edgellm.storage.layer_pieces.cut_piece", None)
        assert layerwise(draft_path) == manifest
        layer_pieces.forget_hashes(manifest.fingerprint)
        with pytest.raises(TypeError):
            layerwise(draft_path)
    shares: list[float] = []
    assert pieces_of(file, [piece.layers for piece in manifest.pieces], shares.append) == manifest
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    several = pieces_of(file, [LayerRange(3, 5)])
    assert set(layer_pieces.known_pieces(manifest.fingerprint)) == {*manifest.pieces, *several.pieces}
    for strange in (LayerRange(7, 9), LayerRange(-1, 2), LayerRange(3, 3)):
        with pytest.raises(InvalidOption, match="from 1 to 8"):
            pieces_of(file, [strange])


@given(st.sets(st.integers(1, 59), max_size=30), st.integers(1, 20))
def test_pieces_begin_only_where_a_model_can_be_cut(further: set[int], per_piece: int) -> None:
    points = sorted({0, *further})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("check_cuttable", 60), ("cut_points", points), ("layers_per_piece", per_piece)):
            patch.setattr(f"edgellm.storage.layer_pieces.{name}", lambda _header, value=value: value)
        lines = grid_lines(cast("Any", None))
    assert set(lines) <= set(points)
    for line, after in pairwise(lines):
        assert after - line <= per_piece or points[points.index(line) + 1] == after
    for first, second, third in zip(lines, lines[1:], lines[2:], strict=False):
        assert third - first > per_piece or second - first > per_piece


def test_stages_of_layers_that_differ_by_number(architectures: Architectures, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile.open(architectures("smollm3 of 8 layers"))
    for per_piece, expected in ((1, [LayerRange(0, 4), LayerRange(4, 8)]), (8, [LayerRange(0, 8)])):
        monkeypatch.setattr("edgellm.storage.layer_pieces.layers_per_piece", lambda _, most=per_piece: most)
        assert [piece.layers for piece in manifest_of(file).pieces] == expected
    for one in (LayerRange(0, 3), LayerRange(3, 8), LayerRange(4, 7)):
        with pytest.raises(InvalidOption, match=r"differ by their number.*one of these layers: 1, 5"):
            manifest_of(file, [one])


def test_a_stage_is_cut_into_pieces_of_about_a_size(draft_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [piece.layers for piece in manifest_of(ModelFile.open(draft_path)).pieces] == [LayerRange(0, 8)]
    stages = [LayerRange(0, 5), LayerRange(5, 8)]
    assert [piece.layers for piece in manifest_of(ModelFile.open(draft_path), stages).pieces] == stages
    size = sum(tensor.nbytes for tensor in check_gguf(draft_path).tensors if tensor.name.startswith("blk."))
    for count, cut_at in ((3, ["1-3", "4-5", "6", "7-8"]), (0.1, ["1", "2", "3", "4", "5", "6", "7", "8"])):
        monkeypatch.setattr("edgellm.storage.layer_pieces.PIECE_BYTES", size / 8 * (count + 0.5))
        assert [str(piece.layers) for piece in manifest_of(ModelFile.open(draft_path), stages).pieces] == cut_at


def test_what_has_arrived_is_gone_on_with(draft_path: Path, store: LayerStore, manifest: Manifest) -> None:
    piece = manifest.pieces[1]
    data = bytes_of(draft_path, piece)
    with pytest.raises(LayersMissing, match="No room is set aside"):
        store.append(piece, 0, data[:1000])
    store.reserve(part(manifest, piece))
    store.append(piece, 0, data[:1000])
    again = LayerStore(store.root, PLENTY)
    assert again.arrived(piece) == 1000
    assert again.models()[0].arriving == 1000
    with pytest.raises(LayersMissing), again.using(piece):
        pass
    assert again.reserve(part(manifest, piece)) == [1000]
    for offset in (999, 1001):
        assert again.append(piece, offset, data[offset:2000]) == 1000
    assert again.append(piece, 1000, data[1000:]) == again.arrived(piece) == piece.size
    with again.using(piece) as path:
        assert path.read_bytes() == data
    assert not list(store.root.rglob("*.partial"))


def test_what_is_not_what_was_announced_is_never_whole(draft_path: Path, store: LayerStore, manifest: Manifest) -> None:
    piece = manifest.pieces[1]
    data = bytes_of(draft_path, piece)
    for lie, said in ((data[:-1] + bytes([data[-1] ^ 1]), "SHA-256 differs"), (data + b"x", "more arrive")):
        with pytest.raises(LayersRefused, match=said):
            put_bytes(store, manifest, piece, lie)
        assert store.find(piece) is None


def _two_layers(model: Path, folder: Path) -> bytes:
    cut(model, folder / "two.gguf", 1, 2, head=False)
    return (folder / "two.gguf").read_bytes()


def _one_part(model: Path, folder: Path) -> bytes:
    cut(model, folder / "one.gguf", 1, 1, head=False)
    return split(folder / "one.gguf", folder, 2).read_bytes()


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda *_: b"x" * 100, "is not a model"),
        (_two_layers, "layer 2 has 2 layers"),
        (_one_part, "is not a model: .* is one of 2 parts"),
    ],
)
def test_what_is_announced_and_no_layer_is_never_whole(
    draft_path: Path, store: LayerStore, manifest: Manifest, lie: Callable[[Path, Path], bytes], said: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    data = lie(draft_path, tmp_path)
    piece = replace(manifest.pieces[1], size=len(data), sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(LayersRefused, match=said):
        put_bytes(store, replace(manifest, pieces=(piece,)), piece, data)
    assert (store.find(piece), store.arrived(piece)) == (None, 0)


def test_a_piece_of_another_length_is_not_whole(draft_path: Path, store: LayerStore, manifest: Manifest) -> None:
    piece = manifest.pieces[2]
    cut_singly(draft_path, store, layers=piece.layers)
    (path,) = store.root.glob("pieces/*.gguf")
    path.write_bytes(path.read_bytes()[:-1])
    assert store.find(piece) is None
    cut_singly(draft_path, store, layers=piece.layers)
    assert store.find(piece) == path


def test_the_least_used_go_first_none_in_use_or_wanted(draft_path: Path, manifest: Manifest, tmp_path: Path) -> None:
    one = manifest.pieces[1].size  # as large as all but the first and the last
    store = LayerStore(tmp_path / "small", 3 * one)
    cut_singly(draft_path, store, layers=LayerRange(1, 2))
    cut_singly(draft_path, store, layers=LayerRange(2, 3))
    cut_singly(draft_path, store, layers=LayerRange(3, 4))
    with store.using(manifest.pieces[1]):  # used again, so that layer 2 is now the oldest
        pass
    cut_singly(draft_path, store, layers=LayerRange(4, 5))
    assert [store.find(piece) is not None for piece in manifest.pieces[1:5]] == [True, False, True, True]
    with store.using(manifest.pieces[1]), store.using(manifest.pieces[3]), store.using(manifest.pieces[4]):
        with pytest.raises(LayersRefused, match="in use"):
            cut_singly(draft_path, store, layers=LayerRange(2, 3))
        assert store.clean().in_use == 3
    cut_singly(draft_path, store, layers=LayerRange(2, 4))
    assert [store.find(piece) is not None for piece in manifest.pieces[1:5]] == [False, True, True, True]
    with pytest.raises(LayersRefused, match="limit"):
        cut_singly(draft_path, store, layers=LayerRange(1, 5))
    assert store.size == 3 * one


def test_pieces_used_in_a_millisecond_are_kept_in_order(draft_path: Path, manifest: Manifest, tmp_path: Path) -> None:
    store, pieces = LayerStore(tmp_path / "layers", PLENTY), list(manifest.pieces[1:4])
    for piece in pieces:
        cut_singly(draft_path, store, layers=piece.layers)
    for order in islice(cycle(permutations(pieces)), 60):
        for piece in order:
            with store.using(piece):
                pass
        assert store.complete(pieces) == list(reversed(order))


def test_room_is_set_aside_for_what_is_arriving(draft_path: Path, manifest: Manifest, tmp_path: Path) -> None:
    one = manifest.pieces[1].size
    store = LayerStore(tmp_path / "small", 2 * one)
    store.reserve(part(manifest, *manifest.pieces[1:3]))
    assert store.size == 2 * one
    cut_singly(draft_path, store, layers=LayerRange(3, 4))  # of what the same owner has announced, the oldest goes
    assert store.size == 2 * one


def test_a_full_disk_is_said_before_and_in_the_middle(
    draft_path: Path, store: LayerStore, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = manifest.pieces[1]
    data = bytes_of(draft_path, piece)
    store.reserve(part(manifest, piece))
    store.append(piece, 0, data[:500])

    class Full(io.BufferedRandom):
        def write(self, some: Any) -> int:
            super().write(bytes(some[:100]))
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", lambda handle, _mode: Full(io.FileIO(handle, "r+")))
        with pytest.raises(DiskFull, match="is full"):
            store.append(piece, 500, data[500:])
    assert store.arrived(piece) == 600
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=layers.RESERVED_BYTES))
    with pytest.raises(DiskFull, match="too full"):
        cut_singly(draft_path, store, layers=piece.layers)
    assert store.arrived(piece) == 600


def test_a_store_that_cannot_be_used_says_so(draft_path: Path, manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LayersRefused, match="cannot be used"):
        cut_singly(draft_path, LayerStore(tmp_path / "file", PLENTY))
    store, piece = LayerStore(tmp_path / "layers", PLENTY), manifest.pieces[1]
    store.reserve(part(manifest, piece))
    (partial,) = store.root.glob("pieces/*.partial")
    partial.unlink()
    partial.mkdir()
    with pytest.raises(LayersRefused, match="cannot be used"):
        store.append(piece, 0, b"x")


def test_layers_come_and_go(draft_path: Path, verifier_path: Path, store: LayerStore, manifest: Manifest) -> None:
    other = cut_singly(verifier_path, store, layers=LayerRange(0, 2))
    cut_singly(draft_path, store, layers=LayerRange(5, 6))
    assert [held.manifest.name for held in store.models()] == [manifest.name, other.name]
    with pytest.raises(LayersMissing):
        store.clean("0" * 64)
    gone = store.clean(manifest.fingerprint)
    assert (gone.pieces, gone.size, gone.in_use) == (1, manifest.pieces[5].size, 0)
    assert [held.manifest.pieces for held in store.models()] == [other.pieces[:2]]
    assert store.clean().pieces == 2
    assert (store.models(), store.size) == ([], 0)


def as_json(manifest: Manifest) -> dict[str, Any]:
    return dict(json.loads(json.dumps(asdict(manifest))))


def test_manifests_that_cannot_be_meant_are_refused(manifest: Manifest) -> None:
    pieces = as_json(manifest)["pieces"]
    lies: tuple[dict[str, Any], ...] = (
        {"fingerprint": "../../etc"}, {"fingerprint": "A" * 64}, {"name": ""}, {"name": "a\x1b[2J"},
        {"name": "x" * 201}, {"architecture": "../x"}, {"layers": 7}, {"layers": "many"}, {"pieces": [pieces[0]] * 2},
        {"pieces": pieces[::-1]}, {"pieces": []}, {"pieces": 5},
        {"pieces": [pieces[0] | {"sha256": f"{at:064x}"} for at in range(MAX_PIECES + 1)]},
        *({"pieces": [pieces[0] | {field: value}, *pieces[1:]]} for field, value in (
            ("size", 0), ("size", -1), ("sha256", "../" + "a" * 61), ("first", -1), ("last", 8))),
    )  # fmt: skip
    for changes in lies:
        with pytest.raises((LayersRefused, TypeError)):
            from_json(Manifest, as_json(manifest) | changes)
    with pytest.raises(InvalidOption, match="limit"):
        LayerStore(limit=0)
