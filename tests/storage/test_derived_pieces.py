"""Pieces that are made here: once, within the store's limit, and never one that is in use removed."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import LayersMissing, LayersRefused, StoreFull
from edgellm.storage.layers.store import ENOUGH, LayerStore, layers_of, together

MODEL = "a" * 64
ONE = 1000


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path, 3 * ONE)


class Maker:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self, path: Path) -> None:
        self.times += 1
        path.write_bytes(b"x" * ONE)


def using(store: LayerStore, layer: int, make: Maker, model: str = MODEL) -> ExitStack:
    held = ExitStack()
    held.enter_context(store.made.using(model, layer, layer, ONE, make))
    return held


def test_what_is_there_is_not_made_again(store: LayerStore) -> None:
    make = Maker()
    for _ in range(2):
        with store.made.using(MODEL, 3, 8, ONE, make) as path:
            assert path.read_bytes() == b"x" * ONE
    assert make.times == 1
    (file,) = store.made.files()
    assert (file.made, layers_of(file), store.size) == (True, range(3, 9), ONE)


def test_what_was_used_least_goes_first_and_never_what_is_in_use(store: LayerStore) -> None:
    make = Maker()
    held = using(store, 0, make)
    for layer in (1, 2):
        using(store, layer, make).close()
    for layer, moment in ((0, 1), (1, 3), (2, 2)):
        os.utime(store.root / "made" / MODEL / "whole" / f"{layer:04d}-{layer:04d}.gguf", (moment, moment))
    using(store, 3, make).close()
    assert [layers_of(file).start for file in store.made.files()] == [0, 1, 3]
    with using(store, 1, make), using(store, 3, make), pytest.raises(StoreFull, match=r"of 0\.00 GB is to be made"):
        using(store, 4, make)
    held.close()
    assert store.size <= store.limit


def test_one_that_fails_leaves_nothing_and_what_was_left_half_made_goes(store: LayerStore) -> None:
    folder = store.root / "made" / MODEL
    folder.mkdir(parents=True)
    (folder / "0000-0000.half").write_bytes(b"by one who was killed")

    def fails(path: Path) -> None:
        path.write_bytes(b"x")
        raise LayersMissing("It is gone.", "Bring it.")

    with pytest.raises(LayersMissing), store.made.using(MODEL, 1, 1, ONE, fails):
        pass
    assert [path.name for path in folder.rglob("*")] == ["whole"]


def test_many_who_want_the_same_have_it_made_once(store: LayerStore) -> None:
    make, found = Maker(), []

    def want() -> None:
        with store.made.using(MODEL, 1, 1, ONE, make) as path:
            found.append(path)

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (make.times, len(found), len(set(found))) == (1, 8, 1)


def test_of_one_model_alone_they_are_removed_also_where_nothing_was_brought(store: LayerStore) -> None:
    make = Maker()
    for model in (MODEL, "b" * 64):
        using(store, 1, make, model).close()
    assert store.clean(MODEL).pieces == 1
    assert list(store.made.models()) == ["b" * 64]
    with pytest.raises(LayersMissing):
        store.clean(MODEL)


@given(st.integers(0, 99), st.integers(0, 99), st.floats(1, 10 * ENOUGH))
def test_pieces_together_are_as_large_as_they_may_be(layer: int, more: int, size: float) -> None:
    last, many = layer + more, max(1, int(ENOUGH / size))
    ends = [together(layer, last, size)]
    while ends[-1] < last:
        ends.append(together(ends[-1] + 1, last, size))
    counts = [end - before for before, end in pairwise([layer - 1, *ends])]
    assert min(counts) >= 1
    assert max(counts) == 1 or max(counts) * size <= ENOUGH
    assert counts[-1] <= max(1, many // 4), "what comes last is small"
    aligned = [end for end in ends if (end + 1) % many == 0]
    assert len(ends) - len(aligned) <= many.bit_length(), "all others end where those of another stage do"


def test_what_the_disk_does_not_keep_gets_no_name(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a made piece holds is not looked at again, so it is there for good before it is taken for whole."""

    def broken(_file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(LayersRefused, match="Input/output error"):
        using(store, 0, Maker())
    assert not list(store.root.rglob("*.gguf")) + list(store.root.rglob("*.half"))
