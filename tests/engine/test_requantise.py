"""A model's file in other types of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.engine import Model, ModelFile
from edgellm.engine.gguf.writer import FILE_TYPES, requantise
from edgellm.errors import ModelUnsupported


def test_matrices_have_the_type_and_the_file_its_name(verifier_path: Path, tmp_path: Path) -> None:
    requantise(verifier_path, target := tmp_path / "other.gguf", "Q4_0", {"ffn_down": "Q8_0"}, name="Other 1B")
    file, source = ModelFile.open(target), ModelFile.open(verifier_path)
    assert file.name == "Other 1B"
    assert file.header.quantisation == "Q4_0"
    assert file.header.file_size < source.header.file_size
    kinds = {tensor.kind for tensor in file.header.tensors if "ffn_down" in tensor.name}
    assert kinds == {tensor.kind for tensor in source.header.tensors if "ffn_down" in tensor.name}
    assert len(file.header.tensors) == len(source.header.tensors)
    with Model.load(target) as model, Model.load(verifier_path) as own:
        assert model.vocabulary.fingerprint == own.vocabulary.fingerprint


def test_without_a_name_the_file_keeps_its_own(draft_path: Path, tmp_path: Path) -> None:
    requantise(draft_path, target := tmp_path / "other.gguf", "Q8_0")
    assert ModelFile.open(target).name == ModelFile.open(draft_path).name
    assert {"Q4_0", "Q8_0"} <= FILE_TYPES.keys()


def test_what_llama_cpp_cannot_write_is_an_error(tmp_path: Path) -> None:
    (source := tmp_path / "words.gguf").write_bytes(b"no model")
    with pytest.raises(ModelUnsupported, match=r"words\.gguf in Q8_0"):
        requantise(source, tmp_path / "other.gguf", "Q8_0")
