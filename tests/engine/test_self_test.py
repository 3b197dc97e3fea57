"""What llama.cpp's cache gets wrong is found before the first reply, and avoided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edgellm import LLM
from edgellm.engine import Context, Floats, Model, SeqRows
from edgellm.engine.kv_cache import KVCache
from edgellm.engine.mtp.layer import StateWindow
from edgellm.engine.native import lib
from edgellm.engine.trial.probe import MTP
from edgellm.engine.trial.self_test import ROLLBACK, SEQUENCES, self_test
from testkit.architectures import ARCHITECTURES, WITH_MTP
from tests.conftest import Architectures

WRONG = {"plamo2": [SEQUENCES]}
"""Architectures with which llama.cpp itself is wrong: plamo2 with equal numbers of rows of several sequences."""
SEEDS = range(25)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_architecture_does_what_its_cache_promises(architectures: Architectures, name: str) -> None:
    with Model.load(architectures(name), probe=False) as model:
        assert self_test(model) == WRONG.get(name, [])


def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe that every rollback that llama.cpp accepts is right."""

    def cut(self: KVCache, seq: int, _one: object, length: int, _now: int) -> bool:
        return bool(lib.llama_memory_seq_rm(self._memory, seq, length, -1))

    monkeypatch.setattr(KVCache, "_cut", cut)


def forgetting_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave rolled back positions in the cache: the next ones lie beside them."""
    monkeypatch.setattr(KVCache, "truncate", lambda _self, _seq, length, _now: length)


def copying_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "copy", lambda _self, _src, _dst: True)


def mixing_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each sequence the other's logits."""
    decode_rows = Context.decode_rows

    def mixed(self: Context, rows: Sequence[SeqRows], embedded: Floats | None = None) -> list[Floats]:
        return decode_rows(self, rows, embedded)[::-1]

    monkeypatch.setattr(Context, "decode_rows", mixed)


@pytest.mark.parametrize("name", WITH_MTP)
def test_mtp_layers_predict_the_same_after_a_rejected_draft(architectures: Architectures, name: str) -> None:
    with Model.load(architectures(name, mtp="useful"), probe=False, mtp=True) as model:
        assert self_test(model) == []


def keeping_old_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the states of rejected tokens where they are."""
    add = StateWindow.add

    def once(self: StateWindow, start: int, states: Floats) -> None:
        known = max(0, min(self.end, start + len(states)) - start)
        add(self, start + known, states[known:])

    monkeypatch.setattr(StateWindow, "add", once)
    monkeypatch.setattr(StateWindow, "truncate", lambda _self, _length: None)


def test_a_fault_of_an_mtp_layer_is_caught_every_time(
    architectures: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping_old_states(monkeypatch)
    with Model.load(architectures("glm4moe", mtp="useful"), probe=False, mtp=True) as model:
        assert [self_test(model, seed) for seed in SEEDS] == [[MTP]] * len(SEEDS)


@pytest.mark.parametrize(
    ("name", "fault", "found"),
    [
        ("lfm2", trusting, ROLLBACK),
        ("qwen3", forgetting_nothing, ROLLBACK),
        ("qwen35", copying_nothing, SEQUENCES),
        ("llama", mixing_rows, SEQUENCES),
    ],
)
def test_a_fault_in_each_of_the_traps_is_caught_every_time(
    architectures: Architectures,
    name: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with Model.load(architectures(name), probe=False) as model:
        caught = [found in self_test(model, seed) for seed in SEEDS]
    assert sum(caught) == len(SEEDS)


def test_what_is_wrong_is_avoided_after_a_trial_in_a_child(
    architectures: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGELLM_PROBE", raising=False)
    for _ in range(2):  # by a trial, and by its verdict
        with Model.load(architectures("plamo2")) as model:
            assert model.faults == {SEQUENCES}
            assert self_test(model) == []
    with LLM.open(None, architectures("plamo2"), threads=1, history=False) as llm:
        assert [notice.split(" of ")[0] for notice in llm.notices] == ["llama.cpp computes several texts in one batch"]


def test_without_trust_everything_is_read_again(architectures: Architectures, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting(monkeypatch)
    init = KVCache.__init__

    def distrusting(self: KVCache, *args: Any, **_: Any) -> None:
        init(self, *args, trusted=False)

    monkeypatch.setattr(KVCache, "__init__", distrusting)
    with Model.load(architectures("lfm2"), probe=False) as model:
        assert self_test(model) == []
        with Context(model, n_ctx=64, threads=1) as context:
            ids = np.arange(20, dtype=np.int32)
            context.decode(ids)
            assert context.sync(np.append(ids[:12], 5).astype(np.int32)) == 0
