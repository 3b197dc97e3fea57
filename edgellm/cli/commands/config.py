"""`edgellm config`: show where settings are kept, and which are in force."""

from __future__ import annotations

import enum
import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli.help_examples import taught
from edgellm.cli.views.console import emit, say
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.cli.settings import Option

config = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Set options once, in a file or by variables.")

_FILE = """The file is TOML, with a table for each command and its options by their long names:

  [chat]
  verifier = "desk:50151"
  budget = 0.2

  [serve]
  http-port = 8081

Each of them also has a variable: EDGELLM_CHAT_BUDGET, EDGELLM_SERVE_HTTP_PORT; several values with commas between them.
A word on the command line comes before a variable, a variable before the file. EDGELLM_HOME moves everything."""


class Folder(enum.StrEnum):
    """Places where edgellm keeps something."""

    CONFIG = "config"
    DATA = "data"
    CACHE = "cache"
    STATE = "state"


def path(
    place: Annotated[
        Folder,
        typer.Argument(metavar="PLACE", help="config: the file of settings. data: profiles, identity, paired devices, "
                       "history. cache: what can be made again. state: crash logs."),
    ] = Folder.CONFIG,
) -> None:  # fmt: skip
    from edgellm.cli.settings import config_file
    from edgellm.places import cache_dir, data_dir, state_dir

    emit(str({"config": config_file, "data": data_dir, "cache": cache_dir, "state": state_dir}[place]()))


def show(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="Of this command alone, such as chat or mesh plan.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what is not set, with the defaults.")] = False,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value is from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from edgellm.cli.settings import DEFAULT, Setting, config_file, read_settings

    settings = read_settings(context.find_root().command, os.environ)
    words = tuple(command or ())
    if words and all(option.command[: len(words)] != words for option in settings.options):
        raise InvalidOption(f"There is no command {' '.join(words)!r}.", "See: edgellm --help")
    known = {(one.option.command, one.option.name): one for one in settings.settings}
    chosen = [
        known.get((option.command, option.name)) or Setting(option, _plain(option), DEFAULT)
        for option in settings.options
        if option.command[: len(words)] == words and (everything or (option.command, option.name) in known)
    ]
    if as_json:
        emit(json.dumps(_tree(chosen, origin), indent=2))
        return
    if not chosen:
        say(f"Nothing is set. The file would be {config_file()}; see `edgellm config show --help`.")
    before: tuple[str, ...] | None = None
    for setting in chosen:
        if setting.option.command != before:
            emit(("" if before is None else "\n") + f"[{'.'.join(setting.option.command)}]")
            before = setting.option.command
        where = f"  # {_where(setting.origin, str(config_file()))}" if origin else ""
        value = (
            "# " + setting.option.name if setting.value is None else f"{setting.option.name} = {_toml(setting.value)}"
        )
        emit(value + where)


def _where(origin: str, file: str) -> str:
    from edgellm.cli.settings import FILE

    return file if origin == FILE else origin


def _plain(option: Option) -> Any:
    value = option.default
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    return None if callable(value) else str(value)


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # strings, numbers, booleans and lists look alike in TOML and JSON


def _tree(chosen: list[Any], origin: bool) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for setting in chosen:
        table = tree
        for word in setting.option.command:
            table = table.setdefault(word, {})
        table[setting.option.name] = {"value": setting.value, "origin": setting.origin} if origin else setting.value
    return tree


_SHOW = "Show which options are set, as the file would have them."
_RULES = f"{_FILE}\nExit code 2 means that the file has something in it that cannot be meant."
config.command("path", help=taught("config path", "Print where edgellm keeps something.", ""))(path)
config.command("show", help=taught("config show", _SHOW, _RULES))(show)
