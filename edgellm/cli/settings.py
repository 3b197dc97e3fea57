"""Options that are set once: in a TOML file, or each by an environment variable.

The file has a table for each command, with its options by their long names; `EDGELLM_CHAT_BUDGET` is `--budget` of
`edgellm chat`. The command line takes precedence over a variable, a variable over the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.errors import ConfigUnusable, StateDamaged
from edgellm.places import config_dir
from edgellm.storage.state import read_toml

FILE = "file"
DEFAULT = "default"
_MOST_BYTES = 2**20
_OTHER = frozenset(  # variables that set no option
    {
        "EDGELLM_HOME", "EDGELLM_DRAFT", "EDGELLM_VERIFIER", "EDGELLM_INTERFACE", "EDGELLM_PROBE", "EDGELLM_AMX",
        "EDGELLM_HISTORY_KEEP",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command: its long name without dashes, the name of its parameter, and its default."""

    command: tuple[str, ...]
    name: str
    parameter: str
    many: bool
    default: object
    variable: str | None  # an older variable of its own, which takes precedence

    @property
    def env(self) -> str:
        """The environment variable that sets the option."""
        return "_".join(["EDGELLM", *self.command, self.name]).replace("-", "_").upper()


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of an option and its origin: `FILE`, `DEFAULT`, or the name of a variable."""

    option: Option
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings, one for each option that is set; `options` are all that exist."""

    settings: tuple[Setting, ...]
    options: tuple[Option, ...]

    def defaults(self) -> dict[str, Any]:
        """Return the values as a default map for the command line: by command, then by parameter."""
        tree: dict[str, Any] = {}
        for setting in self.settings:
            table = tree
            for word in setting.option.command:
                table = table.setdefault(word, {})
            table[setting.option.parameter] = setting.value
        return tree


def config_file() -> Path:
    """Return the file of settings. It need not exist."""
    return config_dir() / "config.toml"


def read_settings(command: Any, environment: Mapping[str, str], *, relaxed: bool = False) -> Settings:
    """Read all settings of `command`, the root command. `relaxed`: a file that cannot be used counts as empty, so that
    the command that tells its path still works.

    Raises:
        ConfigUnusable: the file is not TOML, or names what does not exist; says what.
    """
    options = tuple(_options(command, ()))
    known = {(option.command, option.name): option for option in options}
    try:
        found = {at: Setting(known[at], value, FILE) for at, value in _in_file(known)}
    except ConfigUnusable:
        if not relaxed:
            raise
        found = {}
    for option in options:
        if option.env in environment:
            text = environment[option.env]
            value = [one.strip() for one in text.split(",") if one.strip()] if option.many else text
            found[option.command, option.name] = Setting(option, value, option.env)
        if option.variable is not None and option.variable in environment:
            found[option.command, option.name] = Setting(option, environment[option.variable], option.variable)
    return Settings(tuple(found.values()), options)


def _options(command: Any, words: tuple[str, ...]) -> Iterator[Option]:
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _options(inner, (*words, name))
    for parameter in command.params:
        names = [one.removeprefix("--") for one in parameter.opts if one.startswith("--")]
        if words and names and not parameter.is_eager:
            variable = parameter.envvar if isinstance(parameter.envvar, str) else None
            default = parameter.default
            yield Option(words, names[0], parameter.name, parameter.multiple, default, variable)


def _in_file(known: Mapping[tuple[tuple[str, ...], str], Option]) -> Iterator[tuple[tuple[tuple[str, ...], str], Any]]:
    path = config_file()
    try:
        tables = read_toml(path, _MOST_BYTES)
    except StateDamaged as error:
        raise ConfigUnusable(f"{path} cannot be read as TOML: {error.reason}.", "Mend it, or move it away.") from None
    if tables is None:
        return
    yield from _in_table(path, tables, (), known)


def _in_table(
    path: Path, table: Mapping[str, Any], words: tuple[str, ...], known: Mapping[tuple[tuple[str, ...], str], Option]
) -> Iterator[tuple[tuple[tuple[str, ...], str], Any]]:
    commands = {command[: len(words) + 1] for command, _ in known if command[: len(words)] == words}
    for name, value in table.items():
        inner = (*words, name)
        if isinstance(value, dict) and inner in commands:
            yield from _in_table(path, value, inner, known)
            continue
        at = (words, name.replace("_", "-"))
        if at not in known:
            near = [option for command, option in known if command == words] or [one[-1] for one in commands if one]
            guess = difflib.get_close_matches(name, near, 1)
            said = f"{'.'.join(inner)} is no command" if isinstance(value, dict) else f"{'.'.join(inner)} is no option"
            hint = f"Perhaps {guess[0]} is meant." if guess else f"There is: {', '.join(sorted(near))}."
            raise ConfigUnusable(f"{path}: {said}.", hint)
        if not isinstance(value, (str, int, float, list)) or (isinstance(value, list) and not known[at].many):
            raise ConfigUnusable(f"{path}: {'.'.join(inner)} cannot be {value!r}.", "Give one value.")
        yield at, value
