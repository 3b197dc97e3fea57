"""Keys and values that another context has computed serve as well as its own."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.hardware import Hardware
from edgellm.engine.kv.layer_rows import put_together, take_apart
from edgellm.engine.model import LoadSpec
from testkit.gguf.random_model import Shape, write
from tests.engine.logits import some_ids

TEXT = some_ids(24, 2000, 3)
CLOSE = 2e-2


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("n_seq", [1, 3])
def test_a_context_goes_on_where_another_was(verifier_model: Model, flash: bool, n_seq: int) -> None:
    seq, kept = n_seq - 1, 20
    with (
        Context(verifier_model, ContextSpec(n_ctx=64, threads=1, flash=False)) as giver,
        Context(
            verifier_model, ContextSpec(n_ctx=64, n_seq=n_seq, threads=1, unified=n_seq == 1, flash=flash)
        ) as taker,
    ):
        giver.decode(TEXT)
        giver.rollback(22)  # as after a draft
        layers = giver.layer_rows(kept)
        assert layers is not None
        assert len(layers) == verifier_model.n_layer
        assert layers[0].positions == kept
        taker.decode(some_ids(30, 2000, 4), seq=seq)
        assert taker.adopt(layers, seq)
        assert taker.length(seq) == kept
        found = taker.decode(TEXT[kept:], seq=seq)[0].copy()
        giver.clear()
        own = giver.decode(TEXT)[0]
        assert np.abs(found - own).max() < CLOSE * np.abs(own).max()
        assert found.argmax() == own.argmax()


@pytest.mark.parametrize("head", [64, 128, 32])
def test_rows_that_are_turned_before_they_are_rounded_serve_as_well(tmp_path: Path, head: int) -> None:
    path = tmp_path / "model.gguf"
    write(path, Shape("llama", 400, 2, 2 * head, 2, 1, 64, 512), "F32")
    ids = some_ids(24, 400, 3)
    with (
        Model.load(path, LoadSpec(Hardware(cache_type="q8_0", flash_attn=True))) as model,
        Context(model, ContextSpec(n_ctx=64, threads=1)) as giver,
        Context(model, ContextSpec(n_ctx=64, threads=1)) as taker,
    ):
        own = giver.decode(ids)[0]
        layers = giver.layer_rows(20)
        assert layers is not None
        assert taker.adopt(layers)
        assert np.abs(taker.decode(ids[20:])[0] - own).max() < CLOSE * np.abs(own).max()


def test_the_rows_are_the_same_after_another_way(verifier_model: Model) -> None:
    with Context(verifier_model, ContextSpec(n_ctx=64, threads=1, flash=False)) as giver:
        giver.decode(TEXT)
        layers = giver.layer_rows(len(TEXT))
        assert layers is not None
        for transposed, turned in product((False, True), (None, 64)):
            state = put_together(layers, streams=2, transposed=transposed, turned=turned)
            assert state is not None
            again = take_apart(state, len(TEXT), says_turned=turned is not None)
            assert again is not None
            for one, other in zip(layers, again, strict=True):
                assert np.array_equal(one.keys, other.keys)
                assert np.array_equal(one.values, other.values)
                assert (one.key_type, one.value_type) == (other.key_type, other.value_type)
        assert giver.layer_rows(len(TEXT) + 1) is None
        assert giver.layer_rows(0) is None


def test_what_is_of_another_kind_is_not_taken(verifier_model: Model) -> None:
    with (
        Context(verifier_model, ContextSpec(n_ctx=64, threads=1, exact=True)) as exact,
        Context(verifier_model, ContextSpec(n_ctx=64, threads=1, exact=False)) as other,
    ):
        exact.decode(TEXT)
        layers = exact.layer_rows(len(TEXT))
        assert layers is not None
        other.decode(TEXT)
        assert not other.adopt(layers)  # in 32 bits
        assert other.length() == 0
        assert not other.adopt(layers[:2])
        assert other.decode(TEXT).shape[0] == 1


def test_states_that_are_broken_have_no_layers(verifier_model: Model) -> None:
    with Context(verifier_model, ContextSpec(n_ctx=64, threads=1)) as giver:
        giver.decode(TEXT)
        layers = giver.layer_rows(len(TEXT))
    assert layers is not None
    state = put_together(layers, streams=1, transposed=False, turned=0)
    assert state is not None
    whole = state.tobytes()
    rng = np.random.default_rng(0)
    assert take_apart(np.frombuffer(whole + b"\0", np.uint8), 4, says_turned=True) is None
    assert take_apart(np.zeros(0, np.uint8), 4, says_turned=True) is None
    for _ in range(200):
        broken = np.frombuffer(whole, np.uint8).copy()
        broken[int(rng.integers(0, 400))] ^= 1 << int(rng.integers(0, 8))
        cut = int(rng.integers(0, len(broken) + 1))
        for one in (broken, broken[:cut]):
            found = take_apart(one, 4, says_turned=True)
            assert found is None or all(layer.positions == 4 for layer in found)
