"""The files in which earlier versions stored past replies, typed lines and conversations, for `storage.chat_log`.

Past replies and typed lines were lines of JSON, typed lines before that in the form of prompt_toolkit; each
conversation was a file of JSON.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgellm.errors import StateDamaged
from edgellm.places import data_dir, state_dir
from edgellm.storage.state import read_state, write_state

MAX_BYTES = 2**20
"""Bytes that are read of a file, those at its end: no earlier version wrote more."""
ROLES = ("system", "user", "assistant")
_MAX_PROMPT_LINES = 1000
_NAMES = {"reply": "conversations.jsonl", "typed": "typed.jsonl"}
_CONVERSATION = re.compile(r"[0-9a-f]{8}\.json")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MALFORMED = (ValueError, TypeError, LookupError, OverflowError, RecursionError)

Entry = tuple[datetime, str, str]
"""When a question was asked (UTC), the question, and its reply."""
Turns = tuple[tuple[str, str], ...]
"""Roles and texts, the oldest first."""


@dataclass(frozen=True, slots=True)
class OldFile:
    """A file of an earlier version: entries of `kind` "reply" or "typed", or a "conversation"."""

    path: Path
    kind: str
    data: bytes

    def entries(self, start: int = 0) -> Iterator[Entry]:
        """Yield the readable entries behind the first `start` bytes, the oldest first."""
        if self.path == old_prompt_file():
            yield from _prompt_entries(self.path, self.data[start:])
        elif self.kind != "conversation":
            yield from (entry for line in self.data[start:].split(b"\n") if (entry := _entry(line)) is not None)

    def conversation(self) -> tuple[datetime, Turns] | None:
        """Return the time of the last turn and the turns; None where the file holds no conversation."""
        if self.kind != "conversation":
            return None
        try:
            found = json.loads(self.data.decode())
            return _time(found["when"]), turns_from_json(found["turns"])
        except _MALFORMED:
            return None

    def remove(self) -> None:
        """Remove the file. Lines of JSON that cannot be read stay in it.

        Raises:
            OSError: it cannot be removed.
        """
        lines = self.data.split(b"\n") if self.path.name in _NAMES.values() else []
        if damaged := [line for line in lines if line and _entry(line) is None]:
            found = self.path.lstat()
            write_state(self.path, b"\n".join(damaged) + b"\n")
            os.utime(self.path, ns=(found.st_atime_ns, found.st_mtime_ns))  # they are as old as they were
        else:
            self.path.unlink()
        self.path.with_name(f"{self.path.name}.new").unlink(missing_ok=True)  # half a copy, left by a crash


def old_files(folder: Path, on: bool) -> Iterator[OldFile]:
    """Yield the old files of the history in `folder` with readable content. Unreadable ones, such as links, are
    skipped, and so is `old_prompt_file` while the history is not `on`."""
    paths = [(folder / name, kind) for kind, name in _NAMES.items()]
    if on and folder == data_dir() / "history":
        paths.insert(1, (old_prompt_file(), "typed"))
    paths += [
        (path, "conversation") for path in leftover_files(folder, "conversation") if _CONVERSATION.fullmatch(path.name)
    ]
    for path, kind in paths:
        try:
            data = read_state(path)
        except StateDamaged:
            continue
        if data is not None:
            if len(data) > MAX_BYTES:
                data = data[-MAX_BYTES:].partition(b"\n")[2]
            found = OldFile(path, kind, data)
            if found.conversation() or any(True for _ in found.entries()):
                yield found


def leftover_files(folder: Path, kind: str) -> list[Path]:
    """Return all files of a kind that earlier versions left beside the history in `folder`, readable or not."""
    if kind in _NAMES:
        return sorted(folder.glob(f"{_NAMES[kind]}*"))
    conversations = _conversations(folder)
    found = [] if conversations.is_symlink() else conversations.glob("*.json*")
    return sorted(path for path in found if _CONVERSATION.match(path.name) and (path.is_symlink() or not path.is_dir()))


def old_locks(folder: Path) -> list[Path]:
    """Return the files that earlier versions lock while they write. They need not exist, their folders do."""
    conversations = _conversations(folder)
    return [folder_ / "lock" for folder_ in (folder, conversations) if folder_.is_dir() and not folder_.is_symlink()]


def old_prompt_file() -> Path:
    """Return the file in which the first versions stored typed lines, without limits. It need not exist."""
    return state_dir() / "history"


def replace_surrogates(text: str) -> str:
    """Return `text` with lone surrogates, which are not characters, replaced by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def turns_from_json(found: Any) -> Turns:
    """Return turns from a list of roles and texts.

    Raises:
        ValueError, TypeError: it is something else.
    """
    turns = tuple((str(role), str(text)) for role, text in found)
    if not all(role in ROLES for role, _ in turns):
        raise ValueError("a turn has no role")
    return turns


def _conversations(folder: Path) -> Path:
    return folder.with_name("conversations")


def _entry(line: bytes) -> Entry | None:
    """Return the entry in a line of JSON, None where it is damaged."""
    try:
        found = json.loads(line.decode())
        return _time(found["when"]), replace_surrogates(found["question"]), replace_surrogates(found["reply"])
    except _MALFORMED:
        return None


def _time(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError("a time without a time zone")
    return when.astimezone(UTC)


def _prompt_entries(path: Path, data: bytes) -> list[Entry]:
    """Return the newest typed texts from blocks of lines that begin with "+", as old as the file is."""
    texts: list[str] = []
    in_block = False
    for line in data.decode("utf-8", "replace").split("\n"):
        if not line.startswith("+"):
            in_block = False
        elif in_block:
            texts[-1] += "\n" + line[1:]
        else:
            texts.append(line[1:])
            in_block = True
    when = datetime.fromtimestamp(min(max(path.lstat().st_mtime, 0.0), time.time()), UTC)
    return [(when, text, "") for text in texts[-_MAX_PROMPT_LINES:]]
