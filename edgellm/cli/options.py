"""Records as options: each record among a command's parameters becomes the flags of the record's fields."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from configparser import ConfigParser
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args

import typer

from edgellm.errors import InvalidOption
from edgellm.spec.params import AS_MODEL, Flag, flag, flags_of

if TYPE_CHECKING:
    from edgellm.engine.hardware import Hardware
    from edgellm.upstream.verifier import UpstreamOptions


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Record:
    """A record among a command's parameters, and the flags that the command has, by its fields' names: all of them, or
    those that the parameter is annotated with."""

    kind: type[Any]
    flags: Mapping[str, Flag]

    @classmethod
    def of(cls, annotation: Any) -> _Record | None:
        """Return the record that an annotation names; None for any other parameter."""
        kind, *names = get_args(annotation) if typing.get_origin(annotation) is Annotated else (annotation,)
        if not (is_dataclass(kind) and isinstance(kind, type)):
            return None
        return cls(kind, {name: one for name, one in flags_of(kind).items() if not names or name in names})

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield a parameter for each flag. Names in the types of other fields need not be imported."""
        hints, texts = dict[str, Any](), dict[str, str]()
        for home in reversed(self.kind.__mro__):
            wanted = {name: hint for name, hint in inspect.get_annotations(home).items() if name in self.flags}
            for name in wanted:
                texts[name] = option_texts().get(home.__name__, name, fallback="")
                if choices := self.flags[name].choices:
                    wanted[name] = Literal[choices]
            hints |= typing.get_type_hints(SimpleNamespace(__annotations__=wanted), vars(sys.modules[home.__module__]))
        defaults = {one.name: one.default for one in fields(self.kind)}
        for name, one in self.flags.items():
            hint, default = hints[name], defaults[name]
            if typing.get_origin(hint) is tuple:
                hint, default = list[get_args(hint)[0]] | None, None  # type: ignore[misc]
            made = typer.Option(
                *one.names, metavar=one.metavar, help=one.help or texts[name], show_default=one.shown or True,
                envvar=one.variable, rich_help_panel=one.panel, min=one.least,
            )  # fmt: skip
            kind = inspect.Parameter.KEYWORD_ONLY
            yield inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, made])

    def build(self, given: dict[str, Any]) -> Any:
        """Return the record, with its values taken out of those that were `given`."""
        values = {name: given.pop(name) for name in self.flags}
        lists = {one.name for one in fields(self.kind) if one.default == ()}
        return self.kind(**{name: tuple(one or ()) if name in lists else one for name, one in values.items()})


def option(default: Any, metavar: str | None = None, **more: Any) -> Any:
    """Return a field with a flag as `flag` does, whose text is in `help_options.txt`."""
    return flag(default, "", metavar, **more)


@functools.cache
def option_texts() -> ConfigParser:
    """Return the help texts of options by their record or command, then by their field or parameter."""
    found = ConfigParser(delimiters=(":",), interpolation=None)
    found.read(Path(__file__).with_name("help_options.txt"), encoding="utf-8")
    return found


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


DEFAULT = "default"  # a copy: `edgellm.storage.model_files` is slow to import
DEFAULT_DRAFT, DEFAULT_VERIFIER = "smollm2:draft", "smollm2:135m"  # names on help pages
DEVICES = "Several devices"
DRAFTS = "Drafts and verification"
"""Sections of help pages."""
INTERRUPTED = 130
"""The exit code of a reply that its user has stopped."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Remove without asking.")]


Engine: TypeAlias = Literal["auto", "stages", "rpc"]
"""The engines that spread a model over devices."""
Objective: TypeAlias = Literal["ttft", "reply"]


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The models of a conversation, and where the verifier is."""

    draft: str = option(DEFAULT, "MODEL", variable="EDGELLM_DRAFT", shown=DEFAULT_DRAFT)
    verifier: str = option(
        DEFAULT, "MODEL|HOST:PORT|URL|auto", names=("-m", "--verifier"), variable="EDGELLM_VERIFIER",
        shown=DEFAULT_VERIFIER,
    )  # fmt: skip
    peer: tuple[str, ...] = option((), "DEVICE|HOST:PORT")
    mesh: str | None = option(None, "SPLIT|FILE.toml|auto", panel=DEVICES)
    engine: Engine = option("auto", "auto|stages|rpc")
    objective: Objective = option("reply", panel=DEVICES)
    f16: bool = option(False, names=("--f16",), panel=DEVICES)
    verifier_tier: Literal["score", "fan-out", "continue"] | None = option(
        None, "score|fan-out|continue", panel=DRAFTS, shown="the best way that it has",
    )  # fmt: skip
    verifier_key_file: Path | None = option(None, "FILE", panel=DRAFTS, shown="$EDGELLM_VERIFIER_KEY")

    def upstream(self) -> UpstreamOptions | None:
        """Return the options for a stock server, None without any."""
        tier, key = self.verifier_tier, self.verifier_key_file
        if tier is None and key is None:
            return None
        from edgellm.upstream.rows import Tier
        from edgellm.upstream.verifier import UpstreamOptions

        return UpstreamOptions(None if tier is None else Tier(tier), None if key is None else key.expanduser())


