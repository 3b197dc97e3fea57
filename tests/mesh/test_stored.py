"""Layers of a store for whoever loads them."""

from __future__ import annotations

from pathlib import Path

from edgellm.mesh.stored import StoredLayers
from edgellm.store.layers import LayerStore, cut_layers


def test_a_layer_that_is_loaded_stays(draft_path: Path, tmp_path: Path) -> None:
    store = LayerStore(tmp_path, 10**9)
    recipe = cut_layers(draft_path, store, layers=(2, 4))
    layers, model = StoredLayers(store), recipe.fingerprint
    assert layers.held(model) == {2, 3, 4}
    assert layers.held("0" * 64) == frozenset()
    path = layers.find(model, 3, 3)
    assert path == store.find(recipe.pieces[3])
    assert layers.find(model, 3, 3) == path
    assert layers.find(model, 0, 0) is None
    assert layers.find("0" * 64, 3, 3) is None
    assert store.clean().in_use == 1
    assert layers.held(model) == {3}
    layers.tidy(lambda _model: frozenset({3}))
    assert store.clean().in_use == 1
    layers.tidy(lambda _model: frozenset())
    assert store.clean().in_use == 0
    assert layers.find(model, 3, 3) is None
