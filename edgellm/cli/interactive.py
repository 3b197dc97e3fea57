"""The conversation at a terminal: a prompt with history and completion, and commands, which begin with a slash."""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.defaults import create_output

from edgellm.cli.views.console import coloured, err, fail, grid, one_line, read_text, say
from edgellm.cli.views.reply_printer import Display, Heard, print_again, print_legend, print_reply, print_stats
from edgellm.errors import EdgeError, HistoryUnusable, InvalidOption, size
from edgellm.storage.catalog import catalog
from edgellm.storage.chat_log import History
from edgellm.storage.model_files import list_models

if TYPE_CHECKING:
    from edgellm.cli.chat_session import Chat, ChatPairOpener

_KEYS = """\
Enter sends. A new line: Alt-Enter, a backslash at the end of the line, or
three quotes before and after a text. Arrow up recalls earlier input.
Ctrl-C stops a reply. A blank before a slash sends the line to the model."""
_QUOTES = '"""'  # the quotes around a text of several lines
_ALIASES = {"/exit": "/bye", "/quit": "/bye", "/?": "/help", "/load": "/model", "/colours": "/colors"}
_LEAVE = ("exit", "quit", "bye")
_NAME = re.compile(r"/[a-z?]*")
_MOST_TITLE = 40  # characters of a file's name

Completions = Iterable[tuple[str, str]]
_note = partial(say, style="dim")


def converse(conversing: Conversing, *, history: bool = True) -> int:
    """Converse until the user leaves, and return the exit code. With `history`, arrow up recalls past questions."""
    terminal: PromptSession[str] = PromptSession(
        history=InMemoryHistory(_past_questions() if history else ()), completer=SlashCompleter(conversing),
        reserve_space_for_menu=6, key_bindings=_keys(), multiline=True, prompt_continuation=". ",
        output=create_output(stdout=sys.stderr),  # the answer alone goes to stdout
        color_depth=None if coloured(sys.stderr) else ColorDepth.DEPTH_1_BIT,
    )  # fmt: skip
    _note("Ask something, or type /help.")
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
            _note("stopped")
    return 0