@dataclass(frozen=True, slots=True)
class ThinkOptions:
    """The options for thinking before the answer."""

    think: str = option("auto", "auto|on|off|N")
    reasoning_effort: str | None = option(None, "LEVEL", panel="Thinking", shown=AS_MODEL)
    template_arg: tuple[str, ...] = option((), "NAME=VALUE", panel="Thinking")

    def fields(self) -> dict[str, Any]:
        """Return the fields of `ReplyOptions` for these options. Raise InvalidOption for what they cannot be."""
        words: dict[str, bool | None] = {"auto": None, "on": True, "off": False}
        think: bool | int | str | None = words.get(self.think, self.think)
        if isinstance(think, str):
            if not re.fullmatch("[0-9]{1,9}", think):
                raise InvalidOption(f"--think is {think!r}.", "Choose auto, on, off, or a number of tokens.")
            think = int(think)
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {"think": think, "template_args": effort | dict(map(_argument, self.template_arg))}


def assigned(option: str, text: str, form: str) -> tuple[str, str]:
    """Return the name and the value of an `option` of the `form` NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidOption(f"{option} is {text!r}.", f"Write {form}.")
    return name, value


def _argument(text: str) -> tuple[str, object]:
    """Return the name and the value of an argument; a value that is no JSON is a text."""
    form = "NAME=VALUE, such as enable_thinking=false; VALUE is JSON or plain text"
    name, value = assigned("--template-arg", text, form)
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


DRAFT, VERIFIER = "draft", "verifier"
PLANNING = ("gpu_layers", "device", "tensor_split", "threads", "ctx_size", "batch_size", "cache_type", "flash_attn")
"""The options that a plan for several devices depends on."""
_SWITCH = {"on": True, "off": False}
Values = tuple[str, ...]


def _hardware(metavar: str, shown: str) -> Any:
    return option((), metavar, panel="Hardware", shown=shown)


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """The options as they were given: each holds for both models, or, as draft=VALUE or verifier=VALUE, for one."""

    gpu_layers: Values = _hardware("auto|all|N", "as many as fit")
    device: Values = _hardware("NAME/NAME", "all")
    tensor_split: Values = _hardware("N/N", "by free memory")
    threads: Values = _hardware("N", "one per performance core")
    ctx_size: Values = _hardware("N", "4096 to 32768, by free memory")
    batch_size: Values = _hardware("N", "512")
    cache_type: Values = _hardware("f16|q8_0|q4_0", "f16")
    flash_attn: Values = _hardware("auto|on|off", "where it is faster")
    mlock: Values = _hardware("on|off", "off")
    reproducible: Values = _hardware("on|off", "off")

    def of(self, role: str) -> Hardware:
        """Return the hardware of the draft model or the verifier. Raise InvalidOption for an unknown value."""
        from edgellm.engine.hardware import ALL_LAYERS, Hardware

        def value(name: str, *, number: bool = False, **words: Any) -> Any:
            text = self._text(name, role)
            if text is None or text in words:
                return None if text is None else words[text]
            if not (number and text.isdigit()):
                *others, last = (*words, "a whole number") if number else words
                raise _wrong(name, text, f"{', '.join(others)} or {last}")
            return int(text)

        devices, split = self._text("device", role), self._text("tensor_split", role)
        try:
            shares = tuple(float(part) for part in _parts(split))
        except ValueError:
            raise _wrong("tensor_split", split or "", "shares such as 3/1") from None
        return Hardware(
            gpu_layers=value("gpu_layers", number=True, auto=None, all=ALL_LAYERS),
            devices=() if devices == "auto" else tuple(_parts(devices)), tensor_split=shares,
            threads=value("threads", number=True, auto=None), n_ctx=value("ctx_size", number=True, auto=None),
            n_batch=value("batch_size", number=True, auto=None), cache_type=self._text("cache_type", role),
            flash_attn=value("flash_attn", auto=None, **_SWITCH), mlock=bool(value("mlock", **_SWITCH)),
            reproducible=bool(value("reproducible", **_SWITCH)),
        )  # fmt: skip

    def _text(self, name: str, role: str) -> str | None:
        """Return the last value that holds for a model; None if there is none."""
        found = None
        for text in getattr(self, name):
            of, _, value = text.rpartition("=")
            if of not in ("", DRAFT, VERIFIER):
                raise _wrong(name, text, f"VALUE, {DRAFT}=VALUE or {VERIFIER}=VALUE")
            found = value.strip() if of in ("", role) else found
        return found


@dataclass(frozen=True, slots=True)
class PlanHardware(HardwareOptions):
    """The options on which a plan for several devices depends."""

    gpu_layers: Values = _hardware("auto|all|0", "all, if there are cards")
    ctx_size: Values = _hardware("N", "4096, or as many as are planned for")


def _wrong(name: str, text: str, instead: str) -> InvalidOption:
    return InvalidOption(f"{dashed(name)} is {text!r}.", f"Give {instead}.")


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").replace(",", "/").split("/") if part.strip()]
