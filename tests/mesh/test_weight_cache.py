"""Layers in memory, from a model or a store: shared, warm for a while, given back; and what computes them."""

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm import system
from edgellm.engine import Model, ModelFile, check_gguf
from edgellm.engine.hardware import ALL_LAYERS, ComputeDevice, Hardware
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import InvalidOption, LayersMissing, MemoryShort
from edgellm.layer_range import LayerRange
from edgellm.mesh import weight_cache
from edgellm.mesh.layer_costs import costs_of
from edgellm.mesh.layer_sources import ModelLayers, SeveralSources, StoredLayers, WholeModel, require
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache, overhead
from edgellm.storage.layer_pieces import forget_hashes, pieces_of
from edgellm.storage.layer_store import LayerStore
from tests.mesh.folder import FolderLayers, needed, reserve, take, warm
from tests.mesh.household import Cut
from tests.storage.pieces import cut_layers

PLENTY = 10**9


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_nobody_uses_goes_after_a_while(verifier_cut: Cut) -> None:
    clock, model = Clock(), verifier_cut.work.model
    cache = WeightCache(verifier_cut.layers, keep=60.0, clock=clock)
    (_, first), _ = (take(cache, model, layer) for layer in (0, 1))
    first.close()
    clock.now = 59.0
    assert cache.evict_unused() == 0
    clock.now = 61.0
    assert cache.evict_unused() == 1
    assert warm(cache, model) == {1}


def test_room_is_made_by_what_was_used_longest_ago(verifier_cut: Cut) -> None:
    clock, model, layers = Clock(), verifier_cut.work.model, verifier_cut.layers
    one = layers.path(model, 5).stat().st_size
    cache = WeightCache(layers, memory=3 * one, clock=clock)
    taken = {layer: take(cache, model, layer) for layer in (4, 5, 6)}
    for clock.now, layer in ((1.0, 6), (2.0, 4)):
        taken[layer][1].close()
    take(cache, model, 7)
    assert warm(cache, model) == {4, 5, 7}
    take(cache, model, 4)
    with pytest.raises(MemoryShort, match=r"Layer 8 takes .* MB are left"):
        take(cache, model, 8)
    assert cache.size <= 3 * one


