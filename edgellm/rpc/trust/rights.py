"""The rights of a paired device here."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Right(StrEnum):
    """What a paired device may do here."""

    VERIFY = "verify"
    COMPUTE = "compute"
    FILES = "files"


Rights = frozenset[Right]


def read_rights(words: Iterable[str]) -> Rights:
    """Return the rights with these names; names of a later version are ignored."""
    said = set(words)
    return frozenset(right for right in Right if right in said)
