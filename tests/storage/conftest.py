"""A hub on loopback, and a cache and a history of its own for each test."""

from pathlib import Path

import pytest

from edgellm.storage import History
from tests.storage.hub import cache, hub

__all__ = ["cache", "history", "hub"]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "data" / "history")
