"""Everything on this device's disk that comes from prompts and replies: count it, and remove it.

docs/privacy.md lists the same for users.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from edgellm.errors import EdgeError, ProfileUnusable
from edgellm.places import cache_dir, data_dir, state_dir
from edgellm.spec.gates.profile import Profile
from edgellm.storage import History
from edgellm.storage.chats.conversations import Conversations
from edgellm.storage.chats.retention import expired, oldest
from edgellm.storage.chats.typed_lines import old_lines, typed_lines
from edgellm.storage.state import close_to_others

LOGS_MOST = 20
"""The number of crash logs that are kept, the newest ones."""


@dataclass(frozen=True, slots=True)
class KeptData:
    """Counts of what is kept, by kind. Only profiles with words of prompts, or made from replies, are counted."""

    replies: int = 0
    conversations: int = 0
    typed: int = 0
    profiles: int = 0
    curves: int = 0
    logs: int = 0

    @property
    def total(self) -> int:
        return self.replies + self.conversations + self.typed + self.profiles + self.curves + self.logs

    def __str__(self) -> str:
        counted = (
            (self.replies, "reply", "replies"), (self.conversations, "conversation", "conversations"),
            (self.typed, "typed line", "typed lines"), (self.profiles, "profile", "profiles"),
            (self.curves, "cost curve", "cost curves"), (self.logs, "crash log", "crash logs"),
        )  # fmt: skip
        return (
            ", ".join(f"{count:,} {one if count == 1 else many}" for count, one, many in counted if count) or "nothing"
        )


def kept() -> KeptData:
    """Count what is kept, whether the history is on or off.

    Raises:
        HistoryUnusable, TrustUnusable: a file cannot be read.
    """
    old = int(os.path.lexists(old_lines()))
    return KeptData(
        History().facts().conversations, len(Conversations().all()), typed_lines().facts().conversations + old,
        sum(1 for path in _profiles() if _is_personal(path)), len(list(_files(_curves(), "*"))),
        len(list(_files(_logs(), "*"))),
    )  # fmt: skip


def forget() -> KeptData:
    """Remove all that is kept, and return the counts. Measured figures of a profile that was made from a file of
    prompts stay, without the words.

    Raises:
        HistoryUnusable, TrustUnusable: something cannot be removed.
    """
    counts: list[int] = []
    errors: list[EdgeError] = []
    for store in (History(), Conversations(), typed_lines()):
        try:
            counts.append(store.clear())
        except EdgeError as error:  # what can be removed goes first
            errors.append(error)
    profiles = sum(1 for path in list(_profiles()) if _forget_words(path))
    old, curves, logs = (
        sum(1 for _ in _removed(paths)) for paths in ([old_lines()], _files(_curves(), "*"), _files(_logs(), "*"))
    )
    if errors:
        raise errors[0]
    replies, conversations, typed = counts
    return KeptData(replies, conversations, typed + old, profiles, curves, logs)


def tidy() -> None:
    """Remove what is too old, and take away other users' access to the rest."""
    expire()
    close_to_others()


def expire() -> None:
    """Remove what is older than may be kept (`storage.chats.retention`). What cannot be removed stays for now."""
    before = oldest()
    for store in (History(), typed_lines(), Conversations()):
        with suppress(EdgeError):
            store.expire()
    for path in list(_profiles()):
        if expired(path, before):
            _forget_words(path)
    old = (path for path in (old_lines(), *_files(_curves(), "*")) if expired(path, before))
    list(_removed(old))
    expire_logs(before)


def expire_logs(before: datetime) -> None:
    """Remove crash logs from before that time, and those beyond the newest `LOGS_MOST`."""
    logs = sorted(_files(_logs(), "crash-*.log"), key=lambda path: path.name, reverse=True)
    list(_removed(path for number, path in enumerate(logs) if number >= LOGS_MOST or expired(path, before)))


def _profiles() -> Iterator[Path]:
    """Yield profiles, replies that will make one, files of theirs that were set aside, and remains of a crash."""
    return _files(data_dir() / "profiles", "*")


def _is_personal(path: Path) -> bool:
    """Return whether a file among the profiles has words of prompts in it, was made from replies, or is damaged."""
    try:
        profile = Profile.load(path, own=True)
    except ProfileUnusable:
        return True
    return profile.has_words or profile.origin != "prompts"


def _forget_words(path: Path) -> bool:
    """Remove what a file among the profiles has from prompts and replies; return whether there was anything."""
    if not _is_personal(path):
        return False
    try:
        profile = Profile.load(path, own=True)
        if profile.origin == "prompts":
            profile.without_words().save(path)
            return True
    except (ProfileUnusable, OSError):
        pass
    return bool(list(_removed([path])))


def _removed(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        with suppress(OSError):
            path.unlink()
            yield path


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    with suppress(OSError):
        yield from [path for path in sorted(folder.glob(pattern)) if not path.is_dir() or path.is_symlink()]


def _curves() -> Path:
    return cache_dir() / "curves"


def _logs() -> Path:
    return state_dir() / "logs"
