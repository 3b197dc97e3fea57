"""Files of edgellm's own, damaged in every way: reading ends at once, with what they hold or with one error."""

import json
import os
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm import state
from edgellm.errors import StateDamaged
from edgellm.llm.tools.values import read_json as read_valid
from edgellm.llm.tools.values import write_json
from edgellm.state import from_json, private_folder, read_json, read_state, read_toml, set_aside, write_state
from edgellm.system import cache_dir, data_dir, state_dir


@dataclass(frozen=True)
class Kind:
    name: str
    size: int
    rates: tuple[float, ...] = ()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a link": lambda path: path.symlink_to(path.parent / "elsewhere.json"),
    "a link to itself": lambda path: path.symlink_to(path),
    "too large": lambda path: path.write_bytes(b"[1]" + b" " * 2000),
    "empty": Path.touch,
    "deep lists": lambda path: path.write_bytes(b"[" * 100_000),
    "no UTF-8": lambda path: path.write_bytes(b'["\xff"]'),
    "a huge number": lambda path: path.write_bytes(b"[1" + b"0" * 400 + b"]"),
    "another type": lambda path: path.write_bytes(b"[null]"),
    "no list": lambda path: path.write_bytes(b"5"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_one_error_and_stays(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, elsewhere = tmp_path / "own.json", tmp_path / "elsewhere.json"
    elsewhere.write_text("[1]")
    DAMAGES[damage](path)
    with pytest.raises(StateDamaged, match=r"own\.json cannot be used: .{2,250}\. Move it away"):
        read_json(path, lambda found: [float(one) for one in found], 1000)
    aside = set_aside(path)
    assert os.path.lexists(aside)
    DAMAGES[damage](path)
    assert set_aside(path) != aside
    DAMAGES[damage](path)
    write_state(path, "[2]")
    assert read_json(path, list) == [2]
    assert elsewhere.read_text() == "[1]"


def test_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_state(tmp_path / "none") is None
    assert read_state(tmp_path / "file" / "none") is None
    assert read_json(tmp_path / "none", list) is None
    assert read_toml(tmp_path / "none") is None


def test_what_the_user_writes_may_be_a_link_and_keeps_its_modes(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("a = 1")
    (tmp_path / "real").chmod(0o644)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_toml(tmp_path / "link") == {"a": 1}
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o644
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateDamaged):
        read_toml(tmp_path / "pipe")


def test_everything_is_written_for_the_user_alone_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        write_state(cache_dir() / "deep" / "er" / "file", "{}")
        private_folder(data_dir() / "folder")
    finally:
        os.umask(before)
    modes = {f"{stat.S_IMODE(path.lstat().st_mode):o}" for path in home.rglob("*") if not path.is_symlink()}
    assert modes == {"600", "700"}


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(PermissionError, match="another user"):
            private_folder(path)


def test_what_was_open_to_others_is_closed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("not edgellm's")
    (tmp_path / "mine").chmod(0o644)
    for folder in (data_dir(), state_dir(), cache_dir()):
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "file").write_text("{}")
        (folder / "link").symlink_to(tmp_path / "mine")
        for path in (folder, folder / "inner"):
            path.chmod(0o777)
        (folder / "inner" / "file").chmod(0o666)
    assert read_state(data_dir() / "inner" / "file") == b"{}"
    assert stat.S_IMODE((data_dir() / "inner" / "file").stat().st_mode) == 0o600
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere").chmod(0o777)
    assert stat.S_IMODE(private_folder(tmp_path / "elsewhere").stat().st_mode) == 0o700
    state.close_to_others()
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (data_dir(), state_dir(), cache_dir())} == {0o700}
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o644


def test_a_record_is_of_the_types_that_it_declares() -> None:
    assert from_json(Kind, json.loads('{"name": "a", "size": 1, "rates": [1, 2.5]}')) == Kind("a", 1, (1.0, 2.5))
    for wrong in (
        {"name": 1, "size": 1}, {"name": "a", "size": True}, {"name": "a", "size": 1.0}, {"name": "a", "size": None},
        {"name": "a", "size": 1, "rates": [float("nan")]}, {"name": "a", "size": 1, "rates": ["1"]},
        {"name": "a", "size": 1, "rates": 1}, {"name": "a"}, {"name": "a", "size": 1, "more": 1},
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError, LookupError)):
            from_json(Kind, wrong)


def test_threads_that_write_one_file_leave_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"

    def write(letter: str) -> None:
        for _ in range(200):
            write_state(path, json.dumps(letter * 5_000))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write, letter) for letter in "abcd"]:
            done.result()
    assert set(json.loads(path.read_text(encoding="utf-8"))) < set("abcd")
    assert list(tmp_path.iterdir()) == [path]


# --- JSON of others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NaN", "NaN"), ("-Infinity", "-Infinity"), ("1e999", "1e999"), ("[-1e999]", ["-1e999"]), ("1e3", 1000.0),
        ("9" * 5000, "9" * 5000), ("1" * 400, "1" * 400),
        ("1" * 300, int("1" * 300)), ("-0", 0), ("5.0", 5.0), ('"a\nb"', "a\nb"),
    ],
)  # fmt: skip
def test_numbers_that_json_has_not_are_texts(text: str, value: object) -> None:
    assert read_valid(text) == (value, len(text))


@given(st.recursive(st.floats() | st.text(st.characters(codec=None)), lambda inner: st.lists(inner) | st.dictionaries(
    st.text(st.characters(codec=None)), inner)))  # fmt: skip
def test_whatever_is_read_is_written_as_valid_json(value: Any) -> None:
    written = write_json(read_valid(json.dumps(value))[0])
    written.encode()
    json.loads(written, parse_constant=pytest.fail)
