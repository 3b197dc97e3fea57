"""A suite: every benchmark behind the evidence for one paper, in one command."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import FIGURES
from bench.report import RESULTS

Table = Callable[[dict[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark, what it stands beside in the paper, and the options of a quick run; those of a `full` one, if any,
    and then what its results are called.
    """

    module: str
    about: str
    quick: tuple[str, ...] = ()
    table: Table | None = None
    full: tuple[str, ...] = ()
    result: str = ""

    @property
    def kind(self) -> str:
        return self.module.removeprefix("bench.")

    @property
    def name(self) -> str:
        return self.result or self.kind


def run(part: Part, quick: bool) -> int:
    """Runs one part in a process of its own; its exit code."""
    name = f"quick-{part.name}" if quick else part.name
    print(f"\n{part.about}", flush=True)
    code = subprocess.call([sys.executable, "-m", part.module, *(part.quick if quick else part.full), "--name", name])
    if code == 0 and (drawn := draw(part.kind, name)) is not None:
        print(f"drawn: {drawn}", flush=True)
    return code


def draw(kind: str, name: str) -> Path | None:
    """The figure of a result; None where there is none to draw, or no matplotlib."""
    if kind not in FIGURES:
        return None
    figures = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return FIGURES[kind](figures, RESULTS / f"{name}.png")


def shown(part: Part) -> str:
    """The table of a part's last result, with the command that repeats it."""
    path = RESULTS / f"{part.name}.json"
    if not path.is_file():
        return f"{part.about}: not measured yet"
    found = json.loads(path.read_text(encoding="utf-8"))
    where = f"{found['machine']['cores']} cores of {found['machine']['processor']}"
    return f"{part.about}\n{found['command']}\non {where}\n\n{part.table(found) if part.table else ''}".rstrip("\n")


def main(parts: Mapping[str, Part], about: str | None, words: Sequence[str] | None = None) -> None:
    """Run the command line of a suite, with `parts` by their short names and the program's own `words` by default."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all by default")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--show", action="store_true", help="print the tables of the last results, and run nothing")
    arguments = parser.parse_args(words)
    if arguments.list:
        print("\n".join(f"{name:12} {part.about}" for name, part in parts.items()))
        return
    if unknown := [name for name in arguments.parts if name not in parts]:
        parser.error(f"there is no part {unknown[0]!r}: choose from {', '.join(parts)}")
    wanted = [parts[name] for name in arguments.parts or parts]
    if arguments.show:
        print("\n".join(map(shown, wanted)))
        return
    failed = [part.name for part in wanted if run(part, arguments.quick)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
