"""The rights of a paired device here."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Right(StrEnum):
    """A right of a paired device on this device."""

    VERIFY = "verify"
    COMPUTE = "compute"
    FILES = "files"


Rights = frozenset[Right]


def read_rights(names: Iterable[str]) -> Rights:
    """Return the rights with these names; names of a later version are ignored."""
    names = set(names)
    return frozenset(right for right in Right if right in names)
