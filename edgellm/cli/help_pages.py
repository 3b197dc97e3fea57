"""Help pages: `--help` has examples and the options that most people need, `--help-all` has everything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup, TyperOption

from edgellm.cli.views.console import out

WIDTH = 100
"""Columns of a page, at most."""
SHORT = 14
"""Most options of a page that is shown whole; longer pages leave out the options in `PANELS`, and examples."""
_SHORT_EXAMPLES = 6
_NAMES_WIDTH = 34  # columns of the names of options; longer names have a line of their own
PANELS = (
    "Conversation", "Several devices", "Drafts and verification", "Sampling", "Thinking", "HTTP", "Worker", "Hardware",
    "Output",
)  # fmt: skip
"""The sections of options that `--help` of a command with more than `SHORT` leaves out, in their order."""
_OPTIONS = "Options"
_NAME = "cyan"
Page: TypeAlias = Any
"""A `Page` of `edgellm.cli.app`, which imports this module when it is asked for a page."""
_NOTE = re.compile(r"(.*?) *\[((?:env var|default|required).*)\]", re.DOTALL)
_DEFAULT = re.compile(r"default: \((.*?)\)(?=[];])")
_RANGE = re.compile(r"; x>=[\d.]+\]")


def command_page(command: TyperCommand, ctx: typer.Context, page: Page, *, everything: bool) -> str:
    """Return the page of a command: a short one, unless everything is asked for."""
    given = command.get_params(ctx)
    options = [one for one in given if isinstance(one, TyperOption) and not one.hidden]
    short = sum(not one.is_eager for one in options) > SHORT
    everything = everything or not short
    panels: dict[str, list[TyperOption]] = {name: [] for name in (_OPTIONS, *PANELS)}
    for one in options:
        if short or "--help-all" not in one.opts:
            panels[one.rich_help_panel or _OPTIONS if short else _OPTIONS].append(one)
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
