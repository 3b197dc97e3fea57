"""The application: a tree of commands, each of which is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command_from_info, get_group
from typer.models import CommandInfo

from edgellm import __version__
from edgellm.cli.help_pages import CommandPage, GroupPage, Page, names_below, pages, path_of
from edgellm.cli.settings import bind_variables, read_file

_ALIASES = {"list": "ls", "models": "ls"}
"""Names that other programs have for commands; no page shows them."""
_PASS_ON = ("run", "service install")
"""The commands that leave options which they do not know among their words."""


class _Group(GroupPage):
    """A group of commands, which are made when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return names_below(path_of(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of that name."""
        path = f"{path_of(ctx)} {_ALIASES.get(cmd_name, cmd_name)}".strip()
        if self.commands.get(cmd_name) is None and path in pages():
            self.commands[cmd_name] = _made(path)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return a command by its name, and the words behind it."""
        self.commands = {**dict.fromkeys(self.list_commands(ctx)), **self.commands}  # type: ignore[dict-item]  # to propose
        return super().resolve_command(ctx, args)


def _group(name: str, page: Page) -> typer.Typer:
    return typer.Typer(
        name=name, cls=_Group, help=page.text, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


def _made(path: str) -> Any:
    """Return a command or a group with its options."""
    page, name = pages()[path], path.rpartition(" ")[2]
    if not page.home:
        return get_group(_group(name, page))
    module, _, function = page.home.partition(":")
    callback = getattr(import_module(f"edgellm.cli.commands.{module}"), function)
    settings = {"ignore_unknown_options": True} if path in _PASS_ON else None
    info = CommandInfo(name=name, cls=CommandPage, help=page.text, callback=callback, context_settings=settings)
    command: Any = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)
    bind_variables(command, path)
    return command


app = _group("edgellm", pages()[""])


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
    if context.invoked_subcommand != "config":  # which must work while the file has an error
        context.default_map = read_file(context)
