"""Float32 copies."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from edgellm.engine import Context, ContextSpec, Model
from testkit.gguf.changed import to_f32
from testkit.gguf.reader import read_gguf
from tests.engine.conftest import TINY, MakeModel


def test_a_copy_says_and_computes_the_same(draft_model: Model, exact_model: Model) -> None:
    assert exact_model.is_f32
    assert not draft_model.is_f32
    assert exact_model.n_params == draft_model.n_params
    assert exact_model.vocabulary == draft_model.vocabulary
    ours, theirs = draft_model.header.metadata, exact_model.header.metadata
    changed = {key for key, value in ours.items() if isinstance(value, str | int | float) and value != theirs[key]}
    assert changed <= {"general.file_type"}
    ids = np.arange(40, 80, dtype=np.int32)
    with (
        Context(draft_model, ContextSpec(n_ctx=64, threads=1, exact=True)) as one,
        Context(exact_model, ContextSpec(n_ctx=64, threads=1)) as two,
    ):
        a, b = one.decode(ids, outputs=40), two.decode(ids, outputs=40)
        # 8-bit products round the activations; the weights are the same
        assert np.abs(a - b).max() < 0.1 * np.abs(b).max()


def test_every_tensor_is_the_dequantised_one(draft_path: Path, f32_pair: tuple[Path, Path]) -> None:
    source, copy = read_gguf(draft_path), read_gguf(f32_pair[0])
    assert [t.name for t in source.tensors] == [t.name for t in copy.tensors]
    for a, b in zip(source.tensors, copy.tensors, strict=True):
        assert b.tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(gguf.dequantize(a.data, a.tensor_type).reshape(b.data.shape), b.data)


def test_a_copy_of_a_copy_is_the_same_file(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model(TINY, "F32")
    to_f32(model.path, tmp_path / "copy.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == model.path.read_bytes()
