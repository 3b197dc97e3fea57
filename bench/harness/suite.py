"""The benchmarks of `bench/suites.toml`, and the command line that lists them, runs them and shows their results.

A benchmark is a module with a `main` and a `table(found)`, which turns a result into text; some have a
`plot(found, path)`, too.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from bench.harness import hardware, report
from testkit import ROOT


@dataclass(frozen=True, slots=True)
class Benchmark:
    """An entry of `suites.toml`, whose first lines explain the keys."""

    suite: str
    name: str
    about: str
    page: str
    quick: tuple[str, ...]
    full: tuple[str, ...]
    module: str
    hardware: str | None = None

    @classmethod
    def read(cls, suite: str, name: str, entry: Mapping[str, Any]) -> Benchmark:
        """Return the benchmark of a table of `suites.toml`. Raise KeyError where `about` or `page` is missing."""
        quick, full = tuple(entry.get("quick", ())), tuple(entry.get("full", ()))
        return cls(
            suite, name, entry["about"], entry["page"], quick, full, entry.get("module", name), entry.get("hardware")
        )

    @property
    def full_name(self) -> str:
        return f"{self.suite}/{self.name}"

    @property
    def module_name(self) -> str:
        """The module that `python -m` runs."""
        return f"bench.{self.suite}.{self.module}"

    def load(self) -> Any:
        """Return the module; of a package its `__main__`."""
        module = import_module(self.module_name)
        return import_module(f"{self.module_name}.__main__") if hasattr(module, "__path__") else module

    def command(self, quick: bool, words: Sequence[str] = ()) -> list[str]:
        """Return the command of a run, with these `words` for its hardware. A `quick` run writes `quick-NAME`, one with
        such words `hardware-NAME`: the result `NAME` is of the benchmark's own hardware."""
        name = f"quick-{self.name}" if quick else f"hardware-{self.name}" if words else self.name
        arguments = (*(self.quick if quick else self.full), *words, "--name", name)
        return [sys.executable, "-m", self.module_name, *arguments]

    def run(self, quick: bool, words: Sequence[str] = ()) -> int:
        """Run it in a process of its own and return the exit code; the arguments are as for `command`."""
        return subprocess.call(self.command(quick, words), cwd=ROOT)

    def shown(self) -> str:
        """Return the table of the last result, below the command that repeats it."""
        try:
            found = report.read(self.module_name, self.name)
        except FileNotFoundError:
            return f"{self.about}: not measured yet"
        where = f"{found['machine']['cores']} cores of {found['machine']['processor']}"
        return f"{self.about}\n{found['command']}\non {where}\n\n{self.load().table(found)}".rstrip("\n")


@cache
def benchmarks() -> Mapping[str, Benchmark]:
    """Return all benchmarks by their full names, `SUITE/NAME`."""
    suites = tomllib.loads((ROOT / "bench" / "suites.toml").read_text(encoding="utf-8"))
    found = [Benchmark.read(suite, name, one) for suite, some in suites.items() for name, one in some.items()]
    return MappingProxyType({one.full_name: one for one in found})


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Return the benchmarks of these names; a suite's name selects all of its benchmarks, and a benchmark's name needs
    no suite where only one has it. Raise KeyError at others."""
    found: dict[str, Benchmark] = {}
    holders = Counter(one.name for one in benchmarks().values())
    for name in names:
        some = {
            full: one
            for full, one in benchmarks().items()
            if name in (full, one.suite) or (name == one.name and holders[name] == 1)
        }
        if not some:
            raise KeyError(name)
        found |= some
    return list(found.values())


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line of `words`, by default the program's own."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks; bench/README.md explains them.")
    parser.add_argument("task", choices=("list", "run", "show"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="a suite (synera) or a benchmark (synera/quality)")
    parser.add_argument("--quick", action="store_true", help="few cases: shows that it works, but is no evidence")
    hardware.add_arguments(parser)
    arguments = parser.parse_args(words)
    options = hardware.given(arguments)
    if options and arguments.task != "run":
        parser.error(f"options for hardware are for `run`, and this is `{arguments.task}`")
    if arguments.task == "run" and not arguments.names:
        parser.error("say what to run, such as `python -m bench run synera/quality`")
    try:
        some = chosen(arguments.names) if arguments.names else list(benchmarks().values())
    except KeyError as unknown:
        suites = ", ".join(dict.fromkeys(one.suite for one in benchmarks().values()))
        parser.error(f"there is no benchmark {unknown}: choose from {suites}, or see `python -m bench list`")
    match arguments.task:
        case "list":
            width = max(len(one.full_name) for one in some)
            print("\n".join(f"{one.full_name:{width}}  {one.about}{hardware.DESCRIBED[one.hardware]}" for one in some))
        case "show":
            print("\n".join(one.shown() for one in some))
        case "run":
            handed = {one.full_name: hardware.words_for(one.hardware, options) for one in some}
            if options and not any(used for used, _ in handed.values()):
                asked = shlex.join(next(iter(handed.values()))[1])
                parser.error(f"none of these benchmarks uses {asked}: `python -m bench list` shows what each uses")
            _run(some, arguments.quick, handed)


def _run(some: Sequence[Benchmark], quick: bool, words: Mapping[str, tuple[list[str], list[str]]]) -> None:
    failed = []
    for one in some:
        used, unused = words[one.full_name]
        print(f"\n{one.full_name}: {one.about}", flush=True)
        if unused:
            print(f"it does not use {shlex.join(unused)}", flush=True)
        if one.run(quick, used):
            failed.append(one.full_name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
