"""The settings of a benchmark: the parameters of its `measure`, as options of a command line.

A number, a text, a path, a choice or several of them, by their annotations; `Annotated[int, "explained"]` explains one.
Without a default a setting has to be given. `Hardware` becomes the options of `edgellm chat`.
"""

import argparse
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from bench.harness import hardware
from edgellm.cli.options import VERIFIER, HardwareOptions
from edgellm.engine.hardware import Hardware

Earlier = Mapping[str, Any]
"""The last result, for benchmarks that renew it part by part; empty where there is none."""
_GIVEN = (Earlier, Hardware)
"""What is not an option of its own."""


def parameters(measure: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a benchmark's `measure`, with their annotations evaluated."""
    return inspect.signature(measure, eval_str=True).parameters


def parser(measure: Callable[..., Any], defaults: Mapping[str, Any], **more: Any) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's settings, with these `defaults` in place of its own."""
    made = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, **more)
    known = parameters(measure)
    for name, parameter in known.items():
        if parameter.annotation not in _GIVEN:
            default = defaults.get(name, parameter.default)
            required = default is inspect.Parameter.empty
            kind: dict[str, Any] = {"required": True} if required else {"default": default}
            made.add_argument(f"--{name.replace('_', '-')}", dest=name, **kind, **_option(parameter.annotation))
    if Hardware in {parameter.annotation for parameter in known.values()}:
        hardware.add_arguments(made, hardware.LOADED if "threads" in known else hardware.ALL)
    return made


def settings(measure: Callable[..., Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `measure` but the last result."""
    options = HardwareOptions(**{name: tuple(values) for name, values in hardware.given(arguments).items()})
    found: dict[str, Any] = {}
    for name, parameter in parameters(measure).items():
        if parameter.annotation is Hardware:
            found[name] = options.of(VERIFIER)
        elif parameter.annotation is not Earlier:
            found[name] = getattr(arguments, name)
    return found


def _option(annotation: Any) -> dict[str, Any]:
    """Return how argparse reads a setting."""
    if get_origin(annotation) is Annotated:
        inner, explained = get_args(annotation)
        return {**_option(inner), "help": explained}
    if get_origin(annotation) in (types.UnionType, typing.Union):
        (annotation,) = (each for each in get_args(annotation) if each is not types.NoneType)
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"nargs": "*", **_one(get_args(annotation)[0])}
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction, "help": " "}
    return _one(annotation)


def _one(annotation: Any) -> dict[str, Any]:
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation), "help": " "}
    if annotation not in (int, float, str, Path):
        raise TypeError(f"no setting can be of the type {annotation}")
    return {"type": annotation, "help": " "}
