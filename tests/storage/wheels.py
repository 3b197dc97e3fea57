"""The package of the catalogue's model in a folder, in which alone pip looks."""

from pathlib import Path

import pytest

from edgellm.storage import ALIASES, catalog
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
def bundled_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model of the home pair in place of SmolLM2's: it has the tokenizer of the small wheel's model."""
    monkeypatch.setattr("edgellm.storage.model_files.ALIASES", ALIASES | {"smollm2:draft": "draft.gguf"})
