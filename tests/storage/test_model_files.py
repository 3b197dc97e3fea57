"""The files that names stand for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EdgeError, ModelNotFound
from edgellm.storage import list_models, model_files, pull, remove, resolve
from edgellm.storage.model_files import removable
from tests.storage.hub import Hub, tiny_gguf


@given(st.text(max_size=40))
def test_resolve_answers_any_text_with_a_file_or_an_error_of_ours(text: str) -> None:
    with suppress(EdgeError):
        assert resolve(text).is_file()


def test_a_path_is_a_model_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("sub/model").read_bytes() == b"x"
    assert resolve("~/sub/model").read_bytes() == b"x"


@pytest.mark.parametrize(
    "name",
    ["./none", "none.gguf", "sub/none.gguf", "~/none", "/none", "", "~\0", "~\ud800", "/\0", "x" * 300 + ".gguf"],
)
def test_a_missing_file_is_not_taken_for_a_hub_name(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"There is no file|is a folder"):
        resolve(name)


def test_the_bundled_pair_is_found_in_a_wheel_and_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_PACKAGE", tmp_path / "edgellm")
    with pytest.raises(ModelNotFound, match="Install edgellm again"):
        resolve("edgellm-draft")
    for place in (tmp_path / "models", tmp_path / "edgellm" / "bundled"):
        place.mkdir(parents=True)
        (place / "draft.gguf").touch()
        assert resolve("edgellm-draft") == place / "draft.gguf"


def test_a_short_name_is_a_name_everywhere(hub: Hub, cache: Path) -> None:
    data = tiny_gguf(3_000)
    hub.repos["Qwen/Qwen3-8B-GGUF"] = {"Qwen3-8B-Q4_K_M.gguf": data, "Qwen3-8B-Q8_0.gguf": tiny_gguf(5_000)}
    assert pull("qwen3:8b").path.read_bytes() == data
    assert resolve("qwen3:8b") == resolve("Qwen3:8B-Q4_K_M") == resolve("Qwen/Qwen3-8B-GGUF")
    with pytest.raises(ModelNotFound, match=r"qwen3:8b-q8_0 is not on this machine; available .*: Q4_K_M"):
        resolve("qwen3:8b-q8_0")
    assert pull("qwen3:8b-q8_0").plan.file == "Qwen3-8B-Q8_0.gguf"
    here = [(model.name, model.repo_id) for model in list_models() if model.origin == "hub"]
    assert here == [("qwen3:8b", "Qwen/Qwen3-8B-GGUF"), ("qwen3:8b-q8_0", "Qwen/Qwen3-8B-GGUF")]
    assert [model.name for model in removable("qwen3:8b")] == ["qwen3:8b"]
    remove("qwen3:8b")
    assert [model.name for model in list_models() if model.origin == "hub"] == ["qwen3:8b-q8_0"]


def test_a_model_of_the_catalogue_that_is_not_here_says_how_to_get_it_and_how_large_it_is(cache: Path) -> None:
    with pytest.raises(ModelNotFound) as raised:
        resolve("qwen3:8b")
    assert raised.value.what == "qwen3:8b is not on this machine."
    assert raised.value.next_step == "Fetch it with: edgellm pull qwen3:8b (5.0 GB, Qwen/Qwen3-8B-GGUF:Q4_K_M)"
    with pytest.raises(ModelNotFound, match=r"edgellm pull qwen3:8b-q8_0$"):
        resolve("qwen3:8b-q8_0")


def test_an_unknown_name_answers_with_the_nearest_of_those_that_are_here_too(hub: Hub) -> None:
    hub.repos["ann/mistral-7b"] = {"mistral-7b-Q4_K_M.gguf": tiny_gguf(3_000)}
    pull("ann/mistral-7b")
    with pytest.raises(ModelNotFound, match="Did you mean ann/mistral-7b:Q4_K_M"):
        resolve("mistral-7b-Q4_K_M")
