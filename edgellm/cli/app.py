"""The application: a tree of commands, each imported when it is asked for; its help pages; and its entry point, from
the arguments to an exit code, the one place where errors are printed. Codes: 0 all went well, 1 an expected failure, 2
wrong usage, 130 interrupted.

`--help` has examples and the options that most people need, `--help-all` has everything.

`help_pages.txt` has a section for each command. A section begins with the command in brackets and the function that
runs it, in a module of `edgellm.cli.commands`; a group of commands has no function. The first paragraph is the summary,
a short help page leaves out further paragraphs, and lines that begin with a dollar sign are examples, each with its
meaning behind `  # `. A line with `==` is a heading of the first page.
"""

from __future__ import annotations

import errno
import logging
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command, get_command_from_info, get_group
from typer.models import CommandInfo

from edgellm import __version__
from edgellm.cli.options import option_texts, options_of
from edgellm.cli.views.console import discard, fail, out, prepare_streams, say
from edgellm.errors import EdgeError
from edgellm.system import config_file, state_dir

_ALIASES = {"list": "ls", "models": "ls"}
"""Other programs' names of commands; no page shows them."""
_PASS_ON = ("run", "mesh run", "service install")
"""The commands that keep unknown options among their words."""
_SECTION = re.compile(r"^(?:== (?P<heading>.*)|\[edgellm ?(?P<name>.*?)\] ?(?P<home>\S*))$", re.MULTILINE)
WIDTH = 100
"""Columns of a page, at most."""
SHORT = 14
"""Most options of a page that is shown whole; longer pages leave out the options in `PANELS`, and examples."""
_SHORT_EXAMPLES = 6
_NAMES_WIDTH = 36  # columns of the names of options, at most
PANELS = (
    "Conversation", "Several devices", "Drafts and verification", "Sampling", "Thinking", "HTTP", "Worker", "Hardware",
    "Output",
)  # fmt: skip
"""The sections of options that `--help` of a command with more than `SHORT` leaves out, in their order."""
_OPTIONS = "Options"
_NAME = "cyan"
_NOTE = re.compile(r"(.*?) *\[((?:env var|default|required).*)\]", re.DOTALL)
_DEFAULT = re.compile(r"default: \((.*?)\)(?=[];])")
_RANGE = re.compile(r"; x>=[\d.]+\]")
_HELP_ALL = "edgellm.help_all"
"""The key in a context's meta where all options are asked for."""


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a command: `home` is the module and the function behind it, "" for a group; `heading` is its section
    in lists; `examples` are command lines and their meanings."""

    heading: str
    home: str
    summary: str
    more: str
    examples: tuple[tuple[str, str], ...]


@cache
def pages() -> dict[str, Page]:
    """Return the pages by the words that a user types behind `edgellm`, in the order in which they are listed."""
    text = Path(__file__).with_name("help_pages.txt").read_text(encoding="utf-8")
    found, heading = dict[str, Page](), ""
    starts = [*_SECTION.finditer(text)]
    for start, after in zip(starts, [*(one.start() for one in starts[1:]), len(text)], strict=True):
        if start["heading"]:
            heading = start["heading"]
            continue
        prose, *lines = text[start.end() : after].strip().split("\n$ ")
        summary, _, more = prose.strip().partition("\n\n")
        examples = tuple((line, what) for line, _, what in (line.strip().partition("  # ") for line in lines))
        found[start["name"]] = Page(heading, start["home"], summary, more.strip(), examples)
    return found


def path_of(context: Any) -> str:
    """Return the words that a user types for a command behind `edgellm`."""
    path: str = context.command_path
    return path.partition(" ")[2]


def command_page(command: TyperCommand, ctx: typer.Context, page: Page, *, everything: bool) -> str:
    """Return the page of a command: a short one, unless everything is asked for."""
    given = command.get_params(ctx)
    options = [one for one in given if isinstance(one, TyperOption) and not one.hidden]
    shortened = sum(not one.is_eager for one in options) > SHORT
    everything = everything or not shortened
    panels: dict[str, list[TyperOption]] = {name: [] for name in (_OPTIONS, *PANELS)}
    for one in options:
        if shortened or "--help-all" not in one.opts:
            panels[one.rich_help_panel or _OPTIONS if shortened else _OPTIONS].append(one)
    parts = _head(command, ctx, page, everything)
    parts += _section("Arguments", _rows([one for one in given if one.param_type_name == "argument"], ctx))
    for name in panels if everything else (_OPTIONS,):
        parts += _section(name, _rows(panels[name], ctx))
    if not everything:
        names = ", ".join(name if name.isupper() else name.lower() for name in PANELS if panels[name])
        parts.append(Text.assemble(f"\nMore options ({names}): ", (f"{ctx.command_path} --help-all", _NAME)))
    return _rendered(parts)


def group_page(group: TyperGroup, ctx: typer.Context, page: Page, listed: Mapping[str, Page]) -> str:
    """Return the page of a group of commands, by name."""
    rows = dict[str, list[tuple[str, str]]]()
    for name, one in listed.items():
        rows.setdefault("Commands" if ctx.parent else one.heading, []).append((name, one.summary))
    rows[_OPTIONS] = _rows(group.get_params(ctx), ctx)
    return _rendered([*_head(group, ctx, page, True), *(part for one in rows.items() for part in _section(*one))])


def _head(command: TyperCommand | TyperGroup, ctx: typer.Context, page: Page, everything: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(command.get_usage(ctx), "bold"), Text(f"\n{page.summary}")]
    if page.examples:
        parts.append(Text("\nExamples:", "bold"))
    for line, what in page.examples if everything else page.examples[:_SHORT_EXAMPLES]:
        parts += [Text(f"  {line}", _NAME), Padding(Text(what), (0, 0, 0, 6))]
    if page.more and everything:
        parts.append(Text(f"\n{page.more}"))
    return parts


def _section(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    if not rows:
        return
    yield Text(f"\n{title}:", "bold")
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(max_width=_NAMES_WIDTH)
    for name, meaning in rows:
        found = _NOTE.fullmatch(meaning)
        note = Text(meaning) if found is None else Text.assemble(found[1], (f" [{found[2]}]", "dim"))
        lines.add_row(Padding(Text(name, _NAME), (0, 0, 0, 2)), note)
    yield lines


def _rows(parameters: Sequence[Any], ctx: typer.Context) -> list[tuple[str, str]]:
    """Return the names and the meanings of parameters; a switch that is on by default is --[no-]NAME."""
    rows = []
    for one in parameters:
        if (record := one.get_help_record(ctx)) is not None:
            name, meaning = record
            if one.param_type_name == "argument":
                (name,) = map(usage, one.get_usage_pieces(ctx))
            elif " / --no-" in name:
                name, meaning = name.replace("--", "--[no-]", 1).partition(" / ")[0], meaning.replace(f": {name}", "")
            rows.append((name, _RANGE.sub("]", _DEFAULT.sub(r"default: \1", meaning))))
    return rows


def usage(piece: str) -> str:
    """Return a word of a usage line as other programs write it: MODEL, [MODEL], PROMPT..."""
    return piece.translate({ord("{"): None, ord("}"): None}).replace("[[", "[").replace("]]", "]")


def _rendered(parts: Iterable[RenderableType]) -> str:
    console = out()
    console.width = min(console.width, WIDTH)
    with console.capture() as captured:
        console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


class _Command(TyperCommand):
    """A command whose `--help` is short, and whose `--help-all` is complete."""

    def get_params(self, ctx: Any) -> list[Any]:
        *others, short = super().get_params(ctx)
        whole, text = copy(short), "Show all options, and exit."
        vars(whole).update(name="help_all", opts=["--help-all"], callback=_show_all, help=text)
        return [*others, whole, short]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [usage(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        page = pages().get(path_of(ctx)) or pages()[self.name or ""]  # another name for a command has its page
        formatter.write(command_page(self, ctx, page, everything=ctx.meta.get(_HELP_ALL, False)))


class _Group(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        places = [name.rpartition(" ") for name in pages() if name]
        return [name for group, _, name in places if group == path_of(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        path = f"{path_of(ctx)} {_ALIASES.get(cmd_name, cmd_name)}".strip()
        if self.commands.get(cmd_name) is None and path in pages():
            self.commands[cmd_name] = _made(path)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = {**dict.fromkeys(self.list_commands(ctx)), **self.commands}  # type: ignore[dict-item]  # for proposals
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the group's name. Without any, print its page, and end as for wrong usage."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        path = path_of(ctx)
        listed = {name: pages()[f"{path} {name}".strip()] for name in self.list_commands(ctx)}
        formatter.write(group_page(self, ctx, pages()[path], listed))


def _show_all(ctx: Any, _: Any, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _group(name: str) -> typer.Typer:
    return typer.Typer(
        name=name, cls=_Group, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


def _made(path: str) -> Any:
    """Return a command or a group with its options, which read environment variables, too."""
    page, name = pages()[path], path.rpartition(" ")[2]
    if not page.home:
        return get_group(_group(name))
    module, _, function = page.home.partition(":")
    callback = getattr(import_module(f"edgellm.cli.commands.{module}"), function)
    settings = {"ignore_unknown_options": True} if path in _PASS_ON else None
    info = CommandInfo(name=name, cls=_Command, help=page.summary, callback=callback, context_settings=settings)
    command: Any = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)
    for one in command.params:
        vars(one)["help"] = option_texts().get(f"edgellm {path}", one.name, fallback=one.help)
    for long, option in options_of(command).items():
        variable = re.sub("[ -]", "_", f"edgellm {path} {long}").upper()
        option.show_envvar = option.envvar is not None  # all variables would double the help pages
        option.envvar = [variable] if option.envvar is None else [option.envvar, variable]
        # a value may contain blanks
        option.split_envvar_value = lambda text: [part.strip() for part in text.split(",") if part.strip()]
    return command


app = _group("edgellm")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgellm {__version__}")
        from edgellm.engine.native import description

        typer.echo(f"llama.cpp: {description()}")
        raise typer.Exit


@app.callback()
def _edgellm(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    file = config_file()
    if context.invoked_subcommand != "config" and (file.exists() or file.is_symlink()):
        from edgellm.cli.commands.config import read_settings

        context.default_map = read_settings(context)


@cache
def tree() -> Callable[..., object]:
    """Return the tree of all commands, which takes most of the time of a help page to put together."""
    return get_command(app)


def main() -> None:
    """Run the `edgellm` command."""
    logging.disable(logging.WARNING)  # silences libraries: edgellm prints itself what a user should know
    prepare_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Never raises, never shows a traceback."""
    try:
        code = tree()(list(arguments), prog_name="edgellm", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except EdgeError as error:
        fail(str(error))
        return error.exit_code
    except typer.TyperException as error:
        return _wrong_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        say("")
        return 130
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except OSError as error:
        if error.errno == errno.ENOSPC:
            discard(sys.stdout)
            fail("The disk is full, so the output cannot be written. Free some space, then run the command again.")
        elif error.filename is None:
            return _unexpected(error)
        else:
            fail(f"{error.filename} cannot be used: {error.strerror}. Check the path and its permissions.")
        return 1
    except Exception as error:  # noqa: BLE001  # the last resort
        return _unexpected(error)


def _wrong_usage(error: typer.TyperException) -> int:
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if message := error.format_message():  # the message is empty after a help page
        command = context.command_path if context is not None else "edgellm"
        source = context.get_parameter_source(parameter.name) if context is not None and parameter is not None else None
        if source is not None and source.name == "ENVIRONMENT":
            from edgellm.cli.commands.config import variable_of

            message = f"{message.rstrip('.')}, from {variable_of(parameter)}"
        message = message.replace("Value error, ", "").strip()
        fail(f"{message}{'' if message.endswith(('.', '?')) else '.'} See: {command} --help")
    return error.exit_code


def _unexpected(error: Exception) -> int:
    from edgellm.state import write_state

    what = f"Something unexpected happened: {type(error).__name__}: {error}."
    try:
        path = state_dir() / "logs" / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.log"
        about = f"edgellm {__version__}, Python {platform.python_version()}, {platform.platform()}\n\n"
        write_state(path, about + "\n".join(_traceback(error)))
        fail(f"{what} Please report it with the details in {path}.")
    except OSError:
        fail(f"{what} No log could be written. Set EDGELLM_HOME to a folder that can be written, and try again.")
    return 1


def _traceback(error: BaseException) -> Iterator[str]:
    """Yield where an error and its causes were raised, with their types. Their messages may quote a prompt."""
    if before := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        yield from _traceback(before)
    yield "Traceback (most recent call last):\n" + "".join(traceback.format_tb(error.__traceback__))
    yield f"{type(error).__name__} (its message is not kept)\n"
