"""An option as data: a record's field that declares the option of the command line which sets it.

`edgellm.cli.options.records` makes the flag, its environment variable, its setting and its line of the help page of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

AS_MODEL = "the model's"  # what help pages say of a default that the model decides

_KEY = "flag"
Completion = Callable[[str], Iterable[tuple[str, str]]]
"""Returns what a word that is begun may become, each with a line about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How a field looks on the command line; by default its flag has the field's name."""

    help: str
    metavar: str | None = None
    names: tuple[str, ...] = ()
    panel: str | None = None
    """The section of a long help page; a short page leaves it out."""
    shown: str = ""
    """What a help page shows as the default where that is not the field's own."""
    variable: str | None = None
    """An environment variable that takes precedence over that of the flag's name."""
    complete: Completion | None = None
    choices: Mapping[str, str] | None = None
    """The values, each with its meaning."""
    several: Collection[str] = ()
    """The choices of which several may be given, separated by commas."""
    least: float | None = None
    refused: str = ""
    """Why the command does not have this option; it is hidden then."""


def flag(default: Any, text: str, metavar: str | None = None, **more: Any) -> Any:
    """Return a field with this default and help text; `more` are further fields of `Flag`."""
    return field(default=default, metadata={_KEY: Flag(help=text, metavar=metavar, **more)})


def flags_of(record: type[Any]) -> dict[str, Flag]:
    """Return the flags of a record by its fields' names."""
    return {one.name: one.metadata[_KEY] for one in fields(record) if _KEY in one.metadata}
