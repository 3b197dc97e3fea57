"""Float32 copies."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from testkit.gguf.reader import read_gguf


def test_every_tensor_is_the_dequantised_one(draft_path: Path, f32_pair: tuple[Path, Path]) -> None:
    source, copy = read_gguf(draft_path), read_gguf(f32_pair[0])
    assert [t.name for t in source.tensors] == [t.name for t in copy.tensors]
    for a, b in zip(source.tensors, copy.tensors, strict=True):
        assert b.tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(gguf.dequantize(a.data, a.tensor_type).reshape(b.data.shape), b.data)
