"""A model's fingerprint is its content's, computed once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from edgellm.places import cache_dir, data_dir
from edgellm.storage.fingerprint import fingerprint


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    digest = hashlib.file_digest

    def noted(*given: Any) -> Any:
        done.append("read")
        return digest(*given)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return done


def test_it_is_the_contents_and_read_once(home: Path, reads: list[str]) -> None:
    file = home / "a.gguf"
    file.write_bytes(b"one")
    assert fingerprint(file) == fingerprint(file) == hashlib.sha256(b"one").hexdigest()
    assert reads == ["read"]
    file.write_bytes(b"two!")
    assert fingerprint(file) == hashlib.sha256(b"two!").hexdigest()
    same = home / "b.gguf"
    same.write_bytes(b"two!")
    assert fingerprint(same) == fingerprint(file)
    os.utime(file, ns=(1, 1))
    before = len(reads)
    fingerprint(file)
    assert len(reads) == before + 1


def test_a_damaged_memory_is_forgotten(home: Path) -> None:
    file = home / "a.gguf"
    file.write_bytes(b"one")
    right = fingerprint(file)
    for rubbish in ("[]", "{", json.dumps({str(file): [3, 4]}), json.dumps({str(file): 7})):
        (cache_dir() / "fingerprints.json").write_text(rubbish)
        assert fingerprint(file) == right


def test_a_place_that_cannot_be_written_costs_time_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("EDGELLM_HOME", str(home / "file"))
    assert len(fingerprint(home / "file")) == 64


def test_the_hubs_cache_knows_already(home: Path, reads: list[str]) -> None:
    blob = home / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"x")
    link = home / "model.gguf"
    link.symlink_to(blob)
    assert fingerprint(link) == "ab" * 32
    assert reads == []


def test_places_without_a_home_are_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGELLM_HOME")
    assert data_dir().name == cache_dir().name == "edgellm"
