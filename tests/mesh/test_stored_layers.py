"""Layers of a store for whoever loads them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.engine import Model, check_gguf
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import CutPoints, StoredLayers
from edgellm.storage.layers.manifest import LayerPiece, cut_piece, recipe_of
from edgellm.storage.layers.store import LayerStore, cut_layers

PLENTY = 10**9


def test_a_layer_that_is_loaded_stays(draft_path: Path, tmp_path: Path) -> None:
    store = LayerStore(tmp_path, PLENTY)
    recipe = cut_layers(draft_path, store, layers=LayerRange(2, 5))
    layers, model = StoredLayers(store), recipe.digest
    assert layers.held(model) == {2, 3, 4}
    assert layers.held("0" * 64) == frozenset()
    path = layers.find(model, LayerRange(3, 4))
    assert path is not None
    assert path == store.find(recipe.pieces[3])
    assert layers.find(model, LayerRange(3, 4)) == path
    assert layers.find(model, LayerRange(0, 1)) is None
    assert layers.find("0" * 64, LayerRange(3, 4)) is None
    assert store.clean().in_use == 1
    assert layers.held(model) == {3}
    layers.tidy([path])
    assert store.clean().in_use == 1
    layers.tidy([])
    assert store.clean().in_use == 0
    assert layers.find(model, LayerRange(3, 4)) is None


def test_small_layers_in_a_row_are_joined_and_what_they_are_made_of_stays(draft_path: Path, tmp_path: Path) -> None:
    store = LayerStore(tmp_path, PLENTY)
    recipe = cut_layers(draft_path, store, layers=LayerRange(2, 8))
    layers, model = StoredLayers(store), recipe.digest
    path = layers.find(model, LayerRange(3, 7))
    assert path is not None
    assert check_gguf(path).metadata["llama.block_count"] == 4
    assert layers.find(model, LayerRange(3, 7)) == path
    end = layers.find(model, LayerRange(6, 8))
    assert end is not None
    with Model.load(end) as loaded:  # with the head
        assert (loaded.n_layer, loaded.n_vocab) == (2, Model.load(draft_path, text_only=True).n_vocab)
    assert store.size == sum(path.stat().st_size for path in tmp_path.rglob("*.gguf"))
    assert store.clean().in_use == 7  # what is joined, and what of
    layers.tidy([])
    assert (store.clean().pieces, store.size) == (7, 0)


def test_where_there_is_no_room_to_join_layers_they_are_loaded_as_they_are(draft_path: Path, tmp_path: Path) -> None:
    store = LayerStore(tmp_path, PLENTY)
    recipe = cut_layers(draft_path, store, layers=LayerRange(2, 5))
    store.limit = store.size
    path = StoredLayers(store).find(recipe.digest, LayerRange(2, 5))
    assert path == store.find(recipe.pieces[2])
    assert store.size == store.limit


def test_pieces_end_where_those_of_other_plans_do(
    draft_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LayerStore(tmp_path, PLENTY)
    recipe = cut_layers(draft_path, store)
    size = sorted(piece.size for piece in recipe.pieces)[4]
    monkeypatch.setattr("edgellm.storage.layers.store.ENOUGH", 3 * size)
    layers, at, found = StoredLayers(store), 1, []
    while at < 8:
        path = layers.find(recipe.digest, LayerRange(at, 7))
        if path is None:
            break
        count = check_gguf(path).metadata["llama.block_count"]
        assert isinstance(count, int)
        found.append((at, at + count - 1))
        at += count
    assert found == [(1, 2), (3, 5), (6, 6)]


def test_pieces_of_several_layers_say_where_a_stage_may_begin_and_end(draft_path: Path, tmp_path: Path) -> None:
    store = LayerStore(tmp_path, PLENTY)
    single = recipe_of(draft_path)
    ends = [(0, 2), (3, 4), (5, 7)]
    pieces = []
    for first, last in ends:
        data = b"".join(bytes(portion) for portion in cut_piece(draft_path, 8, first, last))
        pieces.append(LayerPiece(first, last, len(data), hashlib.sha256(data).hexdigest()))
    recipe = replace(single, pieces=tuple(pieces))
    with store.receiving(recipe, pieces[:2]) as receiving:
        for piece in pieces[:2]:
            with receiving.piece(piece) as partial:
                for portion in cut_piece(draft_path, 8, piece.first, piece.last):
                    partial.append(portion)
                partial.finish()
    layers, model = StoredLayers(store), recipe.digest
    assert layers.held(model) == set(range(5))
    assert layers.bounds(model) == CutPoints(frozenset({0, 3}), frozenset({2, 4}))
    assert layers.find(model, LayerRange(0, 2)) is None
    assert layers.find(model, LayerRange(1, 5)) is None
    assert layers.find(model, LayerRange(0, 4)) == store.find(pieces[0])
    joined = layers.find(model, LayerRange(0, 5))
    assert joined is not None
    assert check_gguf(joined).metadata["llama.block_count"] == 5