class Conversing:
    """A conversation as commands see and change it; `models`: names of draft model and verifier if both are here."""

    def __init__(self, chat: Chat, display: Display, opener: ChatPairOpener, models: tuple[str, str] | None) -> None:
        self.chat, self.display, self.models = chat, display, models
        self.left = False  # whether the user has left
        self._heard: Heard = []  # the last reply
        self._saved: Path | None = None
        self._opener = opener

    def enter(self, line: str) -> None:
        """Run a line as a command, or answer it. Errors are raised."""
        first, _, rest = line.partition(" ")
        if line.strip() in _LEAVE:
            self.left = True
        elif _NAME.fullmatch(first):
            if (found := _known(first)) is None:
                near = difflib.get_close_matches(first, [*_ALIASES, *(one.name for one in COMMANDS)], 1)
                other = "/help lists them; a blank before the slash sends the line."
                raise InvalidOption(f"There is no command {first}.", f"Did you mean {near[0]}?" if near else other)
            found.run(self, rest.strip())
        elif question := line.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip():
            self.answer(question)

    def answer(self, question: str, **changes: Any) -> bool:
        """Print the reply to a question; return whether it is part of the conversation now."""
        reply = self.chat.ask(question, **changes)
        self._heard = []
        summary = print_reply(reply, self.display, self._heard)
        self.chat.add_reply(summary)
        return bool(summary.text)

    def list_commands(self, _: str) -> None:
        width = max(len(f"{one.name} {one.arguments}") for one in COMMANDS)
        for one in COMMANDS:
            say(f"{f'{one.name} {one.arguments}':<{width}}  {one.about}")
        _note(_KEYS)
        if self.display.colours:
            print_legend()

    def leave(self, _: str) -> None:
        self.left = True

    def clear(self, _: str) -> None:
        self.chat.clear()
        self._heard, self._saved = [], None
        _note("The next question starts a new conversation.")

    def show_stats(self, _: str) -> None:
        if (summary := self.chat.summary) is None:
            _note("There is no reply yet.")
            return
        print_stats(summary)
        used, length = summary.prompt_tokens + summary.tokens, self.chat.pair.context_length
        say(f"{used} of {length} tokens of context are used.")

    def show_colours(self, words: str) -> None:
        if words not in ("", "on", "off"):
            raise InvalidOption(f"/colors {words} is not known.", "Type /colors, /colors on or /colors off.")
        on = words == "on" or (not words and not self.display.colours)
        self.display = replace(self.display, colours=on)
        if not on:
            _note("Replies are shown as text with rendered Markdown.")
            return
        print_again(self._heard)
        print_legend()

    def retry(self, words: str) -> None:
        try:
            changes = {"temperature": float(words)} if words else {}
        except ValueError:
            raise InvalidOption(f"{words} is not a temperature.", "Type /retry, or /retry 0.8") from None
        self._ask_again("" if words else "The same reply again. For another one: /retry 0.8", **changes)

    def verify(self, _: str) -> None:
        """Ask the last question again with the seed of its reply, which changes where the verifier would not write
        it."""
        pair, summary = self.chat.pair, self.chat.summary
        if summary is not None and (summary.share_verified == 1.0 or pair.verifier_name is None):
            _note("Nothing is unchecked." if pair.verifier_name else "There is no verifier.")
        elif summary is not None and pair.verifier_up is not None and not pair.verifier_up():
            _note("The verifier is still away.")
        else:
            seed = None if summary is None else summary.seed
            self._ask_again("Every word stands, and is verified.", seed=seed, budget=None, gate="auto")

    def _ask_again(self, same: str, **changes: Any) -> None:
        """Print another reply to the last question, and `same` if it is the former one."""
        chat = self.chat
        if not (taken := chat.undo()):
            _note("There is no question to ask again.")
            return
        question, *replies = taken
        _note(f"> {one_line(question.content)}")
        added = False
        try:
            added = self.answer(question.content, **changes)
        finally:
            if not added:
                chat.put_back(taken)
        if same and chat.turns[-1][1] in [reply.content for reply in replies]:
            _note(same)

    def undo(self, _: str) -> None:
        taken = self.chat.undo()
        _note(f"Taken back: {one_line(taken[0].content)}" if taken else "There is nothing to undo.")

    def set_system(self, words: str) -> None:
        chat = self.chat
        if words:
            chat.set_system(None if words == "off" else words)
            _note("The system prompt is changed." if words != "off" else "There is no system prompt now.")
        elif chat.system is None:
            _note("There is no system prompt. Set one: /system TEXT")
        else:
            say(chat.system)

    def context(self, words: str) -> None:
        chat = self.chat
        action, _, name = words.partition(" ")
        if not words:
            for known, text in chat.context.items():
                say(f"{one_line(known)}  {chat.pair.count_tokens(text)} tokens")
            if not chat.context:
                _note("There is no file to answer from. Add one: /context FILE")
        elif action == "drop" and name.strip():
            if not chat.drop_context(name.strip()):
                raise InvalidOption(f"{name.strip()} is not in the context.", "Type /context to see what is.")
            _note(f"{one_line(name)} is no longer in the context.")
        else:
            path = words.strip("'\"")
            chat.add_context(path, text := read_text(Path(path)))
            _note(f"{one_line(path)} ({chat.pair.count_tokens(text)} tokens) comes with the next question.")

    def model(self, words: str) -> None:
        from edgellm.cli.commands.models import fitting_draft, here_or_pulled

        if not words:
            self._list_models()
            return
        name, _, draft = words.partition(" ")
        if (former := self.models) is None:
            raise InvalidOption("The verifier is on other devices.", "Start again: edgellm run MODEL")
        path, draft = here_or_pulled(name, yes=False), draft.strip()
        if not draft:
            draft = fitting_draft(name, path)
        elif draft != "none":
            here_or_pulled(draft, yes=False)
        self.chat.close()
        try:
            self._use(draft, name)
        except (EdgeError, KeyboardInterrupt):
            self._use(*former)
            _note(f"{former[1]} answers as before.")
            raise
        _note(f"{name} answers from now on; the conversation goes on.")

    def _use(self, draft: str, verifier: str) -> None:
        self.chat.use(self._opener.open(draft, verifier))
        self.models = (draft, verifier)

    def _list_models(self) -> None:
        draft, verifier = self.models or (None, None)
        made = grid({}, {"overflow": "fold"}, {}, {})
        for model in list_models():
            role = "verifies" if model.name == verifier else "drafts" if model.name == draft else ""
            made.add_row("*" if role else " ", one_line(model.name), size(model.size), role)
        err().print(made)
        _note("Switch: /model NAME, or /model NAME DRAFT. Others: edgellm catalog")

    def save(self, words: str) -> None:
        """Write the conversation to a file that is not there yet, or was written by this conversation."""
        chat = self.chat
        if not chat.turns:
            _note("There is nothing to save yet.")
            return
        title = re.sub(r"\W+", "-", chat.turns[0][1].lower())[:_MOST_TITLE].strip("-") or "conversation"
        free = (Path(f"{title}{'' if number == 1 else f'-{number}'}.md") for number in itertools.count(1))
        target = Path(words.strip("'\"")).expanduser() if words else self._saved
        target = target or next(path for path in free if not path.exists())
        names = {"user": "You", "assistant": chat.pair.name}
        parts = [f"# {one_line(chat.turns[0][1])}", *(["## System", chat.system] if chat.system else [])]
        parts += [part for role, text in chat.turns for part in (f"## {names.get(role, role)}", text.strip())]
        try:
            with target.open("w" if target == self._saved else "x", encoding="utf-8") as file:
                file.write("\n\n".join(parts) + "\n")
        except FileExistsError:
            raise InvalidOption(f"{target} exists.", "Give another name: /save FILE") from None
        except OSError as error:
            raise InvalidOption(f"{target} cannot be written: {error.strerror}.", "Give another: /save FILE") from error
        self._saved = target
        _note(f"saved to {target}")


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command; `complete` yields the next words that may be typed, each with a line about it."""

    name: str
    arguments: str
    about: str
    run: Callable[[Conversing, str], None]
    complete: Callable[[Conversing, str], Completions] = lambda _, __: ()


def _known(name: str) -> SlashCommand | None:
    """Return the command of a name or of another program's name for it."""
    return next((one for one in COMMANDS if one.name == _ALIASES.get(name, name)), None)


