"""Help pages: `--help` has examples and the options that most people need, `--help-all` has everything.

`help_pages.txt` has what they say beside the options, in a section for each command. It begins with the command in
brackets and the function that runs it, of a module in `edgellm.cli.commands`; a group of commands has none. The first
paragraph is the summary, those behind it are left out of a short page, and lines that begin with a dollar sign are
examples, each with its meaning behind `  # `. A line with `==` is a heading of the first page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from edgellm.cli.views.console import out

WIDTH = 100
"""Columns of a page, at most."""
SHORT = 14
"""Options of a page that is shown whole; from longer ones those in `PANELS` are left out, and examples."""
_SHORT_EXAMPLES = 6
_ALL = "edgellm.help_all"  # in a context's meta: that all options are asked for
_NAMES_WIDTH = 34  # columns of the names of options; longer names have a line of their own

PANELS = (
    "Conversation", "Several devices", "Drafts and verification", "Sampling", "Thinking", "HTTP", "Worker", "Hardware",
    "Output",
)  # fmt: skip
"""The sections of options that `--help` of a command with more than `SHORT` leaves out, in their order."""
_SECTION = re.compile(r"^(?:== (?P<heading>.*)|\[edgellm ?(?P<name>.*?)\] ?(?P<home>\S*))$", re.MULTILINE)
_OPTIONS = "Options"
_NAME = "cyan"
_NOTE = re.compile(r"(.*?) *\[((?:env var|default|required).*)\]", re.DOTALL)
_DEFAULT = re.compile(r"default: \((.*?)\)(?=[];])")
_RANGE = re.compile(r"; x>=[\d.]+\]")


@dataclass(frozen=True, slots=True)
class Page:
    """The page of a command: `home` is the module and the function behind it, "" for a group; `heading` is what it is
    listed under; `examples` are command lines and their meanings."""

    heading: str
    home: str
    summary: str
    more: str
    examples: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The summary and what else there is to know."""
        return f"{self.summary}\n\n{self.more}".strip()


@cache
def pages() -> dict[str, Page]:
    """Return the pages by what a user types behind `edgellm`, in the order in which they are listed."""
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
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


def names_below(group: str) -> list[str]:
    """Return the names of the commands directly below a group; those of the first page for ""."""
    places = [name.rpartition(" ") for name in pages() if name]
    return [name for before, _, name in places if before == group]


def path_of(context: Any) -> str:
    """Return what a user types for a command behind `edgellm`."""
    path: str = context.command_path
    return path.partition(" ")[2]


class CommandPage(TyperCommand):
    """A command whose `--help` is short, and whose `--help-all` is complete."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params.append(copy(_help_all_option()))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, with brackets around what may be left out and no others."""
        return [_usage(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        formatter.write(_rendered(Group(*_page(self, ctx))))


class GroupPage(TyperGroup):
    """A group of commands, with a help page in the same layout."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the group's name. Without any, print its page, and end as for wrong usage."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        known = pages()
        rows: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            page = known[f"{path_of(ctx)} {name}".strip()]
            rows.setdefault("Commands" if ctx.parent else page.heading, []).append((name, page.summary))
        parts = [*_head(self, ctx, True)]
        for title, listed in rows.items():
            parts += _section(title, listed)
        formatter.write(_rendered(Group(*parts, *_section(_OPTIONS, _rows(self.get_params(ctx), ctx)))))


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def _help_all(
    _: Annotated[
        bool,
        typer.Option(
            "--help-all", is_eager=True, expose_value=False, callback=_show_all, help="Show all options, and exit."
        ),
    ] = False,
) -> None:
    """Declare the option."""


@cache
def _help_all_option() -> Any:
    """Return the option that `_help_all` declares, which takes as long as the options of a command."""
    holder = typer.Typer(add_completion=False)
    holder.command()(_help_all)
    return get_command(holder).params[0]


def _page(command: CommandPage, ctx: typer.Context) -> Iterator[RenderableType]:
    """Yield the parts of a command's page."""
    given = command.get_params(ctx)
    arguments = [one for one in given if one.param_type_name == "argument"]
    options = [one for one in given if isinstance(one, TyperOption) and not one.hidden]
    short = sum(not one.is_eager for one in options) > SHORT
    everything = not short or ctx.meta.get(_ALL, False)
    panels: dict[str, list[TyperOption]] = {name: [] for name in (_OPTIONS, *PANELS)}
    for one in options:
        if short or "--help-all" not in one.opts:
            panels[one.rich_help_panel or _OPTIONS if short else _OPTIONS].append(one)
    yield from _head(command, ctx, everything)
    yield from _section("Arguments", _rows(arguments, ctx))
    for name in panels if everything else (_OPTIONS,):
        yield from _section(name, _rows(panels[name], ctx))
    if not everything:
        names = ", ".join(name if name.isupper() else name.lower() for name in PANELS if panels[name])
        yield Text.assemble(f"\nMore options ({names}): ", (f"{ctx.command_path} --help-all", _NAME))


def _head(command: TyperCommand | TyperGroup, ctx: typer.Context, everything: bool) -> Iterator[RenderableType]:
    """Yield the usage, the summary, the examples and what else there is to know."""
    yield Text(command.get_usage(ctx), "bold")
    page = pages().get(path_of(ctx)) or pages()[command.name or ""]  # another name for a command has its page
    yield Text(f"\n{page.summary}")
    if page.examples:
        yield Text("\nExamples:", "bold")
    for line, what in page.examples if everything else page.examples[:_SHORT_EXAMPLES]:
        yield Text(f"  {line}", _NAME)
        yield Padding(Text(what), (0, 0, 0, 6))
    if page.more and everything:
        yield Text(f"\n{page.more}")


def _section(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    """Yield a heading and, for each name, a line with the name and its meaning."""
    if not rows:
        return
    yield Text(f"\n{title}:", "bold")
    width = max((len(name) for name, _ in rows if len(name) <= _NAMES_WIDTH), default=0)
    for name, meaning in rows:
        head = Text(f"  {name}", _NAME)
        if len(name) > width:
            yield head
            head = Text()
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(width=width + 2)
        line.add_column()
        found = _NOTE.fullmatch(meaning)
        line.add_row(head, Text(meaning) if found is None else Text.assemble(found[1], (f" [{found[2]}]", "dim")))
        yield line


def _rows(parameters: Sequence[Any], ctx: typer.Context) -> list[tuple[str, str]]:
    """Return the names and the meanings of parameters; a switch that is on by default is --[no-]NAME."""
    rows = []
    for one in parameters:
        if (record := one.get_help_record(ctx)) is not None:
            name, meaning = record
            if one.param_type_name == "argument":
                (name,) = map(_usage, one.get_usage_pieces(ctx))
            elif " / --no-" in name:
                name, meaning = name.replace("--", "--[no-]", 1).partition(" / ")[0], meaning.replace(f": {name}", "")
            rows.append((name, _RANGE.sub("]", _DEFAULT.sub(r"default: \1", meaning))))
    return rows


def _usage(piece: str) -> str:
    """Return a word of a usage line as other programs write it: MODEL, [MODEL], PROMPT..."""
    return piece.translate({ord("{"): None, ord("}"): None}).replace("[[", "[").replace("]]", "]")


def _rendered(page: RenderableType) -> str:
    console = out()
    console.width = min(console.width, WIDTH)
    with console.capture() as captured:
        console.print(page)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"
