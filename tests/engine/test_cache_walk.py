"""Random walks over the caches of a context end in the state of a fresh one, and find each guard that is missing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from edgellm.engine import Model
from edgellm.engine.kv import kv_cache
from edgellm.engine.kv.kv_cache import KVCache
from edgellm.engine.native import bind, llama
from testkit.cache_walk import SETTINGS, Walk, walk
from tests.conftest import Architectures
from tests.engine.cache_faults import trusting

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "qwen35", "lfm2", "granitehybrid", "mamba2", "deepseek4"])
def test_a_walk_finds_no_wrong_state(architectures: Architectures, name: str) -> None:
    with Model.load(architectures(name), faults=()) as model:
        found = walk(model, 150)
    assert found.wrong == []
    assert found.rows > 150
    assert set(found.operations) == {"decode", "rollback", "draft", "branch", "copy", "batch", "clear"}
    assert found.operations.total() == 150


def any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "may_share", lambda *_: True)
    monkeypatch.setattr(KVCache, "begin_shared_batch", lambda *_: None)


def snapshots_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = KVCache.copy

    def copied(self: KVCache, src: int, dst: int) -> bool:
        batch = self._sequences[src].batch
        done = copy(self, src, dst)
        self._sequences[src].batch = self._sequences[dst].batch = batch
        return done

    monkeypatch.setattr(KVCache, "copy", copied)


@pytest.mark.parametrize(
    ("name", "missing", "setting"),
    [
        ("lfm2", lambda patch: patch.setattr(KVCache, "_cut", trusting), "verifier"),
        ("gpt-oss", lambda patch: patch.setattr(KVCache, "_least", lambda *_: 0), "verifier"),
        ("lfm2", any_batch, "branches with snapshots"),
        ("deepseek4", lambda patch: patch.setattr(kv_cache, "_COPIED_LATE", ()), "branches"),
        ("lfm2", snapshots_of_copies, "branches with snapshots"),
    ],
)
def test_a_walk_finds_a_missing_guard(
    architectures: Architectures, name: str, missing: Break, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing is snapshots_of_copies and bind(llama().llama_version, ctypes.c_char_p)() >= b"0.6":
        pytest.skip("llama.cpp 0.6 needs no guard here")
    missing(monkeypatch)
    (chosen,) = (one for one in SETTINGS if one.name == setting)
    with Model.load(architectures(name), faults=()) as model:
        assert any(Walk(model, chosen, seed).run(200, most_wrong=1).n_wrong for seed in range(10))
