"""Layers in memory: shared, warm for a while, given back."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.engine import check_gguf, costs_of
from edgellm.errors import LayersMissing, MemoryShort, ModelUnsupported
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import SeveralLayers, WholeModel
from edgellm.mesh.weight_cache import WeightCache, beside
from edgellm.storage.layers.store import LayerStore
from tests.mesh.folder import FolderLayers
from tests.mesh.household import Cut

PLENTY = 10**9


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_nobody_uses_goes_after_a_while(verifier_cut: Cut) -> None:
    clock, model = Clock(), verifier_cut.work.model
    shelf = WeightCache(verifier_cut.layers, keep=60.0, clock=clock)
    first, _ = (shelf.take(model, LayerRange(layer, layer + 1)) for layer in (0, 1))
    shelf.give(first)
    clock.now = 59.0
    assert shelf.tidy() == 0
    clock.now = 61.0
    assert shelf.tidy() == 1
    assert shelf.warm(model) == {1}


def test_room_is_made_by_what_was_used_longest_ago(verifier_cut: Cut) -> None:
    clock, model, layers = Clock(), verifier_cut.work.model, verifier_cut.layers
    one = layers.path(model, 5).stat().st_size
    shelf = WeightCache(layers, memory=3 * one, clock=clock)
    taken = {layer: shelf.take(model, LayerRange(layer, layer + 1)) for layer in (4, 5, 6)}
    for clock.now, layer in ((1.0, 6), (2.0, 4)):
        shelf.give(taken[layer])
    shelf.take(model, LayerRange(7, 8))
    assert shelf.warm(model) == {4, 5, 7}
    shelf.take(model, LayerRange(4, 5))
    with pytest.raises(MemoryShort, match=r"Layer 9 takes .* MB, and of"):
        shelf.take(model, LayerRange(8, 9))
    assert shelf.size <= 3 * one


def test_a_layer_is_loaded_once_for_all_who_want_it(verifier_cut: Cut) -> None:
    shelf, found = WeightCache(verifier_cut.layers), []
    threads = [
        threading.Thread(target=lambda: found.append(shelf.take(verifier_cut.work.model, LayerRange(2, 3))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1


def test_a_layer_that_cannot_be_loaded_can_be_tried_again(verifier_cut: Cut, tmp_path: Path) -> None:
    layers = FolderLayers(tmp_path)
    digest = layers.cut(verifier_cut.path, [0])
    whole = layers.path(digest, 0).read_bytes()
    layers.path(digest, 0).write_bytes(whole[:1000])
    shelf = WeightCache(layers)
    with pytest.raises(Exception, match=r"tensor|header|ends|short"):
        shelf.take(digest, LayerRange(0, 1))
    assert shelf.size == 0
    layers.path(digest, 0).write_bytes(whole)
    shelf.take(digest, LayerRange(0, 1))
    with pytest.raises(LayersMissing, match="Layer 2 is not"):
        shelf.take(digest, LayerRange(1, 2))


def test_layers_of_a_whole_model_are_cut_when_they_are_asked_for(verifier_cut: Cut, tmp_path: Path) -> None:
    folder = FolderLayers(tmp_path / "some")
    folder.cut(verifier_cut.path, [2])
    whole = WholeModel(verifier_cut.path, LayerStore(tmp_path / "all", PLENTY))
    both = SeveralLayers(folder, whole)
    model = verifier_cut.work.model
    assert folder.held(model) == {2}
    assert both.held(model) == frozenset(range(12))
    assert both.find(model, LayerRange(2, 6)) == folder.path(model, 2)
    path = both.find(model, LayerRange(3, 4))
    assert path is not None
    assert path.read_bytes() == verifier_cut.layers.path(model, 3).read_bytes()
    assert whole.find(model, LayerRange(12, 13)) is None
    assert whole.find("0" * 64, LayerRange(1, 2)) is None


def test_small_layers_go_together_up_to_the_end_of_the_stage(
    verifier_cut: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = verifier_cut.work.model
    path = WholeModel(verifier_cut.path, LayerStore(tmp_path, PLENTY)).find(model, LayerRange(3, 9))
    assert path is not None
    assert check_gguf(path).metadata["llama.block_count"] == 3  # and so the rest: what is loaded last is small
    monkeypatch.setattr("edgellm.storage.layers.store.ENOUGH", 4_000_000)  # a layer has 1.8 MB here
    whole = WholeModel(verifier_cut.path, LayerStore(tmp_path, PLENTY))
    for layer, count in ((3, 1), (4, 2), (6, 2), (8, 1)):  # they end at multiples, so that other stages use them, too
        path = whole.find(model, LayerRange(layer, 9))
        assert path is not None
        assert check_gguf(path).metadata["llama.block_count"] == count


def test_several_may_cut_the_same_piece_at_once(verifier_cut: Cut, tmp_path: Path) -> None:
    whole, found = WholeModel(verifier_cut.path, LayerStore(tmp_path, PLENTY)), []
    threads = [
        threading.Thread(target=lambda: found.append(whole.find(verifier_cut.work.model, LayerRange(0, 6))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert found[0] is not None
    assert check_gguf(found[0]).metadata["llama.block_count"] == 3
    assert list(found[0].parent.iterdir()) == [found[0]]


def test_a_file_is_in_use_until_it_is_no_longer_loaded(verifier_cut: Cut, tmp_path: Path) -> None:
    store, model, clock = LayerStore(tmp_path, PLENTY), verifier_cut.work.model, Clock()
    shelf = WeightCache(WholeModel(verifier_cut.path, store), keep=60.0, clock=clock)
    first, second = shelf.take(model, LayerRange(0, 1)), shelf.take(model, LayerRange(1, 2))
    shelf.give(first)
    assert store.clean().in_use == 2
    clock.now = 61.0
    shelf.tidy()
    assert (store.clean().in_use, len(store.made.files())) == (1, 1)
    shelf.give(second)
    shelf.tidy(everything=True)
    assert (store.clean().in_use, store.size) == (0, 0)


def test_an_architecture_that_depends_on_the_layer_is_refused_by_name(tmp_path: Path) -> None:
    from tests.engine.test_shard import arch

    path = tmp_path / "model.gguf"
    path.write_bytes(arch(b"gemma3"))
    with pytest.raises(ModelUnsupported, match="'gemma3' are not known to be safe"):
        WholeModel(path)


def test_caches_and_batches_count_before_anything_is_loaded(verifier_cut: Cut) -> None:
    layers, work = verifier_cut.layers, replace(verifier_cut.work, layers=LayerRange(2, 6))
    header = layers.header(work.model)
    assert header is not None
    pieces = [LayerRange(layer, layer + 1) for layer in range(2, 6)]
    weights = sum(layers.path(work.model, layer).stat().st_size for layer in range(2, 6))
    wanted = beside(costs_of(header), work, pieces)
    assert wanted > costs_of(header).cache(4, work.context, work.sessions)
    WeightCache(layers, memory=weights + wanted).reserve(work)
    shelf = WeightCache(layers, memory=weights + wanted - 1)
    with pytest.raises(MemoryShort, match=r"Layers 3-6 of .* take \d+ MB, and \d+ MB for 2 replies of 256 tokens; of"):
        shelf.reserve(work)
    assert shelf.left == weights + wanted - 1
    lease = shelf.reserve(replace(work, sessions=1))
    assert shelf.left == weights + wanted - 1 - lease.size
    lease.close()
    lease.close()
    assert shelf.left == weights + wanted - 1
    assert WeightCache(layers).reserve(work).size == 0  # no limit


def test_what_is_reserved_leaves_less_for_weights(verifier_cut: Cut) -> None:
    layers, model = verifier_cut.layers, verifier_cut.work.model
    one = layers.path(model, 5).stat().st_size
    work = replace(verifier_cut.work, layers=LayerRange(4, 5))
    header = layers.header(model)
    assert header is not None
    wanted = beside(costs_of(header), work, [LayerRange(4, 5)])
    shelf = WeightCache(layers, memory=one + wanted)
    lease = shelf.reserve(work)
    shelf.take(model, LayerRange(4, 5))
    with pytest.raises(MemoryShort, match=r"\d+ MB of them for caches"):
        shelf.take(model, LayerRange(5, 6))
    lease.close()
    if wanted > one:
        shelf.take(model, LayerRange(5, 6))


def test_the_memory_of_a_stage_that_ends_is_waited_for(verifier_cut: Cut) -> None:
    layers, work = verifier_cut.layers, replace(verifier_cut.work, layers=LayerRange(2, 6))
    roomy = WeightCache(layers, memory=10**9)
    weights = sum(layers.path(work.model, layer).stat().st_size for layer in range(2, 6))
    shelf = WeightCache(layers, memory=weights + roomy.reserve(work).size)
    lease = shelf.reserve(work)
    ended = threading.Timer(0.1, lease.close)
    ended.start()
    assert shelf.reserve(work).size > 0
    ended.join()
