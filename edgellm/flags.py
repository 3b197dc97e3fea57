"""An option as data: a record's field that declares the option of the command line which sets it.

`edgellm.cli.options` makes the flag, environment variable, setting and help line from the field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

AS_MODEL = "the model's"  # what help pages say of a default that the model decides

_KEY = "flag"
Completion = Callable[[str], Iterable[tuple[str, str]]]
"""Returns the completions of a begun word, each with a line about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The command-line form of a field; by default its flag has the field's name."""

    help: str
    metavar: str | None = None
    names: tuple[str, ...] = ()
    panel: str | None = None
    """The section of a long help page; a short page leaves it out."""
    shown: str = ""
    """The default that a help page shows, where it differs from the field's own."""
    variable: str | None = None
    """An environment variable that takes precedence over that of the flag's name."""
    complete: Completion | None = None
    choices: Mapping[str, str] | None = None
    """The values, each with its meaning."""
    several: Collection[str] = ()
    """The choices that may be given together, separated by commas."""
    least: float | None = None
    refused: str = ""
    """The reason why the command lacks this option, which is then hidden."""


def flag(default: Any, text: str, metavar: str | None = None, **more: Any) -> Any:
    """Return a field with this default and help text; `more` are further fields of `Flag`."""
    return field(default=default, metadata={_KEY: Flag(help=text, metavar=metavar, **more)})


def flags_of(record: type[Any]) -> dict[str, Flag]:
    """Return the flags of a record by its fields' names."""
    return {one.name: one.metadata[_KEY] for one in fields(record) if _KEY in one.metadata}
