"""Past conversations, a private file each, and how long they are kept.

None of them leave this machine.
"""

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from edgellm.errors import ConversationChanged, ConversationTooLong, HistoryUnusable, InvalidOption, StateDamaged
from edgellm.state import hold_lock, private_folder, read_json, read_state, system_errors, write_state
from edgellm.system import data_dir

DEFAULT_AGE = timedelta(days=365)
FOREVER = "forever"
_DAYS = {"d": 1, "w": 7, "m": 30, "y": 365}
_AGE = re.compile(r"(\d{1,5})([dwmy])")
_HINT = f"Give days, weeks, months or years, such as 90d, 12w, 6m or 2y; or {FOREVER}."
MAX_BYTES = 2**20
"""Bytes of a conversation."""
MAX_CONVERSATIONS = 300
_ROLES = ("system", "user", "assistant")
_ID = re.compile(r"[0-9a-f]{8}")

Turns = tuple[tuple[str, str], ...]
"""Roles and texts, the oldest first."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation so far, last added to at `when`, in UTC. `name`: the user's title, if any. `page`: the web page's
    additions in its own form, such as other versions of the turns, thoughts, and who wrote each word."""

    id: str
    when: datetime
    turns: Turns
    name: str = ""
    page: str = ""

    @classmethod
    def new(cls) -> "Conversation":
        """Return a conversation without turns."""
        return cls(secrets.token_hex(4), datetime.now(UTC), ())

    def with_turns(self, turns: Sequence[tuple[str, str]]) -> "Conversation":
        """Return this conversation as of now, with these turns."""
        return replace(self, when=datetime.now(UTC), turns=tuple(turns))

    @property
    def title(self) -> str:
        """Return the `name`, or the first question."""
        return self.name or _question(next((text for role, text in self.turns if role == "user"), ""))

    @property
    def replies(self) -> list[tuple[str, str]]:
        """Return the questions, each with its reply."""
        return [
            (_question(asked), reply)
            for (role, asked), (other, reply) in pairwise(self.turns)
            if (role, other) == ("user", "assistant")
        ]


def _question(text: str) -> str:
    """Return a question without the paragraphs before it."""
    return text.strip().rpartition("\n\n")[2]


