"""The hub of the testkit as a fixture, and everything set to use it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from edgellm.storage import list_models
from tests.storage.model_hub import COMMIT, REPO, Hub, running, tiny_gguf

__all__ = ["COMMIT", "REPO", "Hub", "cache", "hub", "names", "running", "tiny_gguf"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub with one repository, and everything set to use it."""
    files = {
        "README.md": b"words",
        "tiny-Q4_K_M.gguf": tiny_gguf(50_000, 1),
        "tiny-Q8_0.gguf": tiny_gguf(90_000, 2),
        "mmproj-tiny-f16.gguf": tiny_gguf(10),
    }
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with running(Hub({REPO: files})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def names() -> list[str]:
    """The names of the pulled models."""
    return [model.name for model in list_models() if model.origin == "hub"]
