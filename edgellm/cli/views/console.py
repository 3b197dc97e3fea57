"""Output to the console: the answer to stdout, everything else to stderr; colours only on a terminal."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from edgellm.cli.views.text import harmless, one_line

STYLES = {
    "draft": "yellow",
    "accepted": "green",
    "corrected": "bold magenta",
    "bonus": "cyan",
    "retrieved": "blue",
    "parallel": "italic green",
    "verifier": "bright_blue",
}
"""The style of a token of each `Source`: one of the sixteen colours that every terminal has."""

_STYLES = {source: Style.parse(style) for source, style in STYLES.items()}

MEANINGS = {
    "draft": "the draft model wrote it, nobody checked it",
    "accepted": "drafted, and the verifier agreed",
    "corrected": "the verifier's own word, where it disagreed",
    "bonus": "the verifier's own word, after it agreed with a whole chunk",
    "retrieved": "copied from what was said before, and the verifier agreed",
    "parallel": "drafted while the verdict was on its way",
    "verifier": "the verifier wrote alone",
}


def coloured(stream: TextIO) -> bool:
    """Return whether to colour output to `stream`: on a capable terminal, unless the user has set `NO_COLOR`."""
    console = Console(file=stream)
    return console.is_terminal and console.color_system is not None and not console.no_color


class _Aside(Console):
    """A console for stderr. It may be used from any thread, and a broken pipe does not stop the work."""

    def on_broken_pipe(self) -> None:
        forget(sys.stderr)


def err() -> Console:
    """Return a console for stderr, without colours where it is no terminal. Text is printed without markup."""
    return _console(sys.stderr, _Aside)


def out() -> Console:
    """Return a console for stdout, for tables; a reply's tokens go through `Painter`."""
    return _console(sys.stdout, Console)


def _console(stream: TextIO, kind: type[Console]) -> Console:
    system: Literal["auto"] | None = "auto" if coloured(stream) else None
    console = kind(file=stream, color_system=system, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000  # where a program reads, no line is cut or folded
    return console


def say(text: str, style: str = "") -> None:
    """Print one line or several on stderr."""
    try:
        err().print(harmless(text), style=style, soft_wrap=True)
    except OSError:  # the terminal is gone, or the disk is full
        forget(sys.stderr)


def fail(text: str) -> None:
    """Print `error: ...` on stderr, on one line."""
    err().print(Text.assemble(("error: ", "bold red"), one_line(text)), soft_wrap=True)


def emit(line: str) -> None:
    """Print a line for a program to read on stdout, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Painter:
    """A writer of text to stdout as it comes, coloured by source, which knows whether the cursor is within a line."""

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._colour = coloured(self._stream)
        self.in_line = False

    def write(self, text: str, source: str) -> None:
        if not text:
            return
        text = harmless(text)
        self.in_line = not text.endswith("\n")
        if self._colour:
            style = _STYLES[source]
            text = "\n".join(style.render(line, color_system=ColorSystem.STANDARD) for line in text.split("\n"))
        self._stream.write(text)
        self._stream.flush()

    def end_line(self) -> None:
        if self.in_line:
            self._stream.write("\n")
            self._stream.flush()
            self.in_line = False


def prepare_streams() -> None:
    """Keep characters that the terminal's encoding lacks, and closed streams, from stopping a reply."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  # for as long as the program runs
    sys.stderr = sys.stderr or sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def forget(stream: TextIO) -> None:
    """Discard what a stream still holds, and all further output: writing it failed, and would fail again."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
