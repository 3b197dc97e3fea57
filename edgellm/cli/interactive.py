"""The conversation at a terminal: a prompt with history, and a few commands that begin with a slash."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.defaults import create_output

from edgellm.cli.views.console import coloured, fail, say
from edgellm.cli.views.reply_printer import Display, print_legend, print_reply, print_stats
from edgellm.errors import EdgeError, HistoryUnusable

if TYPE_CHECKING:
    from edgellm.cli.chat_session import ChatSession
    from edgellm.storage import History as Lines

HELP = """\
/help    print this page
/stats   print all figures of the last reply
/clear   start a new conversation; context files stay
/exit    leave, as with Ctrl-D
Enter sends. Alt-Enter, or a backslash at the end of a line, starts a new line.
Ctrl-C stops a reply. Arrow up recalls earlier input."""

_COMMAND = re.compile(r"/[a-z?]*")


def converse(session: ChatSession, display: Display, *, history: bool = True) -> int:
    """Converse until the user leaves, and return the exit code. Without `history` no typed line is kept."""
    terminal = _prompt_session(_typed_history() if history else InMemoryHistory())
    say("Ask something, or type /help.", style="dim")
    while True:
        try:
            line = terminal.prompt(FormattedText([("bold", "> ")])).strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return 0
        if _COMMAND.fullmatch(line):
            if line in ("/exit", "/quit"):
                return 0
            _run_command(line, session)
        elif line:
            try:
                session.add_reply(print_reply(session.ask(line), display))
            except EdgeError as error:
                fail(str(error))


def _run_command(line: str, session: ChatSession) -> None:
    if line in ("/help", "/?"):
        say(HELP)
        print_legend()
    elif line == "/clear":
        session.clear()
        say("The next question starts a new conversation.", style="dim")
    elif line == "/stats":
        if session.summary is None:
            say("There is no reply yet.", style="dim")
        else:
            used = session.summary.prompt_tokens + session.summary.tokens
            print_stats(session.summary)
            say(f"{used} of {session.pair.context_length} tokens of context are used.")
    else:
        say(f"There is no command {line}; /help lists them.", style="yellow")


def _prompt_session(history: History) -> PromptSession[str]:
    colours = None if coloured(sys.stderr) else ColorDepth.DEPTH_1_BIT
    return PromptSession(
        history=history,
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation=". ",
        output=create_output(stdout=sys.stderr),  # the answer alone goes to stdout
        color_depth=colours,
    )


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


class _TypedLines(History):
    """The lines typed in this process and in earlier ones."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines
        self._usable = True

    def load_history_strings(self) -> Iterator[str]:
        """Yield the earlier texts, the newest first."""
        try:
            pasts = self._lines.recent()
        except HistoryUnusable as error:
            self._fail(error)
            return
        yield from (past.question for past in reversed(pasts))

    def store_string(self, string: str) -> None:
        """Keep what was just typed, where that is possible."""
        if self._usable:
            try:
                self._lines.add(string, "")
            except HistoryUnusable as error:
                self._fail(error)

    def _fail(self, error: HistoryUnusable) -> None:
        self._usable = False
        say(f"Typed lines are not kept: {error}", style="yellow")


def _typed_history() -> History:
    from edgellm.storage.chat_log import typed_lines

    return _TypedLines(typed_lines())
