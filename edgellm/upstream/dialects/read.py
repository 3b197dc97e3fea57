"""Readers of what servers answer: JSON, which may be anything. Each raises RowsUnusable for a value of another kind."""

from collections.abc import Mapping
from typing import Any, TypeVar

from edgellm.upstream.http_client import HttpAnswer
from edgellm.upstream.rows import RowsUnusable

MAX_CONTEXT = 2**24
T = TypeVar("T")


def _read(found: Any, what: str, *kinds: type[T]) -> T:
    """Return a value of one of these kinds."""
    if type(found) not in kinds:
        raise RowsUnusable(f"{str(found)[:40]!r} where {what} belongs")
    value: T = found
    return value


def whole(found: Any) -> int:
    return _read(found, "a whole number", int)


def number(found: Any) -> float:
    return float(_read(found, "a number", float, int))


def entries(found: Any) -> list[Any]:
    return _read(found, "a list", list)


def fields(found: Any) -> Mapping[str, Any]:
    return _read(found, "an object", dict)


def text(found: Any) -> str:
    return _read(found, "a text", str)


def maybe_count(found: Any) -> int | None:
    """Return a number of tokens or milliseconds that a server may leave out; None for anything else."""
    return found if type(found) is int and 0 <= found < MAX_CONTEXT else None


def seconds(*durations: Any, per_second: float) -> float | None:
    """Return the sum of durations, each of which a server may leave out; None without any, or for impossible ones."""
    known = [number(one) / per_second for one in durations if one is not None]
    return sum(known) if known and all(0.0 <= one < 1e4 for one in known) else None


def first_choice(answer: HttpAnswer) -> Mapping[str, Any]:
    """Return the first completion of an answer by OpenAI's API."""
    if not (choices := entries(fields(answer.json).get("choices"))):
        raise RowsUnusable("no choice")
    return fields(choices[0])
