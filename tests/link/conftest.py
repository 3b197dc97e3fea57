"""Two devices that are paired: `guest` may have drafts verified by `host`, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.link.carry import Cut
from edgellm.link.identity import Identity
from edgellm.link.trust import Trust
from edgellm.store.layers import LayerStore
from edgellm.store.recipe import Recipe, recipe_of
from tests.link.layering import cutter
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


@pytest.fixture(scope="module")
def recipe(verifier_path: Path) -> Recipe:
    return recipe_of(verifier_path)


@pytest.fixture(scope="module")
def cut(verifier_path: Path, recipe: Recipe) -> Cut:
    return cutter(verifier_path, recipe)


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers", 10**9)
