"""Which file of a repository is meant."""

from __future__ import annotations

import pytest

from edgellm.errors import ModelNotFound, ModelUnsupported
from edgellm.storage.model_files import choose, label, quant_of

FILES = ["tiny-q2_k.gguf", "tiny-q4_k_m.gguf", "tiny-Q8_0.gguf", "tiny-f16.gguf", "mmproj-f16.gguf", "README.md"]
SHARDS = [f"Q8_0/big-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Llama-3.2-1B-Instruct-Q8_0.gguf", "Q8_0"),
        ("gemma-IQ4_XS.gguf", "IQ4_XS"),
        ("model.UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("BF16/model-BF16.gguf", "BF16"),
        ("model-fp16.gguf", None),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Q4_K_M/model.gguf", "Q4_K_M"),
        ("model.gguf", None),
    ],
)
def test_the_quantisation_is_read_from_the_name(file: str, quant: str | None) -> None:
    assert quant_of(file) == quant


def test_the_default_is_q4_k_m_in_any_case() -> None:
    choice = choose("a/b", FILES, None)
    assert (choice.file, choice.reason) == ("tiny-q4_k_m.gguf", "the default")


def test_without_the_default_the_nearest_is_chosen_and_it_says_so() -> None:
    choice = choose("a/b", [file for file in FILES if "q4" not in file], None)
    assert choice.file == "tiny-Q8_0.gguf"
    assert "no Q4_K_M" in choice.reason


def test_the_only_model_needs_no_name() -> None:
    assert choose("a/b", ["only.gguf", "mmproj-only.gguf"], None).file == "only.gguf"


@pytest.mark.parametrize("wanted", ["q8_0", "Q8_0", "tiny-Q8_0", "tiny-q8_0.gguf"])
def test_a_quantisation_or_a_file_can_be_asked_for(wanted: str) -> None:
    assert choose("a/b", FILES, wanted).file == "tiny-Q8_0.gguf"


def test_a_missing_quantisation_names_those_that_are_there() -> None:
    with pytest.raises(ModelNotFound, match=r"has no Q4_0; it has: Q8_0, F16, Q2_K, Q4_K_M.*such as a/b:Q8_0"):
        choose("a/b", FILES, "Q4_0")


def test_a_repository_without_gguf_says_so() -> None:
    with pytest.raises(ModelNotFound, match="holds no GGUF"):
        choose("a/b", ["model.safetensors", "mmproj-x.gguf"], None)


def test_split_models_are_refused_with_the_reason() -> None:
    with pytest.raises(ModelUnsupported, match="first of 3 files"):
        choose("a/b", SHARDS, None)
    with pytest.raises(ModelUnsupported, match="first of 3 files"):
        choose("a/b", [*SHARDS, *FILES[:2]], "Q8_0")
    assert choose("a/b", [*SHARDS, *FILES[:2]], None).file == "tiny-q4_k_m.gguf"


def test_a_file_without_a_quantisation_is_called_by_its_name() -> None:
    assert label("sub/model-v2.gguf") == "model-v2"
