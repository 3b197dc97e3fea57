"""Which pair answers where none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.cli import options as model_options
from edgellm.errors import InvalidOption
from edgellm.llm import LLM
from edgellm.storage import pull
from edgellm.storage.default_pair import DEFAULT, HOME, SMOLLM2, VARIABLE, resolve_pair
from tests.storage.wheels import bundled_draft, packages

__all__ = ["bundled_draft", "packages"]


@pytest.fixture
def _real(packages: Path, bundled_draft: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pair is wanted, and its verifier can be fetched."""
    monkeypatch.delenv(VARIABLE)


def test_the_pair_of_the_variable_is_used(packages: Path) -> None:
    pull(SMOLLM2.verifier)
    assert resolve_pair(DEFAULT, DEFAULT) == (*HOME, "")
    assert resolve_pair("a.gguf", "b.gguf") == ("a.gguf", "b.gguf", "")


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "houme")
    with pytest.raises(InvalidOption, match="houme"):
        resolve_pair(DEFAULT, DEFAULT)


@pytest.mark.usefixtures("_real")
def test_the_home_pair_stands_in_until_the_real_one_is_here() -> None:
    with LLM.open(threads=1) as pair:
        assert pair.name == HOME.verifier
        (notice,) = pair.notices
    assert f"edgellm pull {SMOLLM2.verifier}" in notice
    pull(SMOLLM2.verifier)
    with LLM.open(threads=1) as pair:
        assert (pair.name, pair.notices) == (SMOLLM2.verifier, ())


@pytest.mark.usefixtures("_real")
def test_a_default_beside_a_named_model() -> None:
    pull(SMOLLM2.verifier)
    assert resolve_pair(DEFAULT, DEFAULT) == (*SMOLLM2, "")
    assert resolve_pair(DEFAULT, "other.gguf") == (SMOLLM2.draft, "other.gguf", "")
    assert resolve_pair(None, DEFAULT) == (None, SMOLLM2.verifier, "")
    assert resolve_pair(DEFAULT, HOME.verifier) == (*HOME, "")
    assert resolve_pair(HOME.draft, DEFAULT) == (*HOME, "")


def test_the_command_line_has_the_same_names() -> None:
    names = (model_options.DEFAULT, model_options.DEFAULT_DRAFT, model_options.DEFAULT_VERIFIER)
    assert names == (DEFAULT, *SMOLLM2)
