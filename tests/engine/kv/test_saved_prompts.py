"""Which prompts are kept on disk, found again, and removed."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Ids
from edgellm.engine.kv.saved_prompts import LEAST, SavedPrompts, prompts_folder
from edgellm.system import HAS_MODES

pytestmark = pytest.mark.usefixtures("home")

SIZE = 5_000
"""Bytes of a state, without its ids."""


def text(n: int, last: int = 7) -> Ids:
    return np.append(np.arange(n - 1, dtype=np.int32), np.int32(last))


def writing(ids: Ids, state: bytes = b"s") -> Callable[[Path], bool]:
    """Write as llama.cpp does."""

    def write(path: Path) -> bool:
        assert path.exists()
        path.write_bytes(np.array([0x67677371, 2, len(ids)], np.uint32).tobytes() + ids.tobytes() + SIZE * state)
        return True

    return write


def keep(prompts: SavedPrompts, ids: Ids, kind: str = "k", *, whole: bool = False) -> None:
    prompts.keep(kind, ids, SIZE, writing(ids), whole=whole)


def files() -> list[Path]:
    return sorted(prompts_folder().iterdir()) if prompts_folder().exists() else []


def test_the_longest_beginning_is_found() -> None:
    prompts = SavedPrompts(10**6)
    short, long = np.append(text(300), text(300)), text(1_200, 2)
    keep(prompts, short)
    keep(prompts, long)
    asked = np.arange(2_000, dtype=np.int32)
    path = prompts.find("k", asked, 0, whole=False)
    assert path is not None
    assert path.read_bytes()[12 : 12 + 4 * len(long)] == long.tobytes()
    assert prompts.find("k", asked, 1_199, whole=False) is None
    assert prompts.find("k", asked, 0, whole=True) is None
    assert prompts.find("another kind", asked, 0, whole=False) is None
    exact = np.append(short, asked)
    assert prompts.find("k", exact, 0, whole=True) is not None
    if HAS_MODES:
        assert {one.stat().st_mode & 0o777 for one in files()} == {0o600}
        assert prompts_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data[:9], lambda data: data[:700] + b"x"])
def test_a_damaged_file_is_not_used_and_removed(change: Callable[[bytes], bytes]) -> None:
    prompts = SavedPrompts(10**6)
    keep(prompts, text(300))
    (path,) = files()
    path.write_bytes(change(path.read_bytes()))
    assert prompts.find("k", text(300), 0, whole=False) is None
    assert files() == []


def test_one_stands_for_another_that_is_nearly_the_same() -> None:
    prompts = SavedPrompts(10**6)
    keep(prompts, text(600))
    keep(prompts, text(598 + LEAST, 1))
    assert len(files()) == 1  # too little is new
    keep(prompts, text(600 + LEAST, 1))
    assert len(files()) == 1  # in its place
    keep(prompts, text(600 - LEAST, 1))
    keep(prompts, text(600, 1))
    assert len(files()) == 1  # this is known
    keep(prompts, np.append(text(600), text(600)))
    assert len(files()) == 2
    assert prompts.find("k", text(600 + LEAST, 1), 599 + LEAST, whole=True) is not None


def test_of_those_that_cannot_be_cut_only_a_beginning_does() -> None:
    prompts = SavedPrompts(10**6)
    keep(prompts, text(600, 1), whole=True)
    keep(prompts, np.append(text(600, 1), text(LEAST - 1)), whole=True)
    assert len(files()) == 1  # too little is new
    keep(prompts, text(600, 2), whole=True)
    keep(prompts, text(500, 499), whole=True)
    assert len(files()) == 3
    keep(prompts, np.append(text(600, 1), text(LEAST)), whole=True)
    assert len(files()) == 2  # in the place of both beginnings


def test_the_limit_holds_and_what_was_not_used_goes_first() -> None:
    prompts = SavedPrompts(3 * (SIZE + 12 + 4 * 400))
    for number in range(3):
        keep(prompts, np.full(400, number, dtype=np.int32))
        for path in files():
            os.utime(path, (path.stat().st_mtime - 100,) * 2)
    assert prompts.find("k", np.zeros(400, dtype=np.int32), 0, whole=False) is not None  # the oldest is used now
    keep(prompts, np.full(400, 3, dtype=np.int32))
    assert len(files()) == 3
    there = [number for number in range(4) if prompts.find("k", np.full(400, number, np.int32), 0, whole=False)]
    assert there == [0, 2, 3]
    prompts.keep("k", text(400), 10**6, writing(text(400)), whole=False)
    assert len(files()) == 3  # larger than all together may be: nothing is written


def test_what_a_crash_left_goes_like_what_was_not_used() -> None:
    prompts = SavedPrompts(16_000)
    keep(prompts, text(300))
    left = prompts_folder() / "a-1.new"
    left.write_bytes(bytes(SIZE))
    os.utime(left, (0, 0))
    keep(prompts, np.full(900, 3, np.int32))
    assert not left.exists()
    assert len(files()) == 2


def test_a_failure_leaves_nothing_and_raises_nothing() -> None:
    def full(path: Path) -> bool:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    prompts = SavedPrompts(10**6)
    prompts.keep("k", text(300), SIZE, full, whole=False)
    prompts.keep("k", text(300), SIZE, lambda _: False, whole=False)
    assert files() == []
    prompts_folder().rmdir()
    prompts_folder().write_bytes(b"a file in its place")
    keep(prompts, text(300))
    assert prompts.find("k", text(300), 0, whole=False) is None


def test_where_it_is_not_wanted_nothing_is_kept_or_used() -> None:
    on, off, none = SavedPrompts(10**6), SavedPrompts(10**6, lambda: False), SavedPrompts(0)
    for one in (off, none):
        keep(one, text(300))
    assert files() == []
    keep(on, text(300))
    for one in (off, none):
        assert one.find("k", text(300), 0, whole=False) is None
    assert on.find("k", text(300), 0, whole=False) is not None
