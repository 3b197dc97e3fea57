"""Layers of a store for whoever loads them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from edgellm.engine import Model, ModelFile, check_gguf
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import LayersMissing
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.weight_cache import WeightCache
from edgellm.storage.layers.manifest import pieces_of
from edgellm.storage.layers.store import LayerStore
from tests.storage.pieces import cut_layers

PLENTY = 10**9


def test_a_layer_that_is_loaded_stays(draft_path: Path, tmp_path: Path) -> None:
    store = LayerStore(tmp_path, PLENTY)
    pieces = [cut_layers(draft_path, store, LayerRange(at, at + 1)).pieces[0] for at in (2, 3, 4)]
    source, weights = StoredLayers(store), WeightCache(StoredLayers(store))
    found = source.open("0" * 64, pieces)
    assert found is not None
    assert (set(found.held), found.pieces) == ({2, 3, 4}, None)
    (file,) = found.files(LayerRange(3, 4))
    loaded = weights.acquire(file)
    assert weights.warm(found) == {3}
    assert store.clean().in_use == 1
    assert (rest := source.open("0" * 64, pieces)) is not None
    assert rest.held == {3}
    weights.give_back(loaded)
    assert weights.evict_unused(everything=True) == 1
    assert store.clean().in_use == 0
    assert source.open("0" * 64, pieces) is None
    with pytest.raises(LayersMissing):
        weights.acquire(file)
    assert weights.size == 0


def test_a_piece_counts_for_whoever_names_its_hash(draft_path: Path, tmp_path: Path) -> None:
    store = LayerStore(tmp_path, PLENTY)
    manifest = cut_layers(draft_path, store, LayerRange(2, 5))
    source = StoredLayers(store)
    assert source.open(manifest.fingerprint) is None
    assert source.open(manifest.fingerprint, pieces_of(ModelFile.open(draft_path), [LayerRange(2, 4)]).pieces) is None
    found = source.open(manifest.fingerprint, manifest.pieces)
    assert found is not None
    assert found.held == {2, 3, 4}


def test_pieces_of_several_cuts_make_up_a_stage_with_as_few_as_possible(draft_path: Path, tmp_path: Path) -> None:
    """A device was given single layers by one version, and pieces for two plans by the next."""
    store, source = LayerStore(tmp_path, PLENTY), StoredLayers(LayerStore(tmp_path, PLENTY))
    brought = [*[LayerRange(at, at + 1) for at in range(3)], LayerRange(0, 3), LayerRange(3, 6), LayerRange(2, 8)]
    for layers in brought:
        cut_layers(draft_path, store, layers)
    found = source.open("0" * 64, pieces_of(ModelFile.open(draft_path), brought).pieces)
    assert found is not None
    assert found.pieces == (LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 8))  # the latest, as far as none overlap
    assert found.held == set(range(8))
    for layers, files in (
        (LayerRange(0, 8), [LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 8)]),
        (LayerRange(0, 6), [LayerRange(0, 3), LayerRange(3, 6)]),
        (LayerRange(1, 3), [LayerRange(1, 2), LayerRange(2, 3)]),
        (LayerRange(4, 6), []),
        (LayerRange(0, 7), []),
    ):
        assert [file.layers for file in found.files(layers)] == files
    with ExitStack() as held:
        paths = [held.enter_context(file.using()) for file in found.files(LayerRange(0, 8))]
        assert [check_gguf(path).metadata["llama.block_count"] for path in paths] == [1, 1, 6]
        with Model.load(paths[-1]) as loaded:  # with the head
            assert loaded.n_vocab == Model.load(draft_path, TEXT_ONLY).n_vocab
        assert store.clean().in_use == 3
