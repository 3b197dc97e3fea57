"""Reading servers' JSON, which may be anything, and writing the fields that they have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm.spec.types import Sampling
from edgellm.upstream.rows import RowsUnusable, Top

SEED_RANGE = 2**31
MAX_CONTEXT = 2**24
_GOLDEN = 0x9E3779B97F4A7C15


def whole(found: Any) -> int:
    """Return a whole number. Raises RowsUnusable where it is none."""
    if type(found) is not int:
        raise RowsUnusable(f"{str(found)[:40]!r} where a whole number belongs")
    return found


def number(found: Any) -> float:
    """Return a number. Raises RowsUnusable where it is none."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise RowsUnusable(f"{str(found)[:40]!r} where a number belongs")
    return float(found)


def entries(found: Any) -> list[Any]:
    """Return a list. Raises RowsUnusable where it is none."""
    if not isinstance(found, list):
        raise RowsUnusable(f"{str(found)[:40]!r} where a list belongs")
    return found


def fields(found: Any) -> Mapping[str, Any]:
    """Return an object. Raises RowsUnusable where it is none."""
    if not isinstance(found, dict):
        raise RowsUnusable(f"{str(found)[:40]!r} where an object belongs")
    return found


def text(found: Any) -> str:
    """Return a text. Raises RowsUnusable where it is none."""
    if not isinstance(found, str):
        raise RowsUnusable(f"{str(found)[:40]!r} where a text belongs")
    return found


def maybe_count(found: Any) -> int | None:
    """Return a number of tokens or milliseconds that a server may leave out; None where it is no such number."""
    return found if type(found) is int and 0 <= found < MAX_CONTEXT else None


def best(top: Top) -> int:
    """Return the likeliest token. Raises RowsUnusable where there is none."""
    if not top:
        raise RowsUnusable("a row without tokens")
    return max(top, key=lambda entry: (entry[1], -entry[0]))[0]


def seed_at(sampling: Sampling, position: int) -> int:
    """Return the seed of a request that continues after `position` tokens: with one seed for all, each would draw the
    same numbers."""
    return ((sampling.seed + 1) * _GOLDEN + position * 0xD1342543DE82EF95 >> 16) % SEED_RANGE
