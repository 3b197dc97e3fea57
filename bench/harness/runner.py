"""Lists the benchmarks, runs them and shows their results.

    python -m bench list [NAME ...]
    python -m bench run NAME ... [--quick] [--SETTING VALUE ...]
    python -m bench show [NAME ...]

A NAME is a suite (`synera`) or a benchmark (`synera/quality`; `quality` alone where no other suite has one of that
name). `run NAME --help` explains one benchmark and its settings. A run writes `bench/results/SUITE/NAME.json` and,
where matplotlib is installed, some pictures; one with `--quick`, or with settings or hardware other than the declared
ones, writes `trial-NAME`, which git ignores.
"""

import argparse
import inspect
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.harness import hardware, results
from bench.harness.catalogue import Benchmark, benchmarks, chosen
from bench.harness.results import Figures
from bench.harness.settings import Earlier, parameters, parser, settings
from edgellm.errors import EdgeError
from testkit import ROOT


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line of `words`, by default the program's own."""
    made = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    made.add_argument("task", choices=("list", "run", "show"), nargs="?")
    made.add_argument("names", nargs="*", metavar="NAME", help="a suite (synera) or a benchmark (synera/quality)")
    made.add_argument("--quick", action="store_true", help="few cases: shows that it works, but is no evidence")
    made.add_argument("--json", action="store_true", help="the results as JSON, not as tables")
    made.add_argument("-h", "--help", action="store_true", help="explain this, or a benchmark and its settings")
    arguments, further = made.parse_known_args(words)
    if arguments.task is None or (arguments.help and not arguments.names):
        made.print_help()
        sys.exit(0 if arguments.help else 2)
    if further and arguments.task != "run":
        made.error(f"settings are for `run`, and this is `{arguments.task}`: {shlex.join(further)}")
    if arguments.task == "run" and not arguments.names:
        made.error("say what to run, such as `python -m bench run synera/quality`")
    try:
        some = chosen(arguments.names) if arguments.names else list(benchmarks().values())
    except KeyError as unknown:
        suites = ", ".join(dict.fromkeys(one.suite for one in benchmarks().values()))
        made.error(f"there is no benchmark {unknown}: choose from {suites}, or see `python -m bench list`")
    match arguments.task:
        case "list":
            print(_listed(some, arguments.json), flush=True)
        case "show" if arguments.json:
            there = [one for one in some if results.place(one.suite, one.name).is_file()]
            print(json.dumps({one.full_name: one.read_result() for one in there}, indent=1), flush=True)
        case "show":
            print("\n".join(one.shown() for one in some), flush=True)
        case _ if len(some) == 1:
            sys.exit(run(some[0], [*further, *(["--help"] if arguments.help else [])], arguments.quick, arguments.json))
        case _:
            _run_each(made, some, further, [*(["--quick"] if arguments.quick else [])])


def _listed(some: Sequence[Benchmark], as_json: bool) -> str:
    if as_json:
        return json.dumps({one.full_name: {"about": one.about, "page": one.page} for one in some}, indent=1)
    width = max(len(one.full_name) for one in some)
    return "\n".join(f"{one.full_name:{width}}  {one.about}{hardware.DESCRIBED[one.hardware]}" for one in some)


def run(one: Benchmark, words: Sequence[str], quick: bool = False, as_json: bool = False) -> int:
    """Run a benchmark, write and print its result, and return the exit code."""
    module, defaults = one.load(), one.quick if quick else one.settings
    about = {"prog": f"python -m bench run {one.full_name}", "description": inspect.cleandoc(module.__doc__)}
    made = parser(module.measure, defaults, **about)
    found: Figures = {}
    try:
        given = settings(module.measure, made.parse_args(words))
        needed = {name for name, each in parameters(module.measure).items() if each.default is inspect.Parameter.empty}
        usual = parser(module.measure, {**{name: given.get(name) for name in needed}, **defaults}, **about)
        declared = given == settings(module.measure, usual.parse_args([]))
        name = one.name if not quick and declared else f"trial-{one.name}"
        for found in _measured(one, module, name, given):
            path = results.write(one.suite, name, _plain(given), found)
    except EdgeError as error:
        made.exit(error.exit_code, f"{made.prog}: {error}\n")
    if not found:
        return 1
    found = results.read(one.suite, name)
    if hasattr(module, "plot"):
        module.plot(found, path.with_suffix(".png"))
    print(json.dumps(found, indent=1) if as_json else module.table(found))
    print(f"written: {path}", file=sys.stderr)
    broken = module.failures(found) if hasattr(module, "failures") else []
    for sentence in broken:
        print(f"broken: {sentence}", file=sys.stderr)
    return 1 if broken else 0


def _measured(one: Benchmark, module: Any, name: str, given: Mapping[str, Any]) -> Iterator[Figures]:
    """Yield a benchmark's figures, of one that renews them part by part after each part."""
    more = dict(given)
    for parameter in parameters(module.measure).values():
        if parameter.annotation is Earlier:
            there = results.place(one.suite, name).is_file()
            more[parameter.name] = results.read(one.suite, name) if there else {}
    found = module.measure(**more)
    if isinstance(found, Iterator):
        yield from found
    else:
        yield found


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that JSON can hold; hardware is named in words."""
    return {name: value for name, value in given.items() if isinstance(value, str | int | float | list | tuple | None)}


def _run_each(
    made: argparse.ArgumentParser, some: Sequence[Benchmark], further: Sequence[str], quick: Sequence[str]
) -> None:
    """Run several benchmarks, each in a process of its own, with the options for hardware that each uses."""
    options = argparse.ArgumentParser(prog=made.prog)
    hardware.add_arguments(options)
    given = hardware.given(options.parse_args(further))
    handed = {one.full_name: hardware.words_for(one.hardware, given) for one in some}
    if given and not any(used for used, _ in handed.values()):
        asked = shlex.join(next(iter(handed.values()))[1])
        made.error(f"none of these benchmarks uses {asked}: `python -m bench list` shows what each uses")
    failed = []
    for one in some:
        used, unused = handed[one.full_name]
        print(f"\n{one.full_name}: {one.about}", flush=True)
        if unused:
            print(f"it does not use {shlex.join(unused)}", flush=True)
        command = [sys.executable, "-m", "bench", "run", one.full_name, *quick, *used]
        if subprocess.call(command, cwd=ROOT):
            failed.append(one.full_name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
