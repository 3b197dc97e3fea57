"""The options for hardware of a run, for the benchmarks that use them.

They are those of `edgellm chat`. A benchmark says in `suites.toml` which it uses, as `hardware`:

    threads   one number of threads for all models
    model     also how its models are loaded, all of them alike

The others decide themselves what they compute on, as their results mean that.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

THREADS, MODEL = "threads", "model"
LOADED = ("gpu_layers", "device", "tensor_split", "cache_type", "flash_attn", "mlock")
"""How a model is loaded. Its contexts are as long as a benchmark needs them."""
ALL = ("threads", *LOADED)
USED: Mapping[str, tuple[str, ...]] = MappingProxyType({THREADS: ("threads",), MODEL: ALL})
"""The options that the benchmarks of each kind use."""
DESCRIBED: Mapping[str | None, str] = MappingProxyType(
    {None: "", THREADS: " [--threads]", MODEL: " [hardware options]"}
)
"""What a list of benchmarks says of each kind."""
_DEST = "hardware_"  # benchmarks have arguments of their own that are called threads


def add_arguments(parser: argparse.ArgumentParser, names: Iterable[str] = ALL) -> None:
    """Give a parser the options of these `names`."""
    group = parser.add_argument_group("hardware", "as for edgellm chat")
    for name in names:
        group.add_argument(f"--{name.replace('_', '-')}", dest=_DEST + name, action="append", metavar="VALUE")


def given(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the options that were given, by name."""
    found = {name: getattr(arguments, _DEST + name, None) for name in ALL}
    return {name: values for name, values in found.items() if values}


def words_for(kind: str | None, options: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """Return the words of these options that a benchmark of this kind uses, and those that it does not."""
    used, unused = list[str](), list[str]()
    for name, values in options.items():
        for value in values:
            known = kind is not None and name in USED[kind]
            (used if known else unused).extend((f"--{name.replace('_', '-')}", value))
    return used, unused
