"""A hub on loopback, and a cache and a history of its own for each test."""

import os
from pathlib import Path

import pytest

from edgellm.storage.chat_log import History
from edgellm.storage.layer_pieces import Manifest
from edgellm.storage.layer_store import LayerStore
from tests.storage.hub import cache, hub
from tests.storage.pieces import layerwise

__all__ = ["cache", "history", "hub"]


@pytest.fixture(autouse=True)
def _no_power_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing waits for no disk: only a power failure would tell the difference."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "data" / "history")


@pytest.fixture(scope="module")
def manifest(draft_path: Path) -> Manifest:
    return layerwise(draft_path)


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers", 10**9)
