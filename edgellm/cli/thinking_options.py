"""The options of commands for thoughts, and for a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from edgellm.errors import InvalidOption

Think = Annotated[
    str,
    typer.Option(
        metavar="auto|on|off|N",
        help="Have the model think before it answers; N: for at most N tokens. auto: as its chat template does.",
    ),
]
ReasoningEffort = Annotated[
    str | None,
    typer.Option(metavar="LEVEL", help="Level of thinking, for models that know levels: low, medium, high.",
                 show_default="the model's"),
]  # fmt: skip
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg", metavar="NAME=VALUE",
        help="Argument for the model's chat template, such as enable_thinking=false; can be given several times.",
    ),
]  # fmt: skip

_MOST_DIGITS = 9
_THINK = {"auto": None, "on": True, "off": False}


def thinking(think: str, effort: str | None, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields of `ReplyOptions` for these options.

    Raises:
        InvalidOption: `think` is neither a word nor a number, or an argument is not NAME=VALUE.
    """
    found = {} if effort is None else {"reasoning_effort": effort}
    return {"think": _think(think), "template_args": found | dict(map(_argument, arguments or ()))}


def _think(text: str) -> bool | int | None:
    if text in _THINK:
        return _THINK[text]
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise InvalidOption(f"--think is {text!r}.", "Choose auto, on, off, or a number of tokens.")
    return int(text)


def _argument(text: str) -> tuple[str, object]:
    """Return the name and the value of an argument; a value that is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidOption(
            f"--template-arg is {text!r}.", "Write NAME=VALUE, such as enable_thinking=false; VALUE is JSON or a text."
        )
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
