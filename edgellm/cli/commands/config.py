"""Options that are set once, in a TOML file, or each by an environment variable; `edgellm config` shows them.

The file has a table for each command, with its options by their long names; `EDGELLM_CHAT_BUDGET` is `--budget` of
`edgellm chat`. The command line takes precedence over a variable, a variable over the file.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal, NamedTuple

import typer

from edgellm.cli.options import AsJson, options_of
from edgellm.cli.views.console import emit, emit_json, say
from edgellm.errors import InvalidOption, StateDamaged
from edgellm.state import SMALL, read_state, read_toml, write_state
from edgellm.system import cache_dir, config_file, data_dir, state_dir

_FILE, _DEFAULT = "file", "default"


def path(place: Literal["config", "data", "cache", "state"] = typer.Argument("config", metavar="PLACE")) -> None:
    places = {"config": config_file, "data": data_dir, "cache": cache_dir, "state": state_dir}
    emit(str(places[place]()))


def show(
    context: typer.Context,
    command: list[str] | None = typer.Argument(None, metavar="[COMMAND]"),
    everything: bool = typer.Option(False, "--all"),
    origin: bool = typer.Option(False, "--origin"),
    as_json: AsJson = False,
) -> None:
    root: Any = context.find_root()
    words = tuple(command or ())
    root.default_map = read_settings(root)
    known = [one for one in _settings(root) if one.command[: len(words)] == words]
    if not known:
        raise InvalidOption(f"There is no command {' '.join(words)!r}.", "See: edgellm --help")
    chosen = [one for one in known if everything or one.origin != _DEFAULT]
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
            emit(f"{line}  # {config_file() if one.origin == _FILE else one.origin}" if origin else line)


class _Setting(NamedTuple):
    """The value of an option, and its origin: `_FILE`, `_DEFAULT`, or the name of a variable."""

    command: tuple[str, ...]
    option: str
    value: object
    origin: str


def _settings(parent: typer.Context) -> Iterator[_Setting]:
    """Yield the settings of all options of a command and of those below it."""
    for name, option in options_of(parent.command).items():
        value, source = option.consume_value(parent, {})
        if source.name != "DEFAULT" or not option.hidden:
            origin = {"DEFAULT": _DEFAULT, "DEFAULT_MAP": _FILE}.get(source.name) or variable_of(option)
            yield _Setting(tuple(parent.command_path.split()[1:]), name, value, origin)
    for child in _children(parent):
        yield from _settings(_child(parent, child))


def variable_of(option: Any) -> str:
    """Return the name of the environment variable that gives the value of an option, one of a command."""
    names: list[str] = option.envvar
    return next(name for name in names if os.environ.get(name))


def _children(parent: typer.Context) -> list[str]:
    """Return the names of the commands below this one."""
    group: Any = parent.command
    return group.list_commands(parent) if hasattr(group, "list_commands") else []


def _child(parent: typer.Context, name: str) -> typer.Context:
    """Return a context for a command below this one, which is imported."""
    group: Any = parent.command
    return typer.Context(group.get_command(parent, name), parent=parent, info_name=name)


def read_settings(root: typer.Context) -> dict[str, Any]:
    """Return the values in the settings file by command, then by parameter. Raise InvalidOption for what is wrong."""
    path = config_file()
    try:
        return _default_map(root, read_toml(path) or {}, "")
    except StateDamaged as error:
        raise InvalidOption(f"{path} cannot be read as TOML: {error.reason}.", "Correct it or move it away.") from None


def _default_map(context: typer.Context, table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the default map of a command from its table in the file; `prefix` is the table's name and a dot."""
    children, options, found = _children(context), options_of(context.command), dict[str, Any]()
    for name, value in table.items():
        if isinstance(value, dict) and name in children:
            found[name] = _default_map(_child(context, name), value, f"{prefix}{name}.")
            continue
        option, where = options.get(name.replace("_", "-")), f"{config_file()}: {prefix}{name[:60]}"
        if isinstance(value, dict) or option is None:
            kind = "a command" if isinstance(value, dict) else "an option"
            known = [f"[{prefix}{child}]" for child in children] or list(options)
            near = difflib.get_close_matches(f"[{prefix}{name}]" if children else name, known, 1)
            next_step = f"Did you mean {near[0]}?" if near else f"Choose one of {', '.join(known)}."
            raise InvalidOption(f"{where} is not {kind}.", next_step)
        found[option.name] = [value] if option.multiple and not isinstance(value, list) else value
        try:
            option.process_value(context, found[option.name])
        except typer.BadParameter as error:
            shown, why = json.dumps(value, default=str)[:60], error.message.removeprefix("Value error, ").rstrip(".")
            next_step = f"Correct it; see: {context.command_path} --help"
            raise InvalidOption(f"{where} cannot be {shown}: {why[:300]}.", next_step) from None
    return found


def write_settings(root: typer.Context, tables: Mapping[str, Mapping[str, str]]) -> None:
    """Set options in the settings file, by command; everything else stays as it is. Raise InvalidOption."""
    read_settings(root)
    path = config_file()
    before = (read_state(path, SMALL, links=True) or b"").decode()
    wanted, lines = tomllib.loads(before), before.splitlines()
    for table, values in tables.items():
        wanted[table] = {**wanted.get(table, {}), **values}
        for name, value in values.items():
            _set_line(lines, table, name, json.dumps(value, ensure_ascii=False))
    after = "\n".join(lines) + "\n"
    try:
        same = tomllib.loads(after) == wanted
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        shown = (f"[{table}] {name} = {value!r}" for table, values in tables.items() for name, value in values.items())
        what = f"{path} is written in a form that edgellm cannot change."
        raise InvalidOption(what, f"Write into it: {'; '.join(shown)}")
    write_state(path.resolve() if path.is_symlink() else path, after)


def _set_line(lines: list[str], table: str, name: str, value: str) -> None:
    """Set `name` in a table to a value in TOML: in its line, or in a new line at the table's end."""
    header, key = rf"\s*\[\s*{re.escape(table)}\s*\]\s*(#.*)?", rf"\s*\"?{re.escape(name)}\"?\s*="
    start = next((at for at, line in enumerate(lines) if re.fullmatch(header, line)), None)
    if start is None:
        lines += [*[""] * bool(lines and lines[-1].strip()), f"[{table}]"]
        start = len(lines) - 1
    end = next((at for at in range(start + 1, len(lines)) if lines[at].lstrip().startswith("[")), len(lines))
    here = next((at for at in range(start + 1, end) if re.match(key, lines[at])), None)
    if here is None:
        here = max(at for at in range(start, end) if lines[at].strip()) + 1
        lines.insert(here, "")
    lines[here] = f"{name} = {value}"
