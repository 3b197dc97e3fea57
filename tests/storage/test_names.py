"""What a model may be called, and what it may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EdgeError, InvalidOption, ModelNotFound
from edgellm.storage import catalog
from edgellm.storage.model_files import HubName, hub_name, parse_hub_name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ann/tiny", HubName("ann", "tiny")),
        ("ann/tiny:q4_k_m", HubName("ann", "tiny", "q4_k_m")),
        ("ann/tiny@Q8_0", HubName("ann", "tiny", "Q8_0")),
        ("hf.co/ann/tiny.v2-GGUF:Q4_K_M", HubName("ann", "tiny.v2-GGUF", "Q4_K_M")),
    ],
)
def test_hub_names_are_read(text: str, expected: HubName) -> None:
    assert parse_hub_name(text) == expected


@pytest.mark.parametrize(
    "text",
    ["../x", "a/..", "a/b/c", "a/b..c", "a/b:../../c", "a/b:", "/etc/passwd", "a--b/c", "a\\b/c", "a/b\n", "", "a/é"],
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_hub_name(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("qwen3:8b", HubName("Qwen", "Qwen3-8B-GGUF", "Q4_K_M")),
        ("Qwen3:8B", HubName("Qwen", "Qwen3-8B-GGUF", "Q4_K_M")),
        ("qwen3:8b-q8_0", HubName("Qwen", "Qwen3-8B-GGUF", "Q8_0")),
        ("qwen3.6:27b-q4_k_m", HubName("unsloth", "Qwen3.6-27B-GGUF", "Q4_K_M")),
        ("qwen3.5:4b-ud-q4_k_xl", HubName("unsloth", "Qwen3.5-4B-GGUF", "UD-Q4_K_XL")),
        ("qwen3:30b", HubName("Qwen", "Qwen3-30B-A3B-GGUF", "Q4_K_M")),
        ("qwen3:30b-a3b-q8_0", HubName("Qwen", "Qwen3-30B-A3B-GGUF", "Q8_0")),
        ("qwen2.5:0.5b-instruct-q4_K_M", HubName("Qwen", "Qwen2.5-0.5B-Instruct-GGUF", "Q4_K_M")),
        ("gemma3:4b-it", HubName("ggml-org", "gemma-3-4b-it-GGUF", "Q4_K_M")),
        ("gpt-oss:20b", HubName("ggml-org", "gpt-oss-20b-GGUF", "MXFP4")),
        ("ann/tiny:q8_0", HubName("ann", "tiny", "q8_0")),
    ],
)
def test_short_names_mean_models_on_the_hub(text: str, expected: HubName) -> None:
    assert hub_name(text) == expected


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("qwen3:7b", "Did you mean qwen3:1.7b? qwen3 comes as qwen3:0.6b, qwen3:1.7b"),
        ("qwen3", "qwen3 comes as qwen3:0.6b, qwen3:1.7b"),
        ("qwen3:", "qwen3 comes as"),
        ("qwen3:8b-fast", "Did you mean qwen3:8b?"),
        ("quen3:8b", "Did you mean qwen3:8b"),
        ("gema3:4b", "Did you mean gemma3:4b"),
        ("edgellm-drft", "Did you mean edgellm-draft"),
        ("nothing like it", "`edgellm catalog` others"),
    ],
)
def test_an_unknown_name_answers_with_the_nearest(text: str, advice: str) -> None:
    with pytest.raises(ModelNotFound) as raised:
        hub_name(text)
    assert advice in raised.value.next_step
    assert repr(text) in raised.value.what


@given(st.text(max_size=40))
def test_any_text_is_a_name_of_the_hub_or_an_error_of_ours(text: str) -> None:
    try:
        name = hub_name(text)
    except EdgeError:
        return
    assert hub_name(name.short) == name
    assert "/" not in name.folder
    assert ".." not in name.folder


@given(
    st.sampled_from(sorted(name for name, model in catalog().models.items() if model.repo_id)),
    st.sampled_from(["", "-q8_0", "-Q4_K_M", "-iq4_xs", "-mxfp4"]),
)
def test_a_short_name_stands_for_one_model(name: str, quant: str) -> None:
    model = catalog().models[name]
    found = hub_name(name + quant)
    assert found.repo_id == model.repo_id
    assert found.quant == (quant[1:].upper() or model.quant)
    assert found.short == (name if found.quant == model.quant else f"{name}{quant.lower()}")
