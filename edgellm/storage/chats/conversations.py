"""Conversations that can be continued: the newest few hundred, each in a private file of its own.

They are kept where the history is, and only while that is on; nothing of them leaves this machine.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from edgellm.errors import HistoryUnusable, InvalidOption, TrustUnusable
from edgellm.places import data_dir
from edgellm.storage.chats.retention import expired, oldest
from edgellm.storage.private_files import MOST_BYTES, locked, read_private, write_private

MOST = 300
_ID = re.compile(r"[0-9a-f]{8}")
_LEFT = re.compile(r"[0-9a-f]{8}\.json\..*")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation so far: `turns` are roles and texts, the oldest first; `when` is the last addition, in UTC."""

    id: str
    when: datetime
    turns: tuple[tuple[str, str], ...]

    @classmethod
    def new(cls) -> Conversation:
        """Return a conversation in which nothing has been said."""
        return cls(secrets.token_hex(4), datetime.now(UTC), ())

    def said(self, turns: Sequence[tuple[str, str]]) -> Conversation:
        """Return this conversation as of now, with these turns."""
        return replace(self, when=datetime.now(UTC), turns=tuple(turns))

    @property
    def title(self) -> str:
        """The first question, without the paragraphs before it."""
        asked = next((text for role, text in self.turns if role == "user"), "")
        return asked.strip().rpartition("\n\n")[2]


@dataclass(frozen=True, slots=True)
class Conversations:
    """The conversations in `folder`, which need not exist yet. Any number of processes may use it.

    Anything that is not a conversation in a plain file is skipped. A conversation is removed when nothing was added to
    it for longer than the retention (`chats.retention`). Every method raises TrustUnusable where a file cannot be
    written.
    """

    folder: Path = field(default_factory=lambda: data_dir() / "conversations")

    def all(self) -> list[Conversation]:
        """Return all conversations, the newest first."""
        before = oldest()
        return [one for one in self._all() if one.when >= before]

    def _all(self) -> list[Conversation]:
        found = [self._read(path) for path in self._paths()]
        return sorted((one for one in found if one is not None), key=lambda one: one.when, reverse=True)

    def find(self, beginning: str) -> Conversation:
        """Return the conversation whose ID begins with `beginning`.

        Raises:
            InvalidOption: there is none, or there are several.
        """
        paths = [path for path in self._paths() if path.stem.startswith(beginning.lower())] if beginning else []
        before = oldest()
        found = [one for one in map(self._read, paths) if one is not None and one.when >= before]
        if len(found) != 1:
            what = "There is no conversation" if not found else f"There are {len(found)} conversations"
            raise InvalidOption(f"{what} whose ID begins with {beginning!r}.", "See: edgellm conversations")
        return found[0]

    def latest(self) -> Conversation:
        """Return the conversation that was last added to.

        Raises:
            InvalidOption: there is none.
        """
        found = self.all()
        if not found:
            raise InvalidOption(
                "There is no conversation to continue.", "Begin one: edgellm chat; the history must be on."
            )
        return found[0]

    def keep(self, conversation: Conversation) -> None:
        """Write a conversation over its earlier state; remove the oldest conversations beyond `MOST`.

        Raises:
            HistoryUnusable: the conversation has become too long to be kept; its earlier state stays.
        """
        said = {"when": conversation.when.isoformat(timespec="microseconds"), "turns": conversation.turns}
        data = json.dumps(said, ensure_ascii=False).encode("utf-8", "replace")
        if len(data) > MOST_BYTES:
            raise HistoryUnusable(
                f"This conversation takes {len(data)} bytes, and {MOST_BYTES} can be kept.", "Begin a new one."
            )
        with locked(self.folder):
            write_private(self._path(conversation.id), data)
            before, there = oldest(), self._all()
            for old in (*there[MOST:], *(one for one in there[:MOST] if one.when < before)):
                self._path(old.id).unlink(missing_ok=True)

    def remove(self, conversation: Conversation) -> None:
        with locked(self.folder):
            self._path(conversation.id).unlink(missing_ok=True)

    def clear(self) -> int:
        """Remove all conversations, also damaged ones and a crash's leftovers; return how many there were."""
        paths = self._paths()
        if self.folder.is_dir():
            with locked(self.folder):
                for path in (*paths, *(one for one in self.folder.iterdir() if _LEFT.fullmatch(one.name))):
                    with suppress(OSError):  # a folder is no conversation
                        path.unlink()
        return len(paths)

    def expire(self) -> int:
        """Remove the conversations whose files were not written for longer than the retention; return how many."""
        before = oldest()
        gone = [path for path in self._paths() if expired(path, before)]
        if gone:
            with locked(self.folder):
                for path in gone:
                    path.unlink(missing_ok=True)
        return len(gone)

    def _path(self, number: str) -> Path:
        return self.folder / f"{number}.json"

    def _paths(self) -> list[Path]:
        return [path for path in sorted(self.folder.glob("*.json")) if _ID.fullmatch(path.stem)]

    def _read(self, path: Path) -> Conversation | None:
        """Return the conversation in a file; None where the file is gone by now, or damaged."""
        try:
            data = read_private(path)
            said = json.loads((data or b"").decode())
            when = datetime.fromisoformat(said["when"])
            turns = tuple((str(role), str(text)) for role, text in said["turns"])
        except (ValueError, TypeError, LookupError, RecursionError, TrustUnusable):
            return None
        if when.tzinfo is None or not all(role in _ROLES for role, _ in turns):
            return None
        return Conversation(path.stem, when, turns)
