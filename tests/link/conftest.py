"""Two devices that are paired: `guest` may have drafts verified by `host`, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.link.identity import Identity
from edgellm.link.trust import Trust
from tests.link.strangers import befriend, certified, device


@pytest.fixture
def host(tmp_path: Path) -> Trust:
    return device(tmp_path / "host")


@pytest.fixture
def guest(tmp_path: Path, host: Trust) -> Trust:
    """Paired with the host."""
    made = device(tmp_path / "guest")
    befriend(host, made)
    return made


@pytest.fixture
def authority(tmp_path: Path) -> Identity:
    """A paired device whose certificate may sign others, as none that edgellm would pair with may."""
    return certified(ca=True)
