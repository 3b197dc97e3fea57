"""What llama.cpp's cache gets wrong is found before the first reply, and avoided."""

import json
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm import LLM
from edgellm.engine import Context, ContextSpec, Floats, Model, ModelFile, SeqRows
from edgellm.engine.hardware import QUANTISED, Hardware
from edgellm.engine.kv.kv_cache import KVCache
from edgellm.engine.model import LoadSpec
from edgellm.engine.speculators.speculator import StateWindow
from edgellm.engine.trial.probe import EAGLE3, MTP, PROVEN
from edgellm.engine.trial.self_test import ROLLBACK, ROWS, SEQUENCES, self_test
from edgellm.errors import ContextFull
from testkit import ROOT
from testkit.gguf import random_model
from testkit.gguf.architectures import ARCHITECTURES, WITH_MTP
from testkit.gguf.random_model import Shape
from tests.conftest import Architectures, Heads
from tests.engine.cache_faults import FAULTS

WRONG = {"plamo2": [SEQUENCES]}
"""Architectures with which llama.cpp itself is wrong: plamo2 with equal numbers of rows of several sequences."""
TIMES = 2  # or, every night, once with each architecture


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_architecture_does_what_its_cache_promises(architectures: Architectures, name: str) -> None:
    with Model.load(architectures(name), faults=()) as model:
        assert self_test(model) == WRONG.get(name, [])


@pytest.mark.parametrize("cache_type", QUANTISED)
def test_quantised_caches_are_no_faults(draft_path: Path, verifier_path: Path, cache_type: str) -> None:
    for path in (draft_path, verifier_path):
        with Model.load(path, LoadSpec(Hardware(cache_type=cache_type)), faults=()) as model:
            assert [self_test(model, seed) for seed in range(TIMES)] == [[]] * TIMES


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_each_of_the_traps_is_caught_every_time(
    architectures: Architectures, name: str, pytestconfig: pytest.Config
) -> None:
    fault = FAULTS[name]
    times = max(TIMES, len(fault.architectures) * pytestconfig.getoption("--nightly"))
    for seed, architecture in enumerate(islice(cycle(fault.architectures), times)):
        with Model.load(architectures(architecture), faults=()) as model, fault.put():
            assert fault.found in self_test(model, seed), architecture


ROUNDS_MUCH = Shape("qwen2", 4_096, 24, 448, 7, 1, 1_216, 4_096, 1e6, bias=True)
"""In Q4_0, with sharp attention, rounding alone moves its logits more than the self-test allows other models."""


def test_what_a_model_rounds_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_model.write(tmp_path / "rounds.gguf", ROUNDS_MUCH, "Q4_0", sharpness=3.0)
    with Model.load(tmp_path / "rounds.gguf", faults=()) as model:
        assert self_test(model) == []
        monkeypatch.setattr("edgellm.engine.trial.self_test._SPREAD", 0.0)
        assert self_test(model) == [ROLLBACK, SEQUENCES, ROWS]


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if "llama" in fault.architectures])
def test_a_fault_is_caught_in_a_quantised_model_too(tmp_path: Path, name: str) -> None:
    random_model.write(tmp_path / "quantised.gguf", random_model.SHAPES["tiny-verifier"], "Q4_0")
    with Model.load(tmp_path / "quantised.gguf", faults=()) as model, FAULTS[name].put():
        assert [FAULTS[name].found in self_test(model, seed) for seed in range(TIMES)] == [True] * TIMES


@pytest.mark.parametrize("name", [*WITH_MTP, "head of llama", "head of qwen35"])
def test_speculators_predict_the_same_after_a_rejection(architectures: Architectures, heads: Heads, name: str) -> None:
    _, of, verifier = name.partition("head of ")
    head = ModelFile.open(heads(verifier, useful=False, own=verifier == "llama")) if of else None
    path = architectures(verifier) if of else architectures(name, mtp="useful")
    with Model.load(path, LoadSpec(speculates=True, eagle3=head), faults=()) as model:
        assert self_test(model) == []


