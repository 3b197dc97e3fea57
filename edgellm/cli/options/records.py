"""Records as options: each record among a command's parameters becomes the flags of the record's fields."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from edgellm.errors import InvalidOption
from edgellm.flags import Completion, Flag, flags_of

T = TypeVar("T")


class _Only(NamedTuple):
    names: tuple[str, ...] = ()
    shown: str = ""


def only(*names: str, shown: str = "") -> Any:
    """Return the mark, for `Annotated`, of a record of which a command has these fields alone, or without names all;
    `shown` stands for their defaults on its help page."""
    return _Only(names, shown)


@dataclass(frozen=True, slots=True)
class _Record:
    """A record among a command's parameters, and the flags that the command has, by its fields' names."""

    kind: type[Any]
    flags: Mapping[str, Flag]

    @classmethod
    def of(cls, annotation: Any) -> _Record | None:
        """Return the record that an annotation names; None for any other parameter."""
        kind, only = get_args(annotation)[:2] if get_origin(annotation) is Annotated else (annotation, _Only())
        if not (is_dataclass(kind) and isinstance(kind, type)):
            return None
        flags = {name: one for name, one in flags_of(kind).items() if not only.names or name in only.names}
        return cls(kind, {name: replace(one, shown=only.shown or one.shown) for name, one in flags.items()})

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield a parameter for each flag. Names in the types of other fields need not be imported."""
        hints = dict[str, Any]()
        for home in reversed(self.kind.__mro__):
            wanted = {name: hint for name, hint in inspect.get_annotations(home).items() if name in self.flags}
            for name in wanted:
                if choices := self.flags[name].choices:
                    wanted[name] = str if self.flags[name].several else Literal[tuple(choices)]
            hints |= get_type_hints(SimpleNamespace(__annotations__=wanted), vars(sys.modules[home.__module__]))
        defaults = {one.name: one.default for one in fields(self.kind)}
        for name, one in self.flags.items():
            hint, default = hints[name], defaults[name]
            if get_origin(hint) is tuple:
                hint, default = list[get_args(hint)[0]] | None, None  # type: ignore[misc]
            complete = one.complete or (None if one.choices is None else completion(one.choices, one.several))
            option = typer.Option(
                *one.names, metavar=one.metavar, help=one.help, show_default=one.shown or True, envvar=one.variable,
                autocompletion=complete, rich_help_panel=one.panel, min=one.least, hidden=bool(one.refused),
            )  # fmt: skip
            kind = inspect.Parameter.KEYWORD_ONLY
            yield inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, option])

    def build(self, given: dict[str, Any]) -> Any:
        """Return the record, with its values taken out of those that were `given`."""
        values = {name: given.pop(name) for name in self.flags}
        for name, one in self.flags.items():
            if one.refused and values[name]:
                raise InvalidOption(f"{dashed(name)} {one.refused}.", "Leave it out here.")
        lists = {one.name for one in fields(self.kind) if one.default == ()}
        return self.kind(**{name: tuple(one or ()) if name in lists else one for name, one in values.items()})


def with_records(command: Callable[..., T]) -> Callable[..., T]:
    """Return a command that has the flags of the records among its parameters, and gets the records."""
    signature = inspect.signature(command, eval_str=True)
    records = {name: found for name, one in signature.parameters.items() if (found := _Record.of(one.annotation))}

    @functools.wraps(command)
    def run(**given: Any) -> T:
        built = {name: record.build(given) for name, record in records.items()}
        return command(**given, **built)

    parameters: list[inspect.Parameter] = []
    for name, one in signature.parameters.items():
        if name in records:
            parameters += records[name].parameters()
        else:
            parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def completion(choices: Mapping[str, str], several: Collection[str] = ()) -> Completion:
    """Return the shell completion of a choice; of `several`, separated by commas, for the last one typed."""

    def complete(incomplete: str) -> Iterator[tuple[str, str]]:
        *before, last = incomplete.split(",") if several else [incomplete]
        for name, meaning in choices.items():
            if name.startswith(last.lower()) and name not in before and (not before or name in several):
                yield ",".join([*before, name]), meaning

    return complete


def dashed(name: str) -> str:
    """Return the flag of a field's name."""
    return f"--{name.replace('_', '-')}"


def options_of(command: Any) -> dict[str, Any]:
    """Return the options of a command by their long names, without dashes."""
    options = [one for one in command.params if one.expose_value and not one.is_eager]
    return {one.opts[-1][2:]: one for one in options if one.opts[-1].startswith("--")}


def on_command_line(context: typer.Context, name: str) -> bool:
    """Return whether an option comes from the command line, and not from settings."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_given(context: typer.Context, names: Collection[str], why: str, next_step: str) -> None:
    """Raise InvalidOption where the command line gives one of the options of these `names`; settings are left alone."""
    for name in names:
        if on_command_line(context, name):
            raise InvalidOption(f"{dashed(name)} {why}.", next_step)
