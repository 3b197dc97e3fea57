"""The options that several commands share: how models are loaded and computed, and how they think."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.engine.hardware import Hardware
    from edgellm.upstream.opening import UpstreamOptions

DRAFT, VERIFIER = "draft", "verifier"
DEFAULT = "default"  # as in `edgellm.storage.default_pair`, which is slow to import
DEFAULT_DRAFT, DEFAULT_VERIFIER = "smollm2:draft", "smollm2:135m"  # what the help pages call them
_PANEL = "Hardware"
_AUTO = "auto"
T = TypeVar("T")
_MOST_DIGITS = 9
_THINK = {"auto": None, "on": True, "off": False}
AS_MODEL = "the model's"
"""What is shown as the default of an option that the model decides."""

Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy.", show_default=AS_MODEL)
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Seed; the same one repeats a sampled reply.", show_default="random")
]
Think = Annotated[
    str,
    typer.Option(
        metavar="auto|on|off|N",
        help="Have the model think before it answers; N: for at most N tokens. auto: as its chat template does.",
    ),
]
ReasoningEffort = Annotated[
    str | None,
    typer.Option(metavar="LEVEL", help="Level of thinking, for models that know levels: low, medium, high.",
                 show_default=AS_MODEL),
]  # fmt: skip
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg", metavar="NAME=VALUE",
        help="Argument for the model's chat template, such as enable_thinking=false; can be given several times.",
    ),
]  # fmt: skip

VerifierTier = Annotated[
    str | None,
    typer.Option(
        metavar="score|fan-out|continue", help="How a stock server (http://...) verifies.",
        show_default="the best way that it has",
    ),
]  # fmt: skip
VerifierKeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with a stock server's key.", show_default="$EDGELLM_VERIFIER_KEY"),
]
Upstream = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL[#MODEL]", help="Role verifier: stock server (http://...) that verifies in place of a model here, "
        "with the tokenizer of --model; several with one model share the work and stand in for each other.",
    ),
]  # fmt: skip
UpstreamTier = Annotated[
    str | None,
    typer.Option(metavar="score|fan-out|continue", help="How the servers of --upstream verify.",
                 show_default="the best way that each has"),
]  # fmt: skip
UpstreamKeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the key of the servers of --upstream.",
                 show_default="$EDGELLM_VERIFIER_KEY"),
]  # fmt: skip


def _option(metavar: str, text: str, default: str, *, hidden: bool = False) -> Any:
    option = typer.Option(metavar=metavar, help=text, show_default=default, rich_help_panel=_PANEL, hidden=hidden)
    return Annotated[list[str] | None, option]


_TEXTS: dict[str, tuple[str, str, str]] = {
    "gpu_layers": (
        "auto|all|N",
        (
            "Layers on graphics cards. This and the options below also hold for one model alone: draft=VALUE or "
            "verifier=VALUE; give an option twice for both."
        ),
        "as many as fit",
    ),
    "device": ("NAME/NAME", "Graphics cards to use; edgellm doctor lists them.", "all"),
    "tensor_split": ("N/N", "Shares of the model for each graphics card, such as 3/1.", "by free memory"),
    "threads": ("N", "Threads of a decode on the processor.", "one per performance core"),
    "ctx_size": ("N", "Tokens of a prompt and its reply together.", "4096 to 32768, by free memory"),
    "batch_size": ("N", "Tokens of a prompt that are computed at once.", "512"),
    "cache_type": ("f16|q8_0|q4_0", "Type of the keys and values.", "f16"),
    "flash_attn": ("auto|on|off", "Flash attention.", "where it is faster"),
    "mlock": ("on|off", "Keep the weights in memory.", "off"),
}
_OPTIONS: dict[str, Any] = {name: _option(*texts) for name, texts in _TEXTS.items()}
OF_BENCHMARKS: Mapping[str, Any] = MappingProxyType(
    {name: _option(metavar, text, "the benchmark's own") for name, (metavar, text, _) in _TEXTS.items()}
)
"""All options for hardware, for benchmarks, which have defaults of their own."""
_REFUSED = _option("VALUE", "Refused.", "", hidden=True)
_EACH_HAS_MEMORY = "Tokens of a prompt and its reply together, for which each device has memory."
_PLANNED: dict[str, Any] = {
    "gpu_layers": _option(
        "auto|all|0", "Whether graphics cards compute the layers that this device gets.", "all, if there are cards"
    ),
    "ctx_size": _option("N", _EACH_HAS_MEMORY, "4096, or as many as are planned for"),
}
_ON_A_MESH: dict[str, Any] = {"ctx_size": _option("N", _EACH_HAS_MEMORY, "4096, if the model was trained for as many")}
PLANNING = ("gpu_layers", "device", "tensor_split", "threads", "ctx_size", "batch_size", "cache_type", "flash_attn")
"""The options that a plan for several devices depends on."""


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """The options as they were given, by their names."""

    given: dict[str, Sequence[str]]

    def of(self, role: str) -> Hardware:
        """Return the hardware of the draft model or the verifier.

        Raises:
            InvalidOption: a value that does not exist.
        """
        from edgellm.engine.hardware import ALL_LAYERS, Hardware

        def whole(name: str, **names: int | None) -> int | None:
            text = self._text(name, role)
            if text is None or text in names:
                return None if text is None else names[text]
            if not text.isdigit():
                raise self._wrong(name, text, f"{', '.join([*names, 'a whole number'])}")
            return int(text)

        def choice(name: str, **values: T) -> T | None:
            text = self._text(name, role)
            if text is not None and text not in values:
                raise self._wrong(name, text, " or ".join(values))
            return None if text is None else values[text]

        devices, split = self._text("device", role), self._text("tensor_split", role)
        try:
            shares = tuple(float(part) for part in _parts(split))
        except ValueError:
            raise self._wrong("tensor_split", split or "", "shares such as 3/1") from None
        return Hardware(
            gpu_layers=whole("gpu_layers", auto=None, all=ALL_LAYERS),
            devices=() if devices in (None, _AUTO) else tuple(_parts(devices)),
            tensor_split=shares, threads=whole("threads", auto=None), n_ctx=whole("ctx_size", auto=None),
            n_batch=whole("batch_size", auto=None), cache_type=self._text("cache_type", role),
            flash_attn=choice("flash_attn", auto=None, on=True, off=False),
            mlock=bool(choice("mlock", on=True, off=False)),
        )  # fmt: skip

    def words(self) -> list[str]:
        """Return the options as words of a command line."""
        return [word for name, texts in self.given.items() for text in texts for word in (_dashed(name), text)]

    def of_planned(self) -> Hardware:
        """Return the hardware of this device's part of a model that is planned for.

        Raises:
            InvalidOption: a value that does not exist, or one for a draft model, of which a plan has none.
        """
        for name, texts in self.given.items():
            if found := [text for text in texts if text.startswith(f"{DRAFT}=")]:
                raise InvalidOption(
                    f"{_dashed(name)} {found[0]} is for a draft model, and a plan has none.",
                    "Leave it out here, and give it to edgellm mesh run.",
                )
        return self.of(VERIFIER)

    def _text(self, name: str, role: str) -> str | None:
        """Return the last value that holds for a model; None if there is none."""
        found = None
        for text in self.given.get(name) or ():
            of, _, value = text.rpartition("=")
            if of not in ("", DRAFT, VERIFIER):
                raise self._wrong(name, text, f"VALUE, {DRAFT}=VALUE or {VERIFIER}=VALUE")
            found = value.strip() if of in ("", role) else found
        return found

    @staticmethod
    def _wrong(name: str, text: str, instead: str) -> InvalidOption:
        return InvalidOption(f"{_dashed(name)} is {text!r}.", f"Give {instead}.")


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").replace(",", "/").split("/") if part.strip()]


_NO_MLOCK = MappingProxyType({"mlock": "does not change a plan: give it to edgellm mesh run"})


def with_plan_hardware(
    command: Callable[..., T], refused: Mapping[str, str] = MappingProxyType({})
) -> Callable[..., T]:
    """Give a command that plans for several devices the options that its plan depends on, as `with_hardware` does;
    `refused` are those on which this one does not depend, with the reasons."""
    options = {name: (_OPTIONS | _PLANNED)[name] for name in PLANNING if name not in refused}
    return with_hardware(command, options, {**_NO_MLOCK, **refused})


def with_mesh_hardware(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command that runs a model on several devices the options for hardware, as `with_hardware` does."""
    return with_hardware(command, _OPTIONS | _ON_A_MESH)


