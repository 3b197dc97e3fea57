"""The retention of questions and replies, and of everything derived from them."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from edgellm.errors import InvalidOption, StateDamaged
from edgellm.places import data_dir
from edgellm.storage.state import read_state, write_state

VARIABLE = "EDGELLM_HISTORY_KEEP"
DEFAULT = timedelta(days=365)
FOREVER = "forever"
_DAYS = {"d": 1, "w": 7, "m": 30, "y": 365}
_AGE = re.compile(r"(\d{1,5})([dwmy])")
_HINT = f"Give days, weeks, months or years, such as 90d, 12w, 6m or 2y; or {FOREVER}."


def parse_age(text: str) -> timedelta | None:
    """Return the age that `text` means, None for "forever".

    Raises:
        InvalidOption: the text is not an age.
    """
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
    """Return the retention, None for no limit: the value of the environment variable `VARIABLE`, else of the last
    `set_max_age`, else `DEFAULT`. A damaged setting is ignored.

    Raises:
        InvalidOption: the variable's value is not an age.
    """
    if text := os.environ.get(VARIABLE):
        try:
            return parse_age(text)
        except InvalidOption as error:
            raise InvalidOption(f"{VARIABLE}: {error.what}", error.next_step) from None
    try:
        stored = read_state(_file(), 100)
        return DEFAULT if stored is None else parse_age(stored.decode())
    except (StateDamaged, InvalidOption, UnicodeDecodeError):
        return DEFAULT


def set_max_age(age: timedelta | None) -> None:
    """Set the retention for every process. Raise OSError if it cannot be written."""
    write_state(_file(), describe_age(age))


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


def _file() -> Path:
    return data_dir() / "history" / "max-age"
