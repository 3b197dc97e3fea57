"""A model's fingerprint is its content's, computed once."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from edgellm.engine import ModelFile
from edgellm.errors import ModelNotFound
from edgellm.storage.fingerprint import FileHash, _PartHash, fingerprint, fingerprint_of
from edgellm.system import cache_dir
from testkit.gguf.split_file import split
from tests.watching import Calls, calls_of

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return calls_of(monkeypatch, _PartHash, "compute")


def test_it_is_the_contents_and_read_once(tmp_path: Path, reads: Calls) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"one")
    assert fingerprint(file) == fingerprint(file) == hashlib.sha256(b"one").hexdigest()
    assert len(reads) == 1
    file.write_bytes(b"two!")
    assert fingerprint(file) == hashlib.sha256(b"two!").hexdigest()
    same = tmp_path / "b.gguf"
    same.write_bytes(b"two!")
    assert fingerprint(same) == fingerprint(file)
    os.utime(file, ns=(1, 1))
    before = len(reads)
    fingerprint(file)
    assert len(reads) == before + 1


def test_a_damaged_memory_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"one")
    right = fingerprint(file)
    for rubbish in ("[]", "{", json.dumps({str(file): [3, 4]}), json.dumps({str(file): 7})):
        (cache_dir() / "fingerprints.json").write_text(rubbish)
        assert fingerprint(file) == right


def test_the_hubs_cache_knows_already(tmp_path: Path, reads: Calls) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"x")
    link = tmp_path / "model.gguf"
    link.symlink_to(blob)
    assert fingerprint(link) == "ab" * 32
    assert reads == []


def test_that_of_a_split_model_depends_on_every_part(tmp_path: Path, draft_path: Path, reads: Calls) -> None:
    paths = ModelFile.open(split(draft_path, tmp_path, 3)).paths
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    found = fingerprint(paths[0])
    assert found == fingerprint_of(hashes) == hashlib.sha256("".join(f"{one}\n" for one in hashes).encode()).hexdigest()
    assert found not in (*hashes, fingerprint(draft_path))
    before = len(reads)
    assert (fingerprint(paths[0]), FileHash(paths[0]).quick()) == (found, found)
    assert len(reads) == before
    data = bytearray(paths[2].read_bytes())
    data[-1] ^= 1
    paths[2].write_bytes(data)
    assert fingerprint(paths[0]) != found
    paths[1].unlink()
    assert FileHash(paths[0]).quick() is None
    with pytest.raises(ModelNotFound, match="00002-of-00003"):
        fingerprint(paths[0])