def on_command_line(context: typer.Context, name: str) -> bool:
    """Return whether an option comes from the command line, and not from settings."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_given(context: typer.Context, names: Collection[str], why: str, next_step: str) -> None:
    """Raise InvalidOption where the command line gives one of the options of these `names`; settings are left alone."""
    for name in names:
        if on_command_line(context, name):
            raise InvalidOption(f"{_dashed(name)} {why}.", next_step)


def with_hardware(
    command: Callable[..., T], options: Mapping[str, Any] = MappingProxyType(_OPTIONS),
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Callable[..., T]:  # fmt: skip
    """Give a command these `options` by their names, by default all for hardware; it gets them together as its argument
    `hardware`. Those of `refused` are not shown, and raise InvalidOption with the reason."""

    @functools.wraps(command)
    def run(**arguments: Any) -> T:
        for name, why in refused.items():
            if arguments.pop(name):
                raise InvalidOption(f"{_dashed(name)} {why}.", "Leave it out here.")
        given = {name: arguments.pop(name) or () for name in options}
        return command(**arguments, hardware=HardwareOptions(given))

    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.name != "hardware"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (*options.items(), *((name, _REFUSED) for name in refused))
    ]
    own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
    return run


def upstream_options(
    tier: str | None, key_file: Path | None, option: str = "--verifier-tier"
) -> UpstreamOptions | None:
    """Return how a stock server is used, None if nothing is said of it. Raises InvalidOption for an unknown tier, which
    came by `option`."""
    if tier is None and key_file is None:
        return None
    from edgellm.upstream.opening import UpstreamOptions
    from edgellm.upstream.rows import Tier

    if tier is not None and tier not in set(Tier):
        raise InvalidOption(f"{option} is {tier!r}.", f"Choose one of {', '.join(Tier)}.")
    return UpstreamOptions(None if tier is None else Tier(tier), None if key_file is None else key_file.expanduser())


def thinking(think: str, effort: str | None, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields of `ReplyOptions` for these options.

    Raises:
        InvalidOption: `think` is neither a word nor a number, or an argument is not NAME=VALUE.
    """
    found = {} if effort is None else {"reasoning_effort": effort}
    return {"think": _think(think), "template_args": found | dict(map(_argument, arguments or ()))}


def _think(text: str) -> bool | int | None:
    if text in _THINK:
        return _THINK[text]
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_DIGITS:
        raise InvalidOption(f"--think is {text!r}.", "Choose auto, on, off, or a number of tokens.")
    return int(text)


def _argument(text: str) -> tuple[str, object]:
    """Return the name and the value of an argument; a value that is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidOption(
            f"--template-arg is {text!r}.",
            "Write NAME=VALUE, such as enable_thinking=false; VALUE is JSON or plain text.",
        )
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