def test_a_layer_is_loaded_once_for_all_who_want_it(verifier_cut: Cut) -> None:
    cache, found = WeightCache(verifier_cut.layers), []
    threads = [threading.Thread(target=lambda: found.append(take(cache, verifier_cut.work.model, 2))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({id(model) for model, _ in found}) == 1


def test_a_layer_that_cannot_be_loaded_can_be_tried_again(verifier_cut: Cut, tmp_path: Path) -> None:
    layers = FolderLayers(tmp_path)
    digest = layers.cut(verifier_cut.path, [0])
    whole = layers.path(digest, 0).read_bytes()
    layers.path(digest, 0).write_bytes(whole[:1000])
    cache = WeightCache(layers)
    with pytest.raises(Exception, match=r"tensor|header|ends|short"):
        take(cache, digest, 0)
    assert cache.size == 0
    layers.path(digest, 0).write_bytes(whole)
    take(cache, digest, 0)
    with pytest.raises(LayersMissing, match="Layer 2 of"):
        require(layers, replace(verifier_cut.work, layers=LayerRange(0, 2)))


def paths(model: ModelLayers, layers: LayerRange) -> list[Path]:
    with ExitStack() as held:
        return [held.enter_context(file.using()) for file in model.files(layers)]


def test_layers_of_a_whole_model_are_cut_when_they_are_asked_for(verifier_cut: Cut, tmp_path: Path) -> None:
    whole = WholeModel(ModelFile.open(verifier_cut.path), LayerStore(tmp_path / "all", PLENTY))
    both, model = SeveralSources(FolderLayers(tmp_path / "none"), whole), verifier_cut.work.model
    assert both.open(model) is whole.layers
    assert both.open("0" * 64) is None
    assert (whole.layers.held, whole.layers.pieces) == (frozenset(range(12)), None)
    (path,) = paths(whole.layers, LayerRange(3, 4))
    assert path.read_bytes() == verifier_cut.layers.path(model, 3).read_bytes()
    assert paths(whole.layers, LayerRange(3, 4)) == [path]
    assert whole.layers.files(LayerRange(12, 13)) == []


def test_a_stages_small_layers_go_together(verifier_cut: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def counts(layers: LayerRange) -> list[object]:
        whole = WholeModel(ModelFile.open(verifier_cut.path), LayerStore(tmp_path, PLENTY))
        return [check_gguf(path).metadata["llama.block_count"] for path in paths(whole.layers, layers)]

    assert counts(LayerRange(3, 9)) == [6]
    monkeypatch.setattr("edgellm.storage.layer_pieces.PIECE_BYTES", 4_000_000)  # a layer has 1.8 MB here
    assert counts(LayerRange(3, 9)) == [1, 2, 2, 1]  # they end at multiples, so that other stages use them, too


def test_what_others_say_was_brought_costs_no_endless_reading(verifier_cut: Cut, tmp_path: Path) -> None:
    whole = WholeModel(ModelFile.open(verifier_cut.path), LayerStore(tmp_path, PLENTY))
    forget_hashes(whole.model)
    assert whole.own_pieces([LayerRange(12, 13), LayerRange(5, 5), LayerRange(-1, 3), LayerRange(9, 30)]) == ()
    every = [LayerRange(start, stop) for start in range(12) for stop in range(start + 1, 13)]
    found = whole.own_pieces(every)
    assert sum(len(piece.layers) for piece in found) <= 4 * 12
    assert found == pieces_of(ModelFile.open(verifier_cut.path), [piece.layers for piece in found]).pieces
    assert set(found) < set(whole.own_pieces(every)), "asked again, it goes on"


def test_a_file_is_in_use_until_it_is_no_longer_loaded(verifier_cut: Cut, tmp_path: Path) -> None:
    store, model, clock = LayerStore(tmp_path, PLENTY), verifier_cut.work.model, Clock()
    cache = WeightCache(WholeModel(ModelFile.open(verifier_cut.path), store), keep=60.0, clock=clock)
    first, second = (take(cache, model, layer)[1] for layer in (0, 1))
    first.close()
    assert store.clean().in_use == 2
    clock.now = 61.0
    cache.evict_unused()
    assert (store.clean().in_use, len(store.pieces(model))) == (1, 1)
    second.close()
    cache.evict_unused(everything=True)
    assert (store.clean().in_use, store.size) == (0, 0)


def test_caches_and_batches_count_before_anything_is_loaded(verifier_cut: Cut) -> None:
    layers, work = verifier_cut.layers, replace(verifier_cut.work, layers=LayerRange(2, 6))
    header = check_gguf(layers.path(work.model, 2))
    pieces = [LayerRange(layer, layer + 1) for layer in range(2, 6)]
    weights = sum(layers.path(work.model, layer).stat().st_size for layer in range(2, 6))
    wanted = overhead(costs_of(header), work, pieces)
    assert wanted > costs_of(header).cache(4, work.context, work.sessions)
    reserve(WeightCache(layers, memory=weights + wanted), work)
    cache = WeightCache(layers, memory=weights + wanted - 1)
    with pytest.raises(
        MemoryShort, match=r"Layers 3-6 of .* take \d+ MB, and \d+ MB for 2 replies of 256 tokens, and \d+ MB are left"
    ):
        reserve(cache, work)
    assert cache.available() == weights + wanted - 1
    reservation = reserve(cache, replace(work, sessions=1))
    assert cache.available() == weights + wanted - 1 - overhead(costs_of(header), replace(work, sessions=1), pieces)
    reservation.close()
    assert cache.available() == weights + wanted - 1
    assert reserve(WeightCache(layers), work)  # no limit


def test_what_is_loaded_counts_as_available(verifier_cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is needed for other layers; but no more than the limit."""
    monkeypatch.setattr("edgellm.mesh.weight_cache.free_memory", lambda: 5_000_000)
    free, limited = WeightCache(verifier_cut.layers), WeightCache(verifier_cut.layers, memory=5_000_000)
    assert free.available() == 5_000_000
    for cache in (free, limited):
        take(cache, verifier_cut.work.model, 5)
    assert free.available() == 5_000_000 + free.size
    assert limited.available() == 5_000_000


def test_the_memory_of_a_stage_that_ends_is_waited_for(verifier_cut: Cut) -> None:
    layers, work = verifier_cut.layers, replace(verifier_cut.work, layers=LayerRange(2, 6))
    cache = WeightCache(layers, memory=needed(layers, work))
    reservation = reserve(cache, work)
    ended = threading.Timer(0.1, reservation.close)
    ended.start()
    reserve(cache, work)
    ended.join()


GB = 10**9
CARD = ComputeDevice("CUDA0", "a card", "gpu", 8 * GB, 10 * GB)
SECOND = ComputeDevice("CUDA1", "another card", "gpu", 4 * GB, 4 * GB)
SHARED = ComputeDevice("Vulkan0", "an integrated card", "igpu", 100 * GB, 100 * GB)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[ComputeDevice]:
    found: list[ComputeDevice] = []
    monkeypatch.setattr(
        weight_cache, "offload_devices", lambda names: [card for card in found if not names or card.name in names]
    )
    monkeypatch.setattr(weight_cache, "free_memory", lambda: 50 * GB)
    return found


def test_without_a_card_the_processor_computes(cards: list[ComputeDevice]) -> None:
    found = ComputeUnit.choose(Hardware(threads=2))
    assert (found.name, found.hardware) == ("", Hardware(gpu_layers=0, threads=2))
    assert "finds no graphics card" in found.reason
    assert found.available() == 50 * GB
    assert found.description
    with pytest.raises(InvalidOption, match="finds no graphics card"):
        ComputeUnit.choose(Hardware(gpu_layers=ALL_LAYERS))


def test_cards_compute_unless_that_is_not_wanted(cards: list[ComputeDevice]) -> None:
    cards += [CARD, SHARED, SECOND]
    for layers in (None, ALL_LAYERS):
        found = ComputeUnit.choose(Hardware(gpu_layers=layers, cache_type="q8_0"))
        assert found.name == "CUDA0/CUDA1"  # as llama.cpp does, without the integrated one
        assert found.hardware == Hardware(ALL_LAYERS, ("CUDA0", "CUDA1"), cache_type="q8_0")
        assert found.description == "a card and another card"
    assert found.available() == 12 * GB - 2 * 512 * 2**20
    named = ComputeUnit.choose(Hardware(devices=("CUDA1",)))
    assert (named.name, named.reason) == ("CUDA1", "--device names it")
    assert ComputeUnit.choose(Hardware(gpu_layers=0)).name == ""
    with pytest.raises(InvalidOption, match="--gpu-layers is 3"):
        ComputeUnit.choose(Hardware(gpu_layers=3))


def test_a_card_that_shares_the_memory_has_no_more_than_there_is(cards: list[ComputeDevice]) -> None:
    cards.append(SHARED)
    found = ComputeUnit.choose(Hardware())
    assert found.name == "Vulkan0"
    assert found.available() == 50 * GB
    cards[:] = [ComputeDevice("RPC0", "a card that does not say", "gpu", 0, 0)]
    assert ComputeUnit.choose(Hardware()).available() == 50 * GB


def test_a_tenth_of_the_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "available_memory", lambda: (10 * GB, "the machine's free memory"))
    assert ComputeUnit().available() == 9 * GB


def test_a_layer_that_is_loaded_stays(draft_path: Path, tmp_path: Path) -> None:
    store = LayerStore(tmp_path, PLENTY)
    pieces = [cut_layers(draft_path, store, LayerRange(at, at + 1)).pieces[0] for at in (2, 3, 4)]
    source, weights = StoredLayers(store), WeightCache(StoredLayers(store))
    found = source.open("0" * 64, pieces)
    assert found is not None
    assert (set(found.held), found.pieces) == ({2, 3, 4}, None)
    (file,) = found.files(LayerRange(3, 4))
    reserved = weights.reserve_bytes(0, "A layer", [file])
    weights.acquire(file)
    assert weights.warm(found) == {3}
    assert store.clean().in_use == 1
    assert (rest := source.open("0" * 64, pieces)) is not None
    assert rest.held == {3}
    reserved.close()
    assert weights.evict_unused(everything=True) == 1
    assert store.clean().in_use == 0
    assert source.open("0" * 64, pieces) is None
    with pytest.raises(LayersMissing):
        weights.acquire(file)
    assert weights.size == 0


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
