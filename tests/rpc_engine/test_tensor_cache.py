"""What of received weights is used again: whole files, of the device that sent them, within a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgellm.rpc_engine.service import TensorCache


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path, limit=100)


def opened(cache: TensorCache, owner: str = "a", size: int = 10) -> Path:
    folder = cache.open(owner, size)
    assert folder is not None
    return folder


def put(folder: Path, name: str, size: int, used: int = 0) -> Path:
    file = folder / "rpc" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(size))
    os.utime(file, (used, used))
    return file


def test_files_count_once_the_model_was_loaded(cache: TensorCache) -> None:
    folder = opened(cache)
    whole = put(folder, "1", 10)
    cache.confirm(folder)
    cut_off = put(folder, "2", 5)
    assert cache.size("a") == 10
    assert opened(cache) == folder
    assert whole.exists()
    assert not cut_off.exists()


def test_devices_do_not_share_files(cache: TensorCache) -> None:
    put(opened(cache, "a"), "1", 10)
    cache.confirm(opened(cache, "a"))
    assert not list(opened(cache, "b").iterdir())
    assert cache.size("b") == 0


def test_room_is_made_by_what_was_written_first_and_others_files_before_own(cache: TensorCache) -> None:
    own, other = opened(cache, "own"), opened(cache, "other")
    oldest, old, new = put(own, "1", 30, used=1), put(other, "2", 30, used=2), put(other, "3", 30, used=3)
    for folder in (own, other):
        cache.confirm(folder)
    opened(cache, "own", size=40)
    assert [file.exists() for file in (oldest, old, new)] == [True, False, True]
    opened(cache, "own", size=100)
    assert not any(file.exists() for file in (oldest, old, new))


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert TensorCache(tmp_path / "file").open("a", 1) is None


def test_a_damaged_list_is_no_list(cache: TensorCache) -> None:
    folder = opened(cache)
    file = put(folder, "1", 10)
    cache.confirm(folder)
    (folder / "whole.json").write_text("[[[")
    opened(cache)
    assert not file.exists()
