"""The benchmarks of `bench/suites.toml`, whose first lines say what is declared of each."""

import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from bench.harness import results
from bench.harness.depends import measured_files
from bench.harness.results import Figures
from testkit import ROOT


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark's declaration: what it measures, its page, its settings in a whole run and in a quick one, its
    module, and the modules of edgellm that it runs without importing them."""

    suite: str
    name: str
    about: str
    page: str
    settings: Mapping[str, Any]
    quick: Mapping[str, Any]
    module: str
    hardware: str | None = None
    runs: tuple[str, ...] = ()

    @classmethod
    def read(cls, suite: str, name: str, entry: Mapping[str, Any]) -> "Benchmark":
        """Return the benchmark of a table of `suites.toml`. Raise KeyError where `about` or `page` is missing."""
        known = {"settings": {}, "quick": {}, "module": name, **entry}
        known["runs"] = tuple(known.get("runs", ()))
        return cls(suite, name, known.pop("about"), known.pop("page"), **known)

    @property
    def full_name(self) -> str:
        return f"{self.suite}/{self.name}"

    @property
    def module_name(self) -> str:
        return f"bench.{self.suite}.{self.module}"

    def load(self) -> Any:
        """Return the module: `measure(...)`, `table(found)`, and perhaps `plot(found, path)` and `failures(found)`."""
        return import_module(self.module_name)

    def files(self, commit: str = "") -> tuple[str, ...]:
        """Return the files of edgellm that the result depends on, now or at a commit."""
        return tuple(sorted({*measured_files(self.module_name, commit), *self.runs}))

    def read_result(self) -> Figures:
        """Return the last result. Raise FileNotFoundError if there is none."""
        return results.read(self.suite, self.name)

    def command(self, found: Mapping[str, Any]) -> str:
        """Return the command that repeats a result."""
        words = ["python", "-m", "bench", "run", self.full_name]
        for name, value in found.get("settings", {}).items():
            if value != self.settings.get(name):
                words += words_of(name, value)
        return shlex.join(words)

    def staleness(self, found: Mapping[str, Any]) -> str:
        """Return in a sentence what has changed since a result was measured; an empty text if nothing has."""
        commit = found.get("commit")
        changed = results.changed_since(commit, {*self.files(), *self.files(commit)}) if commit else []
        if changed is None and results.date_of("HEAD"):
            return "stale: its commit is not known here"
        others = "has" if changed and len(changed) == 1 else "and other modules have"
        return f"stale: {changed[0]} {others} changed since" if changed else ""

    def shown(self) -> str:
        """Return the table of the last result, below the command that repeats it."""
        try:
            found = self.read_result()
        except FileNotFoundError:
            return f"{self.about}: not measured yet"
        where = f"on {found['machine']['cores']} cores of {found['machine']['processor']}"
        if found.get("commit") and (day := results.date_of(found["commit"])):
            where += f", at {found['commit'][:8]} of {day}"
        lines = [self.about, self.command(found), where, self.staleness(found)]
        return "\n".join([*filter(None, lines), "", self.load().table(found)]).rstrip("\n")


def words_of(name: str, value: Any) -> list[str]:
    """Return the words of a setting on a command line."""
    option = name.replace("_", "-")
    match value:
        case None:
            return []
        case bool():
            return [f"--{option}" if value else f"--no-{option}"]
        case list() | tuple():
            return [f"--{option}", *map(str, value)]
        case _:
            return [f"--{option}", str(value)]


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