def _texts(conversing: Conversing, words: str) -> Completions:
    if words.startswith("drop "):
        return [(f"drop {name}", "") for name in conversing.chat.context if f"drop {name}".startswith(words)]
    action = [("drop ", "remove a file")] if conversing.chat.context and "drop ".startswith(words) else []
    return [*action, *_files(conversing, words)]


def _files(_: Conversing, words: str) -> Completions:
    found = PathCompleter(expanduser=True).get_completions(Document(words), CompleteEvent())
    return [(words[: len(words) + one.start_position] + one.text, "") for one in found]


def _models(_: Conversing, words: str) -> Completions:
    before, space, last = words.rpartition(" ")
    known = {model.name: size(model.size) for model in list_models()}
    known |= {model.name: size(model.size) for model in catalog().models.values()}
    return [(f"{before}{space}{name}", about) for name, about in known.items() if name.startswith(last)]


COMMANDS = (
    SlashCommand("/help", "", "list the commands", Conversing.list_commands),
    SlashCommand("/model", "[NAME [DRAFT]]", "have another model answer, or list them", Conversing.model, _models),
    SlashCommand("/context", "[FILE | drop FILE]", "answer from a file, or list the files", Conversing.context, _texts),
    SlashCommand("/system", "[TEXT | off]", "set or print the system prompt", Conversing.set_system),
    SlashCommand("/retry", "[TEMPERATURE]", "ask the last question again, with another seed", Conversing.retry),
    SlashCommand("/verify", "", "have the verifier check what was written without it", Conversing.verify),
    SlashCommand("/undo", "", "take back the last question and its reply", Conversing.undo),
    SlashCommand("/clear", "", "start a new conversation; context files stay", Conversing.clear),
    SlashCommand("/save", "[FILE]", "write the conversation to a Markdown file", Conversing.save, _files),
    SlashCommand("/colors", "[on | off]", "show by colours which model wrote what", Conversing.show_colours),
    SlashCommand("/stats", "", "print all figures of the last reply", Conversing.show_stats),
    SlashCommand("/bye", "", "leave, as with exit, quit or Ctrl-D", Conversing.leave),
)
"""All commands, in the order in which they are listed."""


@dataclass(frozen=True, slots=True)
class SlashCompleter(Completer):
    """Completes commands, in a line that begins with a slash, and their arguments."""

    conversing: Conversing

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:  # noqa: ARG002
        first, space, rest = document.text_before_cursor.partition(" ")
        found: Completions = ()
        if not space and first[:1] == "/":
            found, rest = ((one.name, one.about) for one in COMMANDS if one.name.startswith(first)), first
        elif "\n" not in rest and (command := _known(first)) is not None:
            found = command.complete(self.conversing, rest)
        for text, about in found:
            yield Completion(text, start_position=-len(rest), display_meta=about)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif buffer.text.lstrip().startswith(_QUOTES) and buffer.text.count(_QUOTES) == 1:
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _past_questions() -> list[str]:
    with suppress(HistoryUnusable):  # the opener of the pair has told
        return [question for question, _ in History().recent()]
    return []
