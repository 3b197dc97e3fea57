"""The conversation at a terminal: a prompt with history and completion, until the user leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.defaults import create_output

from edgellm.cli.slash_commands import QUOTES, Conversing, completions
from edgellm.cli.views.console import coloured, fail, say
from edgellm.errors import EdgeError, HistoryUnusable

_MENU_ROWS = 6  # rows for completions below the prompt


def converse(conversing: Conversing, *, history: bool = True) -> int:
    """Converse until the user leaves, and return the exit code. Without `history` no typed line is kept."""
    terminal: PromptSession[str] = PromptSession(
        history=_TypedLines() if history else InMemoryHistory(), completer=_Completer(conversing),
        reserve_space_for_menu=_MENU_ROWS, key_bindings=_keys(), multiline=True, prompt_continuation=". ",
        output=create_output(stdout=sys.stderr),  # the answer alone goes to stdout
        color_depth=None if coloured(sys.stderr) else ColorDepth.DEPTH_1_BIT,
    )  # fmt: skip
    say("Ask something, or type /help.", style="dim")
    while not conversing.left:
        try:
            line = terminal.prompt(FormattedText([("bold", "> ")]))
        except KeyboardInterrupt:
            continue
        except EOFError:
            break
        try:
            conversing.enter(line)
        except EdgeError as error:
            fail(str(error))
        except (KeyboardInterrupt, typer.Abort, typer.Exit):  # a download that is stopped, or not wanted
            say("stopped", style="dim")
    return 0


class _Completer(Completer):
    """Completes commands, in a line that begins with a slash, and their arguments."""

    def __init__(self, conversing: Conversing) -> None:
        self._conversing = conversing

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:  # noqa: ARG002
        line = document.text_before_cursor
        if line.startswith("/") and "\n" not in line:
            for text, replaced, about in completions(self._conversing, line):
                yield Completion(text, start_position=-replaced, display_meta=about)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif buffer.text.lstrip().startswith(QUOTES) and buffer.text.count(QUOTES) == 1:
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class _TypedLines(History):
    """The lines typed in this process and in earlier ones."""

    def __init__(self) -> None:
        from edgellm.storage.chat_log import typed_lines

        super().__init__()
        self._lines, self._usable = typed_lines(), True

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Print an error of the store, after which no line is kept."""
        try:
            yield
        except HistoryUnusable as error:
            self._usable = False
            say(f"Typed lines are not kept: {error}", style="yellow")

    def load_history_strings(self) -> Iterator[str]:
        with self._told():
            yield from (past.question for past in reversed(self._lines.recent()))

    def store_string(self, string: str) -> None:
        if self._usable:
            with self._told():
                self._lines.add(string, "")
