"""`edgellm config`: show where settings are kept, and which are in force."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Annotated, Any, Literal

import typer

from edgellm.cli import settings
from edgellm.cli.options.models import AsJson
from edgellm.cli.views.console import emit, emit_json, say
from edgellm.errors import InvalidOption
from edgellm.places import cache_dir, config_file, data_dir, state_dir


def path(
    place: Annotated[
        Literal["config", "data", "cache", "state"],
        typer.Argument(metavar="PLACE", help="config: the settings file. data: profiles, identity, paired devices, "
                       "history. cache: files that can be made again. state: crash logs."),
    ] = "config",
) -> None:  # fmt: skip
    places = {"config": config_file, "data": data_dir, "cache": cache_dir, "state": state_dir}
    emit(str(places[place]()))


def show(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="Show this command only, such as chat or mesh plan.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also show defaults of options that are not set.")] = False,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    as_json: AsJson = False,
) -> None:
    root: Any = context.find_root()
    words = tuple(command or ())
    root.default_map = settings.read_file(root)
    known = [one for one in settings.settings(root) if one.command[: len(words)] == words]
    if not known:
        raise InvalidOption(f"There is no command {' '.join(words)!r}.", "See: edgellm --help")
    chosen = [one for one in known if everything or one.origin != settings.DEFAULT]
    if as_json:
        tree: dict[str, Any] = {}
        for one in chosen:
            table = tree
            for word in one.command:
                table = table.setdefault(word, {})
            table[one.option] = {"value": one.value, "origin": one.origin} if origin else one.value
        emit_json(tree)
        return
    if not chosen:
        say(f"Nothing is set. To set options, write {config_file()}; see: edgellm config show --help")
    for number, (name, group) in enumerate(groupby(chosen, key=lambda one: one.command)):
        emit("\n" * bool(number) + f"[{'.'.join(name)}]")
        for one in group:
            # strings, numbers, booleans and lists look alike in TOML and JSON
            value = json.dumps(one.value, ensure_ascii=False)
            line = f"# {one.option}" if one.value is None else f"{one.option} = {value}"
            place = config_file() if one.origin == settings.FILE else one.origin
            emit(f"{line}  # {place}" if origin else line)
