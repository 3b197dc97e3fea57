"""The conversation at a terminal: a prompt with history, and a few commands that begin with a slash."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.defaults import create_output

from edgellm.cli.places import private_file, state_dir
from edgellm.cli.report import print_legend, print_stats
from edgellm.cli.screen import coloured, fail, say
from edgellm.cli.speak import speak
from edgellm.errors import EdgeError

if TYPE_CHECKING:
    from edgellm.cli.talk import Talk

HELP = """\
/help    this page
/stats   all figures of the last reply
/clear   forget what was said; context files stay
/exit    leave; Ctrl-D does too
Enter sends. Alt-Enter, or a backslash at the end of a line, begins a new line.
Ctrl-C stops a reply. Arrow up brings back what you typed."""

_COMMAND = re.compile(r"/[a-z?]*")


def converse(talk: Talk, *, explain: bool, stats: bool) -> int:
    """Asks and answers until the user leaves; returns the exit code."""
    session = _session()
    say("Ask something. /help shows what else you can do.", style="dim")
    while True:
        try:
            line = session.prompt(FormattedText([("bold", "> ")])).strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return 0
        if _COMMAND.fullmatch(line):
            if line in ("/exit", "/quit"):
                return 0
            _command(line, talk)
        elif line:
            try:
                talk.heard(speak(talk.ask(line), as_json=False, explain=explain, stats=stats))
            except EdgeError as error:
                fail(str(error))


def _command(line: str, talk: Talk) -> None:
    if line in ("/help", "/?"):
        say(HELP)
        print_legend()
    elif line == "/clear":
        talk.clear()
        say("Forgotten.", style="dim")
    elif line == "/stats":
        if talk.summary is None:
            say("Nothing was said yet.", style="dim")
        else:
            used = talk.summary.prompt_tokens + talk.summary.tokens
            print_stats(talk.summary)
            say(f"{used} of {talk.pair.context_length} tokens of context are used.")
    else:
        say(f"There is no command {line}. /help shows those there are.", style="yellow")


def _session() -> PromptSession[str]:
    colours = None if coloured(sys.stderr) else ColorDepth.DEPTH_1_BIT
    return PromptSession(
        history=_history(),
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


def _history() -> History:
    try:
        return FileHistory(private_file(state_dir() / "history"))
    except OSError as error:
        say(f"What you type is not kept: {error}.", style="yellow")
        return InMemoryHistory()
