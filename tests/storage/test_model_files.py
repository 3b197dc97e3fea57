"""What a model may be called, and what it may not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EdgeError, InvalidOption, ModelNotFound
from edgellm.storage import HubName, model_files, parse_hub_name, resolve


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
    [
        "../x",
        "a/..",
        "a/b/c",
        "a/b..c",
        "a/b:../../c",
        "a/b:",
        "/etc/passwd",
        "a--b/c",
        "a/b--c",
        "a\\b/c",
        "a/b\n",
        "a /b",
        "",
        "a/é",
    ],
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_hub_name(text)


@given(st.text(max_size=40))
def test_no_name_leads_out_of_the_cache(text: str) -> None:
    try:
        name = parse_hub_name(text)
    except InvalidOption:
        return
    assert "/" not in name.folder
    assert ".." not in name.folder
    assert name.folder.count("--") == 2


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


def test_a_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="is a folder"):
        resolve(str(tmp_path))


def test_a_misspelt_alias_is_guessed() -> None:
    with pytest.raises(ModelNotFound, match="Did you mean edgellm-verifier"):
        resolve("edgellm-verifer")


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


def test_a_hub_name_that_is_not_here_says_how_to_fetch_it(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="edgellm pull ann/tiny:Q8_0"):
        resolve("ann/tiny:Q8_0")
