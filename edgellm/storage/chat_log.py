"""Past conversations, in one private database, and how long they are kept.

None of them leave this machine.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from edgellm.errors import ConversationChanged, ConversationTooLong, InvalidOption, StateDamaged
from edgellm.state import private_folder, read_state, write_state
from edgellm.storage.database import PrivateDatabase
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
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # `at` is in microseconds since then
_ID = re.compile(r"[0-9a-f]{8}")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversation (id TEXT PRIMARY KEY, at INTEGER NOT NULL, turns TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS conversation_age ON conversation (at)
"""

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
    go on."""

    folder: Path = field(default_factory=lambda: data_dir() / "history")

    @property
    def path(self) -> Path:
        """Return the file of the database. It need not exist."""
        return self.folder / "chats.sqlite3"

    @property
    def on(self) -> bool:
        """Return whether the history is stored and read: True unless `turn_off` was called."""
        return not os.path.lexists(self._off)

    def turn_off(self) -> None:
        """Stop every process from adding or reading until `turn_on`. Stored entries stay."""
        with self._database.errors("turned off"):
            write_state(private_folder(self.folder) / "off", "")

    def turn_on(self) -> None:
        """Undo `turn_off`."""
        with self._database.errors("turned on"):
            self._off.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove everything, whether the history is on or off. That needs no free space."""
        self._database.remove()

    def expire(self) -> None:
        """Remove what is older than the retention, whether the history is on or off."""
        before, database = oldest(), self._database
        if not database.is_missing:
            with database.writing("removed", keep=True) as db:
                db.remove("conversation WHERE at < ?", _microseconds(before))
        with database.errors("removed"):
            for path in self.damaged:
                if expired(path, before):
                    path.unlink()

    @property
    def damaged(self) -> list[Path]:
        """Return the damaged databases, which were set aside."""
        return self._database.aside()

    def all(self) -> list[Conversation]:
        """Return all conversations, the newest first."""
        return list(self._found("1"))

    def recent(self, limit_bytes: int = MAX_BYTES) -> list[tuple[str, str]]:
        """Return the newest questions with their replies, oldest first, that take at most `limit_bytes` of UTF-8
        together. Empty while the history is off."""
        found = list[tuple[str, str]]()
        for question, reply in (pair for one in self._found("1") for pair in reversed(one.replies)) if self.on else ():
            limit_bytes -= len(question.encode()) + len(reply.encode())
            if limit_bytes < 0:
                break
            found.append((question, reply))
        return found[::-1]

    def find(self, beginning: str) -> Conversation:
        """Return the conversation whose ID begins with `beginning`."""
        found = [one for one in self.all() if beginning and one.id.startswith(beginning.lower())]
        if len(found) != 1:
            what = "There is no conversation" if not found else f"There are {len(found)} conversations"
            raise InvalidOption(f"{what} whose ID begins with {beginning!r}.", "List them: edgellm conversations")
        return found[0]

    def latest(self) -> Conversation:
        """Return the conversation that was last added to. Raise InvalidOption if there is none, or nothing is read."""
        if self.on and (found := self.all()):
            return found[0]
        raise InvalidOption("There is no conversation to continue.", "Start one: edgellm chat; the history must be on.")

    def get(self, conversation_id: str) -> Conversation | None:
        """Return the conversation with this whole ID, None if there is none."""
        return next(self._found("id = ?", conversation_id), None)

    def save(self, conversation: Conversation, *, replaces: datetime | None = None) -> None:
        """Write a conversation over its earlier state, which has to be that of the time `replaces`, if given. While the
        history is off, do nothing."""
        if not self.on:
            return
        found = {"turns": conversation.turns, "name": conversation.name, "page": conversation.page}
        text = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
        if len(text) > MAX_BYTES:
            raise ConversationTooLong(
                f"This conversation has {len(text)} bytes; at most {MAX_BYTES} can be stored.", "Start a new one."
            )
        before = _microseconds(oldest())
        with self._database.writing() as db:
            if not self.on:  # the history may have been turned off meanwhile
                return
            if replaces is not None:
                found = db.execute("SELECT at FROM conversation WHERE id = ?", (conversation.id,)).fetchone()
                if found != (_microseconds(replaces),):
                    what = "was removed" if found is None else "was changed"
                    raise ConversationChanged(f"This conversation {what} meanwhile.", "Read it again.")
            values = (conversation.id, _microseconds(conversation.when), text.decode())
            db.execute("INSERT OR REPLACE INTO conversation VALUES (?, ?, ?)", values)
            db.remove("conversation WHERE at < ?", before)
            newest = "SELECT id FROM conversation ORDER BY at DESC LIMIT ?"
            db.remove(f"conversation WHERE id NOT IN ({newest})", MAX_CONVERSATIONS)

    def remove(self, conversation: Conversation) -> None:
        """Remove a conversation, if it is there, and all kept prompts, which may have its words."""
        from edgellm.storage.saved_prompts import remove_prompts  # the module imports the engine, which is slow

        remove_prompts()
        with self._database.writing() as db:
            db.remove("conversation WHERE id = ?", conversation.id)

    def _found(self, condition: str, *values: object) -> Iterator[Conversation]:
        """Yield the conversations in the database with this condition, the newest first, without damaged ones."""
        rows = f"SELECT * FROM conversation WHERE at >= ? AND {condition} ORDER BY at DESC LIMIT ?"  # noqa: S608
        before = _microseconds(oldest())
        with self._database.reading() as db:
            for row in db.execute(rows, (before, *values, MAX_CONVERSATIONS)):
                if (conversation := _conversation(*row)) is not None:
                    yield conversation

    @property
    def _off(self) -> Path:
        return self.folder / "off"

    @property
    def _database(self) -> PrivateDatabase:
        return PrivateDatabase(self.path, _SCHEMA, 1)


def _conversation(number: bytes, at: int, turns: bytes) -> Conversation | None:
    try:
        when, found, conversation_id = _time(at), json.loads(turns.decode()), number.decode()
        read = tuple((str(role), str(text)) for role, text in found["turns"])
        name, page = str(found["name"]), str(found["page"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    if when is None or not _ID.fullmatch(conversation_id) or not all(role in _ROLES for role, _ in read):
        return None
    return Conversation(conversation_id, when, read, name, page)


def _time(at: int | None) -> datetime | None:
    try:
        return None if at is None else _EPOCH + timedelta(microseconds=at)
    except (TypeError, OverflowError):
        return None


def _microseconds(when: datetime) -> int:
    return (when - _EPOCH) // timedelta(microseconds=1)


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


def oldest() -> datetime:
    """Return the time (UTC) of the oldest entry that the retention allows."""
    age = max_age()
    try:
        return datetime.min.replace(tzinfo=UTC) if age is None else datetime.now(UTC) - age
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)


def expired(path: Path, before: datetime) -> bool:
    """Return whether a file was last written before the given time; False where there is no file."""
    try:
        return path.lstat().st_mtime < before.timestamp()
    except (OSError, OverflowError, ValueError):
        return False


def _age_file() -> Path:
    return data_dir() / "history" / "max-age"