def keeping_old_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the states of rejected tokens where they are."""
    add = StateWindow.add

    def once(self: StateWindow, start: int, states: Floats) -> None:
        known = max(0, min(self.end, start + len(states)) - start)
        add(self, start + known, states[known:])

    monkeypatch.setattr(StateWindow, "add", once)
    monkeypatch.setattr(StateWindow, "truncate", lambda _self, _length: None)


@pytest.mark.parametrize("kind", [MTP, EAGLE3])
def test_a_fault_of_a_speculator_is_caught_every_time(
    architectures: Architectures, heads: Heads, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping_old_states(monkeypatch)
    head = ModelFile.open(heads("llama", useful=False)) if kind == EAGLE3 else None
    path = architectures("llama") if head else architectures("glm4moe", mtp="useful")
    with Model.load(path, LoadSpec(speculates=True, eagle3=head), faults=()) as model:
        assert [self_test(model, seed) for seed in range(TIMES)] == [[kind]] * TIMES


def test_rows_that_are_wrong_together_are_decoded_one_by_one(
    architectures: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    widest = Counter[int]()
    run = Context._run

    def noted(self: Context, n: int, batch: Any) -> None:
        widest[sum(self._batch._flags[:n])] += 1
        run(self, n, batch)

    monkeypatch.setattr(Context, "_run", noted)
    with Model.load(architectures("qwen3"), faults=()) as model:
        ids = np.arange(12, dtype=np.int32)
        with Context(model, ContextSpec(n_ctx=64, n_seq=2, threads=1)) as context:
            expected = context.decode(ids, outputs=6).copy()
    with Model.load(architectures("qwen3"), faults=[ROWS]) as model:
        widest.clear()
        with Context(model, ContextSpec(n_ctx=64, n_seq=2, threads=1)) as context:
            found = context.decode(ids, outputs=6)
            assert np.allclose(np.array([found[row] for row in range(6)]), expected, atol=1e-4)
            both = context.decode_rows([SeqRows(0, ids[:3], 2), SeqRows(1, ids, 6)])
            assert np.allclose(both[1], expected, atol=1e-4)
            with pytest.raises(ContextFull):
                context.decode(np.resize(ids, 60), outputs=2)
            assert context.length() == 15
        assert set(widest) == {1}


def test_what_a_child_finds_wrong_is_avoided(architectures: Architectures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGELLM_PROBE", raising=False)
    for _ in range(2):  # by a trial, and by its verdict
        with Model.load(architectures("plamo2")) as model:
            assert model.faults == {SEQUENCES}
            assert self_test(model) == []
    with LLM.open(None, architectures("plamo2"), threads=1, history=False) as llm:
        assert [notice.split(" of ")[0] for notice in llm.notices] == ["llama.cpp computes several texts in one batch"]


def test_without_trust_everything_is_read_again(architectures: Architectures, monkeypatch: pytest.MonkeyPatch) -> None:
    init = KVCache.__init__

    def distrusting(self: KVCache, *args: Any, **_: Any) -> None:
        init(self, *args, trusted=False)

    monkeypatch.setattr(KVCache, "__init__", distrusting)
    with Model.load(architectures("lfm2"), faults=()) as model:
        with FAULTS["snapshots of earlier batches"].put():
            assert self_test(model) == []
        with Context(model, ContextSpec(n_ctx=64, threads=1)) as context:
            ids = np.arange(20, dtype=np.int32)
            context.decode(ids)
            assert context.sync(np.append(ids[:12], 5).astype(np.int32)) == 0


def test_proven_architectures_are_those_on_record(architectures: Architectures) -> None:
    rows = json.loads((ROOT / "bench" / "results" / "models" / "architectures.json").read_text())["rows"]
    right = {
        ModelFile.open(architectures(name)).header.architecture
        for name, row in rows.items()
        if row["walk"]["wrong"] == 0 and not row["avoided"] and sum(row["walk"]["operations"].values()) >= 10_000
    }
    assert right == PROVEN
