"""Conversations that can be taken up again: one private file each, the newest few hundred of them.

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
    """What was said so far: `turns` are roles and texts, the oldest first. `when` it was last added to, in UTC."""

    id: str
    when: datetime
    turns: tuple[tuple[str, str], ...]

    @classmethod
    def new(cls) -> Conversation:
        """One in which nothing was said."""
        return cls(secrets.token_hex(4), datetime.now(UTC), ())

    def said(self, turns: Sequence[tuple[str, str]]) -> Conversation:
        """The same with all that was said until now."""
        return replace(self, when=datetime.now(UTC), turns=tuple(turns))

    @property
    def title(self) -> str:
        """The first question, without what stood before it."""
        asked = next((text for role, text in self.turns if role == "user"), "")
        return asked.strip().rpartition("\n\n")[2]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Those in `folder`, which need not exist yet. Any number of processes may use it.

    What is no conversation, or is no plain file, is passed over. They go when nothing was added to them for longer
    than may be kept (`store.retention`). Every method raises TrustUnusable where a file cannot be written.
    """

    folder: Path = field(default_factory=lambda: data_dir() / "conversations")

    def all(self) -> list[Conversation]:
        """The newest first."""
        before = oldest()
        return [one for one in self._all() if one.when >= before]

    def _all(self) -> list[Conversation]:
        found = [self._read(path) for path in self._paths()]
        return sorted((one for one in found if one is not None), key=lambda one: one.when, reverse=True)

    def find(self, beginning: str) -> Conversation:
        """The one whose ID begins so.

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
        """The one that was last added to.

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
        """Writes it, in the place of what was kept of it before; the oldest ones beyond `MOST` go.

        Raises:
            HistoryUnusable: it has become too long to be kept; what was kept of it stays.
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
        """Remove all, damaged ones and what a crash has left of some, too; return how many there were."""
        paths = self._paths()
        if self.folder.is_dir():
            with locked(self.folder):
                for path in (*paths, *(one for one in self.folder.iterdir() if _LEFT.fullmatch(one.name))):
                    with suppress(OSError):  # a folder is no conversation
                        path.unlink()
        return len(paths)

    def expire(self) -> int:
        """Remove those whose files were not written for longer than may be kept; return how many that were."""
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
        """None where it has gone meanwhile, or is damaged."""
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
