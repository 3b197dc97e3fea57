"""The files of random weights load, tokenise and decode."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Message, top2
from testkit.gguf.random_model import CONTROL, SHAPES, TYPES, vocabulary
from tests.engine.conftest import QWEN, TINY, MakeModel


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [TINY, QWEN, replace(TINY, tied=False)])
def test_a_file_decodes(make_model: MakeModel, shape: object, kind: str) -> None:
    model = make_model(shape, kind)
    assert (model.n_vocab, model.n_layer) == (400, 2)
    ids = model.chat_prompt([Message("user", "hello there")])
    with Context(model, ContextSpec(n_ctx=64, threads=1)) as context:
        logits = context.decode(ids)
        assert np.isfinite(logits).all()
        assert 0 < top2(logits).p1 < 1
    assert model.is_eog(399)


def test_the_vocabulary_of_the_real_size() -> None:
    tokens, kinds, merges = vocabulary(SHAPES["qwen2.5-0.5b"].n_vocab)
    assert len(tokens) == len(kinds) == len(set(tokens)) == 151_936
    assert tokens[-3:] == list(CONTROL)
    known = set(tokens)
    for merge in merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known


def test_the_05b_shape_has_that_many_parameters(make_model: MakeModel) -> None:
    shape = SHAPES["qwen2.5-0.5b"]
    one, two = (make_model(replace(shape, n_vocab=400, n_layer=n), "Q4_0").n_params for n in (1, 2))
    whole = one + (two - one) * (shape.n_layer - 1) + (shape.n_vocab - 400) * shape.n_embd
    assert whole == 494_032_768  # what Qwen2.5-0.5B has
