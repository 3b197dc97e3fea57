"""Help pages: `--help` has examples and the options that most people need, `--help-all` has everything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cache
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from edgellm.cli.help_examples import EXAMPLES
from edgellm.cli.views.console import out

WIDTH = 100
"""Columns of a page, at most."""
SHORT = 14
"""Options of a page that is shown whole; from longer ones those in `PANELS` are left out, and examples."""
_SHORT_EXAMPLES = 6
_ALL = "edgellm.help_all"  # in a context's meta: that all options are asked for
_NAMES_WIDTH = 34  # columns of the names of options; longer names have a line of their own

PANELS: dict[str, tuple[str, ...]] = {
    "Conversation": ("conversation", "history", "prompt_cache"),
    "Several devices": ("mesh", "interface", "announce", "paired_only", "sessions", "f32"),
    "Drafts and verification": (
        "gate", "profile", "learn_profile", "retrieval", "context_lookup", "parallel", "early_exit", "exit_threshold",
        "verifier_tier", "verifier_key_file", "upstream_tier", "upstream_key_file",
    ),
    "Sampling": (
        "top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty", "seed",
    ),
    "Thinking": ("reasoning_effort", "template_arg"),
    "HTTP": (
        "http", "tls_cert", "tls_key", "replies", "waiting", "strict", "plan", "keep_alive", "allow_origin",
        "allow_host", "embeddings",
    ),
    "Worker": ("memory", "keep", "store"),
    "Hardware": (
        "gpu_layers", "device", "tensor_split", "threads", "ctx_size", "batch_size", "cache_type", "flash_attn",
        "mlock",
    ),
    "Output": ("stats", "explain", "log_level"),
}  # fmt: skip
"""The options that `--help` of a command with more than `SHORT` leaves out, by their parameters' names."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Talk": ("setup", "run", "chat", "serve", "ps", "stop", "service"),
    "Models": ("catalog", "pull", "ls", "show", "rm", "profile"),
    "Devices": ("pair", "peers", "mesh", "doctor"),
    "Settings and history": ("config", "conversations", "history", "bench"),
}
"""The commands of `edgellm --help` by what they are about; others follow behind."""
_OPTIONS = "Options"
_NAME = "cyan"
_NOTE = re.compile(r"(.*?) *\[((?:env var|default|required).*)\]", re.DOTALL)
_DEFAULT = re.compile(r"default: \((.*?)\)(?=[];])")
_RANGE = re.compile(r"; x>=[\d.]+\]")
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


def command_group(name: str | None, summary: str) -> typer.Typer:
    """Return a group of commands, which prints its help page if it is called without one."""
    return typer.Typer(
        name=name, cls=_GroupPage, help=summary, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


def add_command(
    group: typer.Typer, name: str, callback: Callable[..., Any], summary: str, more: str = "", *, hidden: bool = False,
    passes_on: bool = False,
) -> None:  # fmt: skip
    """Add a command to a group. `summary`: its one line; `more`: paragraphs that a short page leaves out; `passes_on`:
    options that it does not know are left among its words."""
    settings = {"ignore_unknown_options": True} if passes_on else None
    page = f"{summary}\n\n{more}".strip()
    group.command(name, cls=_CommandPage, help=page, hidden=hidden, context_settings=settings)(callback)


class _CommandPage(TyperCommand):
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


class _GroupPage(TyperGroup):
    """A group of commands, with a help page in the same layout."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the group's name. Without any, print its page, and end as for wrong usage."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        listed = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = {name: (one.help or "").partition("\n\n")[0] for name, one in listed if one and not one.hidden}
        parts = [*_head(self, ctx, True)]
        for title, names in (GROUPS if ctx.parent is None else {}).items():
            parts += _section(title, [(name, rows.pop(name)) for name in names if name in rows])
        parts += [*_section("Commands", list(rows.items())), *_section(_OPTIONS, _rows(self.get_params(ctx), ctx))]
        formatter.write(_rendered(Group(*parts)))


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


def _page(command: _CommandPage, ctx: typer.Context) -> Iterator[RenderableType]:
    """Yield the parts of a command's page."""
    given = command.get_params(ctx)
    arguments = [one for one in given if one.param_type_name == "argument"]
    options = [one for one in given if isinstance(one, TyperOption) and not one.hidden]
    short = sum(not one.is_eager for one in options) > SHORT
    everything = not short or ctx.meta.get(_ALL, False)
    panels: dict[str, list[TyperOption]] = {name: [] for name in (_OPTIONS, *PANELS)}
    for one in options:
        if short or "--help-all" not in one.opts:
            panels[_PANEL_OF.get(one.name, _OPTIONS) if short else _OPTIONS].append(one)
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
    summary, _, more = (command.help or "").partition("\n\n")
    yield Text(f"\n{summary}")
    examples = EXAMPLES.get(ctx.command_path.partition(" ")[2], ())
    if examples:
        yield Text("\nExamples:", "bold")
    for line, what in examples if everything else examples[:_SHORT_EXAMPLES]:
        yield Text(f"  {line}", _NAME)
        yield Padding(Text(what), (0, 0, 0, 6))
    if more and everything:
        yield Text(f"\n{more}")


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
