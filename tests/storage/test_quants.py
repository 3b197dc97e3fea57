"""Which model of a repository is meant, and which files make it up."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import InvalidOption, ModelNotFound
from edgellm.storage.catalog import CatalogModel, catalog
from edgellm.storage.model_files import ALIASES, HubName, hub_name, parse_hub_name
from edgellm.storage.quants import choose, is_model, labels, quant_of, variants
from tests.storage.listings import DRAFTERS, GPT_OSS, PHI_3, QWEN_7B, QWEN_27B, QWEN_FLASH

GIB = 2**30
FILES = dict.fromkeys(
    ["tiny-q2_k.gguf", "tiny-q4_k_m.gguf", "tiny-Q8_0.gguf", "tiny-f16.gguf", "mmproj-f16.gguf", "README.md"], 0
)
PARTS = dict.fromkeys([f"Q8_0/big-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)], 0)


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("gemma-IQ4_XS.gguf", "IQ4_XS"), ("model.UD-Q4_K_XL.gguf", "UD-Q4_K_XL"), ("model-FP32.gguf", "F32"),
        ("Q4_K_M/model.gguf", "Q4_K_M"), ("Qwen3-Q4_K_Medium.gguf", None), ("model.gguf", None),
    ],
)  # fmt: skip
def test_the_quantisation_is_read_from_the_name(file: str, quant: str | None) -> None:
    assert quant_of(file) == quant


@pytest.mark.parametrize("wanted", ["q8_0", "Q8_0", "q8", "tiny-Q8_0", "tiny-q8_0.gguf"])
def test_a_quantisation_or_a_file_can_be_asked_for(wanted: str) -> None:
    assert choose("a/b", FILES, wanted).files == ("tiny-Q8_0.gguf",)


def test_a_missing_quantisation_names_those_that_are_there() -> None:
    with pytest.raises(ModelNotFound, match=r"has no Q4_0; it has: Q8_0, F16, Q2_K, Q4_K_M.*such as a/b:Q8_0"):
        choose("a/b", FILES, "Q4_0")


def test_a_file_without_a_quantisation_is_called_by_its_name() -> None:
    assert labels(variants({"sub/model-v2.gguf": 0, "x-Q8_0.gguf": 0})) == ["model-v2", "Q8_0"]
    assert labels(variants({"a-Q8_0.gguf": 0, "a-it-Q8_0.gguf": 0})) == ["a-Q8_0", "a-it-Q8_0"]
    with pytest.raises(ModelNotFound, match="holds no GGUF"):
        choose("a/b", {"model.safetensors": 0, "mmproj-x.gguf": 0}, None)


def test_names_that_differ_in_case_alone_are_told_apart() -> None:
    """The parts of an earlier commit and the one file of a later one, both in the cache."""
    files = {**GPT_OSS, "gpt-oss-120b-MXFP4.gguf": 63_387_346_208}
    found = variants(files)
    for model, label in zip(found, labels(found), strict=True):
        assert choose("a/b", files, label).files == model.files


def test_a_model_that_lacks_a_part_is_not_chosen_and_said_to() -> None:
    left = {file: 0 for file in PARTS if "00002" not in file}
    assert choose("a/b", {**left, "tiny-q2_k.gguf": 0}, None).files == ("tiny-q2_k.gguf",)
    for wanted in (None, "Q8_0"):
        with pytest.raises(ModelNotFound, match="only 2 of the 3 parts of big-Q8_0: part 2 is missing"):
            choose("a/b", left, wanted)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_every_part_belongs_to_one_model_at_most(parts: list[tuple[str, int, int]]) -> None:
    files = {f"{name}-Q8_0-{number:05d}-of-{count:05d}.gguf": 1 for name, number, count in parts}
    found = variants(files)
    used = [file for model in found for file in model.files]
    assert len(used) == len(set(used)) == sum(model.size for model in found)
    for model in found:
        assert model.complete == (len(model.files) == model.count)
        assert list(model.files) == sorted(model.files)


# --- real repositories ----------------------------------------------------------------------------------------------

UD = "UD-Q4_K_XL/Qwen3.8-Flash-Next-UD-Q4_K_XL-0000{}-of-00004.gguf"


FITS = "the largest that fits; "


@pytest.mark.parametrize(
    ("files", "wanted", "memory", "first", "count", "reason", "warning"),
    [
        (QWEN_7B, None, None, "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", 2, "the default", ""),
        (QWEN_7B, "fp16", None, "qwen2.5-7b-instruct-fp16-00001-of-00004.gguf", 4, "asked for", ""),
        (QWEN_7B, "q4", None, "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", 2, "the first of 2 that match", ""),
        (PHI_3, None, None, "Phi-3-mini-4k-instruct-q4.gguf", 1, "there is no Q4_K_M; this is the closest", ""),
        (PHI_3, "F16", None, "Phi-3-mini-4k-instruct-fp16.gguf", 1, "asked for", ""),
        (QWEN_27B, None, None, "Qwen3.8-27B-UD-Q4_K_M.gguf", 1, "the default", ""),
        (QWEN_27B, "q4_k_xl", None, "Qwen3.8-27B-UD-Q4_K_XL.gguf", 1, "asked for", ""),
        (QWEN_FLASH, None, None, UD.format(1), 4, "the only model there", ""),
        (QWEN_FLASH, "q4_k_xl", None, UD.format(1), 4, "asked for", ""),
        (GPT_OSS, None, None, "gpt-oss-120b-mxfp4-00001-of-00003.gguf", 3, "the only model there", ""),
        (DRAFTERS, None, None, "gemma-4-12b-it-Q8_0.gguf", 1, "the only model there", ""),
        (QWEN_27B, None, 16, "Qwen3.8-27B-UD-IQ3_S.gguf", 1, FITS + r"UD-Q4_K_M: 16\.5 GB .* memory of 17\.2 GB", ""),
        (QWEN_7B, None, 5.8, "qwen2.5-7b-instruct-q4_0-00001-of-00002.gguf", 2, FITS + r"Q4_K_M: 4\.7 GB", ""),
        (QWEN_FLASH, None, 64, UD.format(1), 4, "the only model there", "111.3 GB of weights are more than three"),
        (QWEN_27B, "Q8_0", 16, "Qwen3.8-27B-Q8_0.gguf", 1, "asked for", "29.0 GB of weights are more than"),
        (QWEN_27B, "Q8_0", 64, "Qwen3.8-27B-Q8_0.gguf", 1, "asked for", ""),
    ],
)  # fmt: skip
def test_the_right_model_of_a_real_repository(
    files: dict[str, int], wanted: str | None, memory: float | None, first: str, count: int, reason: str, warning: str
) -> None:
    """A default that cannot fit into so many GiB falls to the largest that fits; else there is a warning."""
    choice = choose("a/b", files, wanted, None if memory is None else int(memory * GIB))
    assert (choice.files[0], len(choice.files)) == (first, count)
    assert re.match(reason, choice.reason)
    assert choice.warning.startswith(warning)
    assert bool(choice.warning) == bool(warning)


@pytest.mark.parametrize(
    "file",
    [
        "mmproj-BF16.gguf", "gemma-4-mmproj-f16.gguf", "mmproj/model.gguf", "imatrix_unsloth.gguf", "x.imatrix.gguf",
        "MTP/mtp-Qwen3.8-27B-Q4_0.gguf", "mtp-gemma-4-12b-it.gguf", "MTP/Foo-Q8_0-MTP.gguf",
        "dflash-Qwen3.6-27B-BF16.gguf", "dspark/dspark-Foo-Q8_0.gguf", "model.safetensors",
        "imatrix_unsloth.gguf_file",
    ],
)  # fmt: skip
def test_what_goes_beside_a_model_is_none(file: str) -> None:
    assert not is_model(file)


@pytest.mark.parametrize("word", ["assistant", "MTP", "DFlash", "lora", "eagle3", "EAGLE-3"])
def test_a_drafter_or_adapter_is_a_model_where_there_is_no_other(word: str) -> None:
    drafter, model = f"Foo-{word}-Q4_K_M.gguf", "Foo-Q8_0.gguf"
    assert choose("a/b", {drafter: 0, model: 0}, None).files == (model,)
    assert choose("a/b", {drafter: 0, f"Foo-{word}-Q8_0.gguf": 0}, None).files == (drafter,)
    assert choose("a/b", {drafter: 0, model: 0}, drafter).files == (drafter,)
    same = "Foo-Q4_K_M.gguf"
    assert {*labels(variants({drafter: 0, same: 0}))} == {drafter.removesuffix(".gguf"), "Q4_K_M"}
    assert labels(variants({drafter: 0})) == ["Q4_K_M"]
    assert choose("a/b", {drafter: 0, same: 0}, "Q4_K_M").files == (same,)
    assert choose("a/b", {"eagle3-Foo-Q4_K_M.gguf": 0, same: 0}, None).files == (same,)


# --- names ------------------------------------------------------------------------------------------------------------


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
        ("Qwen3:8B", HubName("Qwen/Qwen3-8B-GGUF", "Q4_K_M")),
        ("qwen3:8b-q8_0", HubName("Qwen/Qwen3-8B-GGUF", "Q8_0")),
        ("qwen3.5:4b-ud-q4_k_xl", HubName("unsloth/Qwen3.5-4B-GGUF", "UD-Q4_K_XL")),
        ("qwen3:30b-a3b-q8_0", HubName("Qwen/Qwen3-30B-A3B-GGUF", "Q8_0")),
        ("qwen2.5:0.5b-instruct-q4_K_M", HubName("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "Q4_K_M")),
        ("gemma3:4b-it", HubName("ggml-org/gemma-3-4b-it-GGUF", "Q4_K_M")),
        ("ann/tiny:q8_0", HubName("ann/tiny", "q8_0")),
        ("ann/tiny@Q8_0", HubName("ann/tiny", "Q8_0")),
        ("hf.co/ann/tiny.v2-GGUF:Q4_K_M", HubName("ann/tiny.v2-GGUF", "Q4_K_M")),
    ],
)
def test_short_names_mean_models_on_the_hub(text: str, expected: HubName) -> None:
    assert hub_name(text) == expected


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("qwen3:7b", "Did you mean qwen3:1.7b? qwen3 comes as qwen3:0.6b, qwen3:1.7b"),
        ("qwen3", "qwen3 comes as qwen3:0.6b, qwen3:1.7b"),
        ("qwen3:8b-fast", "Did you mean qwen3:8b?"),
        ("quen3:8b", "Did you mean qwen3:8b"),
        ("edgellm-drft", "Did you mean edgellm-draft"),
        ("nothing like it", "`edgellm catalog` others"),
    ],
)
def test_an_unknown_name_answers_with_the_nearest(text: str, advice: str) -> None:
    with pytest.raises(ModelNotFound) as raised:
        hub_name(text)
    assert advice in raised.value.next_step
    assert repr(text) in raised.value.what


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


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_an_entry_is_whole(model: CatalogModel) -> None:
    assert quant_of(f"{model.name}-{model.quant}.gguf") == model.quant
    assert 0 < model.active <= model.parameters
    assert 2.0 < 8 * model.size / (1e9 * model.parameters) < 12.0, "bits of a parameter, embeddings included"
    assert model.bytes_per_token <= model.size
    assert model.repo_id or model.name in ALIASES or model.wheel
    if model.repo_id:
        name = parse_hub_name(model.hub_name)
        assert (name.repo_id, name.quant, name.revision) == (model.repo_id, model.quant, None)
    if model.draft:
        draft = catalog().models[model.draft]
        assert draft.draft is None
        assert draft.size < model.size
        assert draft.bytes_per_token < model.bytes_per_token


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
