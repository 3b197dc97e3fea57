"""The lens against the model's own logits, and what has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, Lens, Message, Model
from edgellm.engine.lens import ARCHITECTURES
from models.corpus import held_out
from tests.engine.conftest import QWEN, TINY, MakeModel


def prompt(model: Model) -> np.ndarray:
    texts = "\n\n".join(case.prompt[-1].text for case in held_out("summary", 3, 7))
    return model.chat_prompt([Message("user", texts)])


def test_where_the_model_is_sure_the_lens_mostly_says_the_same(verifier_model: Model) -> None:
    lens = Lens.open(verifier_model)
    assert lens is not None
    ids = prompt(verifier_model)
    tokens = np.unique(ids)
    with Context(verifier_model, n_ctx=512, threads=1) as context:
        seen = lens.read(context, ids[:-1], lens.rows(tokens))
        assert context.length() == len(ids) - 1
        context.clear()
        rows = context.decode(ids[:-1], outputs=len(ids) - 1)[:, tokens]
    assert seen.shape == (len(ids) - 1, len(tokens))
    sure = np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1) < 2.0  # more than a half
    assert sure.sum() > 30
    assert (seen.argmax(axis=1) == rows.argmax(axis=1))[sure].mean() > 0.8
    assert (np.roll(seen, 1, axis=0).argmax(axis=1) == rows.argmax(axis=1))[sure].mean() < 0.5


def test_what_is_decoded_later_is_as_without_it(verifier_model: Model) -> None:
    lens = Lens.open(verifier_model)
    assert lens is not None
    ids = prompt(verifier_model)
    with Context(verifier_model, n_ctx=512, threads=1, exact=True) as context:
        context.decode(ids[:-1], outputs=0)
        plain = context.decode(ids[-1:]).copy()
        context.clear()
        lens.read(context, ids[:-1], lens.rows(ids[:3]))
        np.testing.assert_array_equal(context.decode(ids[-1:]), plain)


def test_its_rows_are_those_of_the_head(f32_pair: tuple[Path, Path], verifier_model: Model) -> None:
    tokens = np.array([7, 3, 7], dtype=np.int32)
    quantised = Lens.open(verifier_model)
    with Model.load(f32_pair[1]) as exact:
        whole = Lens.open(exact)
        assert quantised is not None
        assert whole is not None
        np.testing.assert_array_equal(quantised.rows(tokens), whole.rows(tokens))
        np.testing.assert_array_equal(whole.rows(tokens)[0], whole.rows(tokens)[2])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_reads_every_architecture_it_opens(architecture: str, make_model: MakeModel) -> None:
    shape = replace(TINY, arch=architecture, n_layer=3, n_embd=64, n_expert=4 if "moe" in architecture else 0)
    model = make_model(shape, "F32")
    lens = Lens.open(model)
    assert lens is not None
    ids = np.arange(20, 40, dtype=np.int32)
    with Context(model, n_ctx=64, threads=1) as context:
        assert np.abs(lens.read(context, ids, lens.rows(ids))).max() > 0.1


def test_where_llama_cpp_would_end_the_process_there_is_none(make_model: MakeModel) -> None:
    assert Lens.open(make_model(QWEN)) is None


def test_another_head_or_another_library_has_none(verifier_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_model, "architecture", "gpt2")
    assert Lens.open(verifier_model) is None
    monkeypatch.setattr(verifier_model, "architecture", "llama")
    monkeypatch.setattr("edgellm.engine.lens._GET", "not_there")
    assert Lens.open(verifier_model) is None
