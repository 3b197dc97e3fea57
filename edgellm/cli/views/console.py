"""Output to the console: the answer to stdout, everything else to stderr; colours only on a terminal."""

import codecs
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from edgellm.errors import InputNotText, InvalidOption

_HARMLESS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}  # ESC is shown as ␛
_HARMLESS |= {ord("\r"): "", 0x7F: "␡"}  # a carriage return would let later text overwrite earlier text
_HARMLESS |= dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
_HARMLESS |= {0x2028: "\n", 0x2029: "\n"}


def harmless(text: str) -> str:
    """Return `text` with every control character made visible; line ends and tabs stay."""
    return text.translate(_HARMLESS)


def one_line(text: str) -> str:
    """Return `text` as `harmless` does, on one line."""
    return " ".join(harmless(text).split())


def decode(data: bytes, name: str) -> str:
    """Decode a user's input. Raise InputNotText, with the place, where it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        if b"\0" in data and not utf16:
            raise InputNotText(f"{name} is no text: it has zero bytes.", "Give a text file.") from error
        raise InputNotText(
            f"{name} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}.",
            f"Convert it first: iconv -f {'UTF-16' if utf16 else 'ISO-8859-1'} -t UTF-8",
        ) from error


def read_text(path: Path, next_step: str = "Check the path.") -> str:
    """Return the text of a user's file. Raise InvalidOption or InputNotText where it cannot be read."""
    try:
        return decode(path.expanduser().read_bytes(), str(path))
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read: {error.strerror}.", next_step) from error


def counted(count: int, noun: str) -> str:
    """Format a number of things: 1 device, 2 devices."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_age(seconds: float) -> str:
    """Format the time since an event for a reader: 3 days ago."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"


STYLES = {
    "draft": ("yellow", "written by the draft model, not verified"),
    "accepted": ("green", "drafted, and accepted by the verifier"),
    "corrected": ("bold magenta", "the verifier's own token where it rejected a draft"),
    "bonus": ("cyan", "the verifier's own token after it accepted a whole chunk"),
    "retrieved": ("blue", "copied from earlier text, and accepted by the verifier"),
    "parallel": ("italic green", "drafted while a verdict was pending"),
    "verifier": ("bright_blue", "written by the verifier alone"),
}
"""The style of a token of each `Source`, one of the sixteen colours that every terminal has, and its meaning."""
THOUGHT = "thinking"


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # the stream is closed
        return False


def coloured(stream: TextIO) -> bool:
    """Return whether to colour output to `stream`: on a capable terminal, unless the user has set `NO_COLOR`."""
    console = Console(file=stream)
    return console.is_terminal and console.color_system is not None and not console.no_color


