"""List how much of the package a command runs.

    python -m tools.architecture [CHECKOUT ...]
    python -m tools.architecture --picture FILE.svg COMMAND CHECKOUT ...

For this checkout, or each one given (with a `.venv` of its own): the modules of which a function (or the body of a
class) runs for one default question, for a reply over a mesh of this device alone, and for `edgellm --help`, with what
runs of them. A picture has the modules that a command (such as "a question") runs, package by package, a column for
each checkout: a square is a module, and the darker, the more of its functions run. Generated code is not counted. How
large everything is, says `tools/budget.py`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
COMMANDS = {
    "a question": ("chat", "Where is my mug?", "--max-tokens", "24", "--json"),
    "mesh run": ("mesh", "run", "edgellm-verifier", "Where is my mug?", "--split", "here:1-12", "--max-tokens", "8"),
    "--help": ("--help",),
}
_TRACED = """
import json, sys, threading
seen, bodies = {}, {}
def profiler(frame, event, _argument):
    code = frame.f_code
    if event == "call" and code.co_name != "<module>":
        kind = seen if code.co_flags & 2 else bodies  # CO_NEWLOCALS: a function's, no class body's
        kind.setdefault(code.co_filename, set()).add(code.co_qualname)
threading.setprofile(profiler)
sys.setprofile(profiler)
sys.argv = ["edgellm", *sys.argv[1:]]
try:
    from edgellm.cli import main
    main()
except SystemExit:
    pass
finally:
    sys.setprofile(None)
    def inside(kind):
        names = {name: sorted(found) for name, found in kind.items() if "site-packages" not in name}
        return {name.split("/edgellm/")[1]: found for name, found in names.items() if "/edgellm/" in name}
    imported = sum(name.partition(".")[0] == "edgellm" and "_pb2" not in name for name in sys.modules)
    sys.stderr.write("\\nMODULES " + json.dumps([inside(seen), inside(bodies), imported]) + "\\n")
"""


Ran = dict[str, list[str]]
"""What ran, by module: the names of functions, or of classes whose body ran."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a command ran: the functions, and the bodies of classes, by module; and how many modules it imported."""

    functions: Ran
    bodies: Ran
    imported: int


def run(root: Path, words: tuple[str, ...]) -> Run:
    """Return what a command of the checkout `root` runs, in an empty home, with the home pair."""
    python = root / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [str(python if python.exists() else sys.executable), "-c", _TRACED, *words], cwd=root, capture_output=True,
            text=True, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, "EDGELLM_HOME": home, "EDGELLM_PAIR": "home"},
        )  # fmt: skip
    printed = [line for line in done.stderr.splitlines() if line.startswith("MODULES ")]
    if not printed:
        raise SystemExit(f"{' '.join(words)} failed in {root}:\n{done.stderr}")
    *ran, imported = json.loads(printed[-1].removeprefix("MODULES "))
    functions, bodies = ({name: names for name, names in each.items() if "_pb2" not in name} for each in ran)
    return Run(functions, bodies, imported)


def listed(root: Path) -> str:
    """Return the modules that each command runs, with the names of what runs of them."""
    lines = []
    for command, words in COMMANDS.items():
        ran = run(root, words)
        functions, bodies = ran.functions, ran.bodies
        lines += ["", f"{command}: {ran.imported} modules imported; functions of {len(functions)} modules"]
        lines += [f"  {name}: {', '.join(names)}" for name, names in sorted(functions.items())]
        lines += [f"{command}: bodies of classes alone of {len(bodies.keys() - functions)} modules"]
        lines += [f"  {name}: {', '.join(names)}" for name, names in sorted(bodies.items()) if name not in functions]
    return "\n".join(lines[1:]) + "\n"


SQUARE, ROW, NAME, HEAD = 15, 21, 150, 48  # pixels: a module, a package's row, its name's width, the title's height
DARKEST = 24  # functions of a module


def picture(command: str, columns: Mapping[str, Ran]) -> str:
    """Return an SVG of the modules that a command runs, by title of the column."""
    packages = {name: _by_package(ran) for name, ran in columns.items()}
    rows = sorted({package for found in packages.values() for package in found})
    most = max(len(modules) for found in packages.values() for modules in found.values())
    width, height = NAME + len(columns) * (most + 2) * SQUARE, HEAD + (len(rows) + 1) * ROW
    drawn = [_text(8, 18, f"Modules of which a function runs for {command}")]
    for number, (title, found) in enumerate(packages.items()):
        left = NAME + number * (most + 2) * SQUARE
        drawn.append(_text(left, 38, f"{title}: {sum(map(len, found.values()))}"))
        for row, package in enumerate(rows):
            top = HEAD + row * ROW
            drawn += [_text(8, top + 12, package)] * (number == 0)
            drawn += [
                f'<rect x="{left + at * SQUARE}" y="{top}" width="{SQUARE - 2}" height="{SQUARE - 2}" rx="2"'
                f' fill="#1f5f8b" fill-opacity="{0.2 + 0.8 * min(1.0, len(names) / DARKEST):.2f}">'
                f"<title>{module}: {len(names)}</title></rect>"
                for at, (module, names) in enumerate(found.get(package, {}).items())
            ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join((head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>")) + "\n"


def _text(x: int, y: int, words: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="13">{words}</text>'


def _by_package(ran: Ran) -> dict[str, Ran]:
    """Return what ran by package, those with most functions first; modules outside packages are `edgellm`."""
    found: dict[str, Ran] = {}
    for module, names in sorted(ran.items(), key=lambda one: -len(one[1])):
        found.setdefault(module.rpartition("/")[0].replace("/", ".") or "edgellm", {})[module] = names
    return found


def main() -> None:
    if sys.argv[1:2] == ["--picture"]:
        file, command, *roots = sys.argv[2:]
        columns = {Path(root).name: run(Path(root).resolve(), COMMANDS[command]).functions for root in roots}
        Path(file).write_text(picture(command, columns), encoding="utf-8")
        return
    for root in map(Path, sys.argv[1:] or [str(HERE)]):
        sys.stdout.write(listed(root.resolve()))


if __name__ == "__main__":
    main()