@dataclass(frozen=True, slots=True)
class History:
    """The newest `MAX_CONVERSATIONS` past conversations within the retention (`max_age`), in `folder`, which need not
    exist, for any number of processes. Every method raises `HistoryUnusable`, which a chat should show as a notice, and
    go on. A file that holds no conversation is passed over."""

    folder: Path = field(default_factory=lambda: data_dir() / "history")

    @property
    def path(self) -> Path:
        """Return the folder of the conversations, each with its time as the file's. It need not exist."""
        return self.folder / "chats"

    @property
    def on(self) -> bool:
        """Return whether the history is stored and read: True unless `turn_off` was called."""
        return not os.path.lexists(self._off)

    def turn_off(self) -> None:
        """Stop every process from adding or reading until `turn_on`. Stored entries stay."""
        with system_errors(HistoryUnusable, self.folder, "turned off"):
            write_state(private_folder(self.folder) / "off", "")

    def turn_on(self) -> None:
        """Undo `turn_off`."""
        with system_errors(HistoryUnusable, self.folder, "turned on"):
            self._off.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove everything, whether the history is on or off. That needs no free space."""
        with system_errors(HistoryUnusable, self.path, "removed"):
            if os.path.lexists(self.path):
                shutil.rmtree(self.path)

    @property
    def damaged(self) -> list[Path]:
        """Return the files that hold no conversation."""
        with system_errors(HistoryUnusable, self.path, "read"):
            return [path for path in self._files() if _read(path) is None]

    def all(self) -> list[Conversation]:
        """Return all conversations, the newest first."""
        return list(self._found())

    def recent(self, limit_bytes: int = MAX_BYTES) -> list[tuple[str, str]]:
        """Return the newest questions with their replies, oldest first, that take at most `limit_bytes` of UTF-8
        together. Empty while the history is off."""
        found = list[tuple[str, str]]()
        for question, reply in (pair for one in self._found() for pair in reversed(one.replies)) if self.on else ():
            limit_bytes -= len(question.encode()) + len(reply.encode())
            if limit_bytes < 0:
                break
            found.append((question, reply))
        return found[::-1]

    def find(self, beginning: str) -> Conversation:
        """Return the conversation whose ID begins with `beginning`."""
        found = list(self._found(beginning.lower())) if beginning else []
        if len(found) != 1:
            what = "There is no conversation" if not found else f"There are {len(found)} conversations"
            raise InvalidOption(f"{what} whose ID begins with {beginning!r}.", "List them: edgellm conversations")
        return found[0]

    def latest(self) -> Conversation:
        """Return the conversation that was last added to. Raise InvalidOption if there is none, or nothing is read."""
        if self.on and (found := next(self._found(), None)):
            return found
        raise InvalidOption("There is no conversation to continue.", "Start one: edgellm chat; the history must be on.")

    def get(self, conversation_id: str) -> Conversation | None:
        """Return the conversation with this whole ID, None if there is none."""
        return next((one for one in self._found(conversation_id) if one.id == conversation_id), None)

    def save(self, conversation: Conversation, *, replaces: datetime | None = None) -> None:
        """Write a conversation over its earlier state, which has to be that of the time `replaces`, if given. While the
        history is off, do nothing."""
        if not self.on:
            return
        found = {"when": conversation.when.isoformat(), "turns": conversation.turns, "name": conversation.name,
                 "page": conversation.page}  # fmt: skip
        text = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
        if len(text) > MAX_BYTES:
            raise ConversationTooLong(
                f"This conversation has {len(text)} bytes; at most {MAX_BYTES} can be stored.", "Start a new one."
            )
        with self._locked("written"):
            if not self.on:  # the history may have been turned off meanwhile
                return
            if replaces is not None:
                before = self.get(conversation.id)
                if before is None or before.when != replaces:
                    what = "was removed" if before is None else "was changed"
                    raise ConversationChanged(f"This conversation {what} meanwhile.", "Read it again.")
            write_state(path := self._file(conversation), text, durable=True)
            os.utime(path, (max(0.0, conversation.when.timestamp()),) * 2)
            self._remove_old()

    def remove(self, conversation: Conversation) -> None:
        """Remove a conversation, if it is there, and all kept prompts, which may have its words."""
        from edgellm.engine.kv.saved_prompts import remove_prompts  # the module imports the engine, which is slow

        remove_prompts()
        with system_errors(HistoryUnusable, self.path, "removed"):
            self._file(conversation).unlink(missing_ok=True)

    def _found(self, beginning: str = "") -> Iterator[Conversation]:
        """Yield the conversations within the retention whose IDs begin so, the newest first."""
        before = oldest()
        with system_errors(HistoryUnusable, self.path, "read"):
            for path in self._files():
                one = _read(path) if path.name.startswith(beginning) else None
                if one is not None and one.when.timestamp() >= before:
                    yield one

    def _files(self) -> list[Path]:
        """Return the files in the folder, the newest first; close it to other users."""
        found = list[tuple[float, Path]]()
        if os.path.lexists(self.folder):
            for path in private_folder(private_folder(self.folder) / self.path.name).iterdir():
                with suppress(FileNotFoundError):  # another process has removed it
                    found.append((path.lstat().st_mtime, path))
        return [path for _, path in sorted(found, reverse=True)]

    def _remove_old(self) -> None:
        """Remove the files that are too old or too many, with the lock held."""
        before = oldest()
        for number, path in enumerate(self._files()):
            if number >= MAX_CONVERSATIONS or expired(path, before):
                with suppress(OSError):  # it is a folder, and no file of ours
                    path.unlink()

    def _file(self, conversation: Conversation) -> Path:
        return self.path / f"{conversation.id}.json"

    @property
    def _off(self) -> Path:
        return self.folder / "off"

    @contextmanager
    def _locked(self, action: str) -> Iterator[None]:
        """Hold off other processes that change files. The conversations cannot be `action` in errors."""
        with system_errors(HistoryUnusable, self.path, action), hold_lock(private_folder(self.folder) / "lock"):
            yield


def _read(path: Path) -> Conversation | None:
    """Return the conversation in a file; None where it holds none."""
    with suppress(StateDamaged):
        return read_json(path, partial(_conversation, path.stem), MAX_BYTES)
    return None


def _conversation(conversation_id: str, found: Any) -> Conversation:
    """Return a conversation from JSON. Raise any of `state.MALFORMED` for JSON of another form."""
    turns = tuple((str(role), str(text)) for role, text in found["turns"])
    if not _ID.fullmatch(conversation_id) or not all(role in _ROLES for role, _ in turns):
        raise ValueError("it is no conversation")
    when = datetime.fromisoformat(found["when"]).astimezone(UTC)
    return Conversation(conversation_id, when, turns, str(found["name"]), str(found["page"]))


def parse_age(text: str) -> timedelta | None:
    """Return the age that `text` means, None for "forever". Raise InvalidOption if the text is not an age."""
    text = text.strip().lower()
    if text == FOREVER:
        return None
    if (found := _AGE.fullmatch(text)) is None or int(found[1]) == 0:
        raise InvalidOption(f"{text[:40]!r} is not an age.", _HINT)
    return timedelta(days=int(found[1]) * _DAYS[found[2]])


def describe_age(age: timedelta | None) -> str:
    """Return an age as `parse_age` reads it."""
    return FOREVER if age is None else f"{age.days}d"


def max_age() -> timedelta | None:
    """Return the retention: of `set_max_age`, else `DEFAULT_AGE`; None for no limit."""
    try:
        stored = read_state(_age_file(), 100)
        return DEFAULT_AGE if stored is None else parse_age(stored.decode())
    except (StateDamaged, InvalidOption, UnicodeDecodeError):
        return DEFAULT_AGE


def set_max_age(age: timedelta | None) -> None:
    """Set the retention for every process. Raise OSError if it cannot be written."""
    write_state(_age_file(), describe_age(age))


def oldest() -> float:
    """Return the time of the oldest entry that the retention allows, in seconds since 1970."""
    age = max_age()
    return -inf if age is None else time.time() - age.total_seconds()


def expired(path: Path, before: float) -> bool:
    """Return whether a file was last written before the given time; False where there is no file."""
    with suppress(OSError):
        return path.lstat().st_mtime < before
    return False


def _age_file() -> Path:
    return data_dir() / "history" / "max-age"
