"""Two devices that are paired: `guest` may have drafts verified by `host`, and the other way round."""

from pathlib import Path

import pytest

from edgellm.engine import ModelFile
from edgellm.rpc.layers import Cut
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.trust.trust import Trust
from edgellm.storage.layer_pieces import Manifest, cut_piece
from edgellm.storage.layer_store import LayerStore
from tests.rpc.strangers import befriend, certified, device
from tests.storage.pieces import layerwise


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
def manifest(verifier_path: Path) -> Manifest:
    return layerwise(verifier_path)


@pytest.fixture(scope="module")
def cut(verifier_path: Path) -> Cut:
    file = ModelFile.open(verifier_path)
    return lambda piece: cut_piece(file, piece.layers)


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers", 10**9)