def redrawable(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal on which the cursor can be moved."""
    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal and not console.legacy_windows


class _ErrorConsole(Console):
    """A console for stderr. It may be used from any thread, and a broken pipe does not stop the work."""

    def on_broken_pipe(self) -> None:
        discard(sys.stderr)


def err() -> Console:
    """Return a console for stderr, without colours where it is no terminal. Text is printed without markup."""
    return _console(sys.stderr, _ErrorConsole)


def out() -> Console:
    """Return a console for stdout, for tables; a reply's tokens go through `TokenWriter`."""
    return _console(sys.stdout, Console)


def _console(stream: TextIO, kind: type[Console]) -> Console:
    console = kind(
        file=stream, color_system="auto" if coloured(stream) else None, highlight=False, markup=False, emoji=False
    )
    if not console.is_terminal:
        console.width = 10_000  # a program reads here, so no line is cut or folded
    return console


def say(text: str, style: str = "") -> None:
    """Print one line or several on stderr."""
    try:
        err().print(harmless(text), style=style, soft_wrap=True)
    except OSError:  # the terminal is gone, or the disk is full
        discard(sys.stderr)


def print_event(text: str, style: str = "yellow") -> None:
    """Print what has happened, with its time."""
    say(f"{time.strftime('%H:%M:%S')}  {text}", style=style)


def announce(reason: str, notices: Sequence[str]) -> None:
    """Print on stderr why a verifier was chosen, unless it was named, and what was switched off."""
    for text, style in ((reason, "dim"), *((notice, "yellow") for notice in notices)):
        if text:
            say(text, style=style)


def fail(text: str) -> None:
    """Print `error: ...` on stderr, on one line."""
    err().print(Text.assemble(("error: ", "bold red"), one_line(text)), soft_wrap=True)


def emit(line: str) -> None:
    """Print a line for a program to read on stdout, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def emit_json(value: object, indent: int | None = 2) -> None:
    """Print a value as JSON on stdout; on one line without `indent`."""
    emit(json.dumps(value, indent=indent))


def tell(value: object, as_json: bool, text: str, style: str = "") -> None:
    """Print a value as JSON for a program, or a text about it for a person."""
    if as_json:
        emit_json(value)
    else:
        say(text, style)


class TokenWriter:
    """Writes tokens to stdout as they are; on a terminal also thoughts, which are dim, and colours if `by_source`."""

    def __init__(self, *, by_source: bool = False) -> None:
        self._stream = sys.stdout
        styles = {THOUGHT: "dim"} | ({source: style for source, (style, _) in STYLES.items()} if by_source else {})
        self._styles = {source: Style.parse(style) for source, style in styles.items()} if coloured(sys.stdout) else {}
        self._in_line = False

    def write(self, text: str, source: str) -> None:
        """Write a token's text; `source`: THOUGHT, or the name of its source."""
        if not text or (source == THOUGHT and not is_terminal(self._stream)):
            return
        text = harmless(text)
        self._in_line = not text.endswith("\n")
        if style := self._styles.get(source):
            text = "\n".join(style.render(line, color_system=ColorSystem.STANDARD) for line in text.split("\n"))
        self._stream.write(text)
        self._stream.flush()

    def end_line(self) -> None:
        """End the line if one is begun."""
        if self._in_line:
            emit("")
            self._in_line = False

    pause = end_line


def prepare_streams() -> None:
    """Keep characters that the terminal's encoding lacks, and closed streams, from stopping a reply."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  # open while the program runs
    sys.stderr = sys.stderr or sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def discard(stream: TextIO) -> None:
    """Discard the buffer of a stream whose writing has failed, and all further output to it."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def grid(*columns: Mapping[str, Any]) -> Table:
    """Return a table without headings; `columns` are settings of each of them."""
    made = Table(box=None, show_header=False, pad_edge=False)
    for settings in columns:
        made.add_column(**{"no_wrap": "overflow" not in settings, **settings})
    return made


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Return a table of names and values."""
    made = grid({"style": "dim"}, {"overflow": "fold"})
    for row in rows:
        made.add_row(*row)
    return made


def table(*columns: str, right: Collection[str] = (), fold: str = "") -> Table:
    """Return a table with these headings, some aligned right. Long texts fold in the column `fold`, "" for all."""
    made = Table(box=None, pad_edge=False)
    for name in columns:
        justify: Any = "right" if name in right else "left"
        made.add_column(name, justify=justify, no_wrap=fold not in ("", name), overflow="fold")
    return made


Columns = Mapping[str, str | Callable[[dict[str, Any]], str]]
"""The headings of a table, each with the key of a row's value, or a function that makes a cell of a row."""


def show(
    rows: Sequence[dict[str, Any]], columns: Columns, as_json: bool, *, empty: str, hint: str = "", fold: str = ""
) -> None:
    """Print rows as JSON, or as a table and a `hint`, or `empty`. A heading that begins with a blank aligns right."""
    if as_json:
        emit_json(rows)
    elif not rows:
        say(empty)
    else:
        made = table(*map(str.strip, columns), right=[name.strip() for name in columns if name[:1] == " "], fold=fold)
        for row in rows:
            cells = (row.get(cell) if isinstance(cell, str) else cell(row) for cell in columns.values())
            made.add_row(*("-" if found in (None, "") else one_line(str(found)) for found in cells))
        out().print(made)
        if hint:
            say(hint, style="dim")


def make_sure(verb: str, what: str, *, yes: bool) -> None:
    """Ask before an action that cannot be undone. Raise typer.Exit for a no, InvalidOption if nobody can be asked."""
    if yes:
        return
    if not is_terminal(sys.stdin):
        raise InvalidOption(f"This would {verb} {what}.", f"Add --yes to {verb} without asking.")
    if not typer.confirm(f"{verb.capitalize()} {what}?", err=True):
        raise typer.Exit(1)
