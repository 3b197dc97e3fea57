"""The store of layers: pieces of a real model, by hash, within bounds, and never half of one taken for whole."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine import check_gguf, cut
from edgellm.errors import DiskFull, InvalidOption, LayersMissing, LayersRefused
from edgellm.layer_range import LayerRange
from edgellm.storage.layers import store as layers
from edgellm.storage.layers.manifest import cut_piece, forget_recipe, recipe_of
from edgellm.storage.layers.store import LayerPiece, LayerStore, Recipe, cut_layers

PLENTY = 10**9


@pytest.fixture(scope="module")
def recipe(draft_path: Path) -> Recipe:
    return recipe_of(draft_path)


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers", PLENTY)


def bytes_of(model: Path, recipe: Recipe, piece: LayerPiece) -> bytes:
    return b"".join(bytes(portion) for portion in cut_piece(model, recipe.layers, piece.first, piece.last))


def put(store: LayerStore, recipe: Recipe, piece: LayerPiece, data: bytes) -> None:
    with store.receiving(recipe, [piece]) as receiving, receiving.piece(piece) as partial:
        partial.append(data[partial.size :])
        partial.finish()


def test_a_piece_is_the_file_that_cut_writes(draft_path: Path, recipe: Recipe, tmp_path: Path) -> None:
    assert (recipe.layers, len(recipe.pieces)) == (8, 8)
    for piece in (recipe.pieces[0], recipe.pieces[3], recipe.pieces[-1]):
        file = tmp_path / "piece.gguf"
        cut(draft_path, file, piece.first, piece.last, head=piece.last == 7)
        assert hashlib.sha256(file.read_bytes()).hexdigest() == piece.sha256
        assert file.stat().st_size == piece.size


def test_a_recipe_is_remembered_until_it_is_forgotten(
    draft_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Recipe.from_json(recipe.to_json()) == recipe
    with monkeypatch.context() as patch:
        patch.setattr("edgellm.storage.layers.manifest.cut_piece", None)
        assert recipe_of(draft_path) == recipe
        forget_recipe(recipe)
        with pytest.raises(TypeError):
            recipe_of(draft_path)
    shares: list[float] = []
    assert recipe_of(draft_path, shares.append) == recipe
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_layers_are_cut_into_a_store_once(
    draft_path: Path, store: LayerStore, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    assert cut_layers(draft_path, store, shares.append, LayerRange(2, 6)) == recipe
    assert shares[-1] == 1.0
    assert [store.find(piece) is not None for piece in recipe.pieces] == [2 <= i <= 5 for i in range(8)]
    (held,) = store.models()
    assert [piece.first for piece in held.pieces] == [2, 3, 4, 5]
    assert held.size == store.size
    made: list[int] = []

    def watched(model: Path, count: int, first: int, last: int) -> Iterator[Any]:
        made.append(first)
        return cut_piece(model, count, first, last)

    monkeypatch.setattr(layers, "cut_piece", watched)
    cut_layers(draft_path, store, layers=LayerRange(4, 8))
    assert made == [6, 7]
    with store.using(recipe.pieces[2:]) as paths:
        assert [check_gguf(path).metadata["llama.block_count"] for path in paths] == [1] * 6
    with pytest.raises(InvalidOption, match="from 1 to 8"):
        cut_layers(draft_path, store, layers=LayerRange(4, 9))


def test_what_has_arrived_is_gone_on_with(draft_path: Path, store: LayerStore, recipe: Recipe) -> None:
    piece = recipe.pieces[1]
    data = bytes_of(draft_path, recipe, piece)
    with store.receiving(recipe, [piece]) as receiving, receiving.piece(piece) as partial:
        partial.append(data[:1000])
    again = LayerStore(store.root, PLENTY)
    assert again.arrived(piece) == 1000
    assert again.models()[0].arriving == {piece.sha256: 1000}
    with pytest.raises(LayersMissing), again.using([piece]):
        pass
    with again.receiving(recipe, [piece]) as receiving, receiving.piece(piece) as partial:
        assert partial.size == 1000
        with pytest.raises(LayersRefused, match="1000 of"):
            partial.finish()
        partial.append(data[1000:])
        assert partial.finish().read_bytes() == data
    assert again.arrived(piece) == piece.size
    assert not list(store.root.rglob("*.partial"))


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("a byte is wrong", "SHA-256 is another"),
        ("more than announced", "more arrive"),
        ("no model", "is no model"),
        ("two layers for one", "holds 2 layers"),
    ],
)
def test_what_is_not_what_was_announced_is_never_whole(
    draft_path: Path, store: LayerStore, recipe: Recipe, lie: str, said: str, tmp_path: Path
) -> None:
    piece = recipe.pieces[1]
    data = bytearray(bytes_of(draft_path, recipe, piece))
    if lie == "a byte is wrong":
        data[len(data) // 2] ^= 1
    elif lie == "more than announced":
        data += b"x"
    elif lie == "no model":
        data = bytearray(b"x" * 100)
    else:
        file = tmp_path / "two.gguf"
        cut(draft_path, file, 1, 2, head=False)
        data = bytearray(file.read_bytes())
    if lie in ("no model", "two layers for one"):
        piece = replace(piece, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        recipe = replace(recipe, pieces=(recipe.pieces[0], piece, *recipe.pieces[2:]))
    with pytest.raises(LayersRefused, match=said):
        put(store, recipe, piece, bytes(data))
    assert store.find(piece) is None
    assert store.arrived(piece) == 0


def test_a_piece_of_another_length_is_not_taken_for_whole(draft_path: Path, store: LayerStore, recipe: Recipe) -> None:
    piece = recipe.pieces[2]
    cut_layers(draft_path, store, layers=piece.layers)
    (path,) = store.root.glob("pieces/*.gguf")
    path.write_bytes(path.read_bytes()[:-1])
    assert store.find(piece) is None
    cut_layers(draft_path, store, layers=piece.layers)
    assert store.find(piece) == path


def test_the_least_used_go_first_and_never_what_is_in_use_or_wanted(
    draft_path: Path, recipe: Recipe, tmp_path: Path
) -> None:
    one = recipe.pieces[1].size  # as large as all but the first and the last
    store = LayerStore(tmp_path / "small", 3 * one)
    cut_layers(draft_path, store, layers=LayerRange(1, 2))
    cut_layers(draft_path, store, layers=LayerRange(2, 3))
    cut_layers(draft_path, store, layers=LayerRange(3, 4))
    with store.using(recipe.pieces[1:2]):  # used again, so that layer 2 is now the oldest
        pass
    cut_layers(draft_path, store, layers=LayerRange(4, 5))
    assert [store.find(piece) is not None for piece in recipe.pieces[1:5]] == [True, False, True, True]
    with store.using(recipe.pieces[1:2]), store.using(recipe.pieces[3:5]):
        with pytest.raises(LayersRefused, match="in use"):
            cut_layers(draft_path, store, layers=LayerRange(2, 3))
        assert store.clean().in_use == 3
    cut_layers(draft_path, store, layers=LayerRange(2, 4))
    assert [store.find(piece) is not None for piece in recipe.pieces[1:5]] == [False, True, True, True]
    with pytest.raises(LayersRefused, match="limit"):
        cut_layers(draft_path, store, layers=LayerRange(1, 5))
    assert store.size == 3 * one


def test_room_is_set_aside_for_what_is_arriving(draft_path: Path, recipe: Recipe, tmp_path: Path) -> None:
    one = recipe.pieces[1].size
    store = LayerStore(tmp_path / "small", 2 * one)
    with store.receiving(recipe, recipe.pieces[1:3]):
        assert store.size == 2 * one
        with pytest.raises(LayersRefused, match="already"):
            cut_layers(draft_path, store, layers=LayerRange(3, 4))
    cut_layers(draft_path, store, layers=LayerRange(3, 4))  # nobody goes on with the others: the oldest goes
    assert store.size == 2 * one


def test_a_full_disk_is_said_before_and_in_the_middle(
    draft_path: Path, store: LayerStore, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = recipe.pieces[1]
    data = bytes_of(draft_path, recipe, piece)
    with store.receiving(recipe, [piece]) as receiving, receiving.piece(piece) as partial:
        partial.append(data[:500])
        file = partial._file

        class Full:
            def write(self, some: Any) -> int:
                if file.tell() >= 600:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return file.write(bytes(some[:100]))

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        partial._file = Full()  # type: ignore[assignment]
        with pytest.raises(DiskFull, match="is full"):
            partial.append(data[500:])
    assert store.arrived(piece) == 500
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**12, 10**12, layers.SPARE))
    with pytest.raises(DiskFull, match="too full"):
        cut_layers(draft_path, store, layers=piece.layers)
    assert store.arrived(piece) == 500


def test_a_store_that_cannot_be_used_says_so(draft_path: Path, recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LayersRefused, match="cannot be used"):
        cut_layers(draft_path, LayerStore(tmp_path / "file", PLENTY))
    store, piece = LayerStore(tmp_path / "layers", PLENTY), recipe.pieces[1]
    with store.receiving(recipe, [piece]) as receiving:
        (partial,) = store.root.glob("pieces/*.partial")
        partial.unlink()
        partial.mkdir()
        with pytest.raises(LayersRefused, match="cannot be used"), receiving.piece(piece):
            pass
    with pytest.raises(OSError, match="the model"), store.receiving(recipe, recipe.pieces[2:3]):
        raise OSError("the model's own trouble stays what it is")


def test_layers_are_listed_and_cleaned(
    draft_path: Path, verifier_path: Path, store: LayerStore, recipe: Recipe
) -> None:
    other = cut_layers(verifier_path, store, layers=LayerRange(0, 2))
    cut_layers(draft_path, store, layers=LayerRange(5, 6))
    assert [held.recipe.name for held in store.models()] == [recipe.name, other.name]
    assert store.recipe(other.digest) == other
    with pytest.raises(LayersMissing):
        store.clean("0" * 64)
    gone = store.clean(recipe.fingerprint)
    assert (gone.pieces, gone.size, gone.in_use) == (1, recipe.pieces[5].size, 0)
    assert [held.recipe for held in store.models()] == [other]
    assert store.clean().pieces == 2
    assert (store.models(), store.size) == ([], 0)
    assert not list(store.root.rglob("models/*/*.json"))


def test_what_lies_in_the_folder_by_chance_stays(store: LayerStore, draft_path: Path, recipe: Recipe) -> None:
    cut_layers(draft_path, store, layers=LayerRange(1, 2))
    mine = store.root / "pieces" / "notes.txt"
    mine.write_text("mine")
    (store.root / "models" / "x.json").write_text("{")
    assert len(store.models()) == 1
    store.clean()
    assert mine.exists()


def wrong(recipe: Recipe, **changes: Any) -> None:
    with pytest.raises(LayersRefused):
        Recipe.from_json(recipe.to_json() | changes)


def test_recipes_that_cannot_be_meant_are_refused(recipe: Recipe) -> None:
    pieces = recipe.to_json()["pieces"]
    lies: tuple[dict[str, Any], ...] = (
        {"fingerprint": "../../etc"}, {"fingerprint": "A" * 64}, {"name": ""}, {"name": "a\x1b[2J"},
        {"name": "x" * 201}, {"architecture": "../x"}, {"layers": 9}, {"layers": "many"}, {"pieces": pieces[1:]},
        {"pieces": pieces[::-1]}, {"pieces": []}, {"pieces": 5},
    )  # fmt: skip
    for changes in lies:
        wrong(recipe, **changes)
    for change in (
        {"size": 0},
        {"size": -1},
        {"size": 2**63},
        {"sha256": "../" + "a" * 61},
        {"first": -1},
        {"last": 3},
    ):
        wrong(recipe, pieces=[pieces[0] | change, *pieces[1:]])
    with pytest.raises(LayersRefused):
        Recipe.from_json({})
    with pytest.raises(InvalidOption, match="limit"):
        LayerStore(limit=0)


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, 100), max_size=8), seed=st.integers(0, 1000))
def test_in_whatever_portions_it_comes_the_file_is_the_same(
    cuts: list[int], seed: int, draft_path: Path, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And with whatever interruptions: each portion comes to a store that has just been opened."""
    piece = recipe.pieces[1 + seed % 6]
    data = bytes_of(draft_path, recipe, piece)
    root = tmp_path_factory.mktemp("portions")
    for place in [*sorted(len(data) * share // 100 for share in cuts), len(data)]:
        store = LayerStore(root, PLENTY)
        with store.receiving(recipe, [piece]) as receiving, receiving.piece(piece) as partial:
            partial.append(data[partial.size : place])
            if place == len(data):
                assert partial.finish().read_bytes() == data
