"""Shards joined are the shard that would have been cut."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import check_gguf, cut, join
from edgellm.engine.gguf.writer import concatenated, sliced
from edgellm.errors import ModelUnsupported
from testkit.random_gguf import write
from tests.engine.test_shard import SHAPES


def content(path: Path) -> tuple[dict[str, object], dict[str, tuple[tuple[int, ...], int, bytes]]]:
    header = check_gguf(path)
    data = path.read_bytes()
    tensors = {t.name: (t.shape, t.kind, data[t.offset : t.offset + t.nbytes]) for t in header.tensors}
    return {key: repr(value) for key, value in header.metadata.items()}, tensors


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ends", [(0, 1, 2), (1, 2), (1, 2, 3, 4), (0, 1, 2, 3, 4), (0, 2, 4), (2, 4)])
def test_what_is_joined_is_what_would_have_been_cut(name: str, ends: tuple[int, ...], tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    write(model, SHAPES[name], "F16")
    parts = []
    for first, end in pairwise(ends):
        parts.append(tmp_path / f"{first}.gguf")
        cut(model, parts[-1], first, end - 1, head=end == 4)
    join(parts, tmp_path / "joined.gguf", start=ends[0] == 0, head=ends[-1] == 4)
    cut(model, tmp_path / "cut.gguf", ends[0], ends[-1] - 1, head=ends[-1] == 4)
    assert content(tmp_path / "joined.gguf") == content(tmp_path / "cut.gguf")
    assert not list(tmp_path.glob("*.partial"))


def test_layers_of_two_models_are_not_joined(tmp_path: Path) -> None:
    for name in ("llama", "qwen2"):
        write(tmp_path / f"{name}.gguf", SHAPES[name], "F16")
        cut(tmp_path / f"{name}.gguf", tmp_path / f"{name}-1.gguf", 1, 1, head=False)
    with pytest.raises(ModelUnsupported, match="not of one model"):
        join([tmp_path / "llama-1.gguf", tmp_path / "qwen2-1.gguf"], tmp_path / "out.gguf", start=False, head=False)
    assert not (tmp_path / "out.gguf").exists()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=20), st.data())
def test_an_array_by_layer_is_put_together_again(values: list[int], data: st.DataObject) -> None:
    key, at = "llama.attention.head_count", data.draw(st.integers(1, len(values) - 1))
    raw = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IIQ", 9, 4, len(values))
    raw += struct.pack(f"<{len(values)}I", *values)
    parts = [sliced(key, raw, 0, at), sliced(key, raw, at, len(values))]
    assert concatenated(key, parts) == raw
