"""Measure the size of the package, and how much of it a command runs.

    python tools/architecture.py [--list] [CHECKOUT ...]

For this checkout, or each one given (with a `.venv` of its own): modules and lines of the package, public class names
that stand for several classes, and the modules of which a function (or the body of a class) runs for one default
question, for a reply over a mesh of this device alone, and for `edgellm --help`. Generated code is not counted. With
`--list`, those modules and what runs of them, for this checkout.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
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
    sys.stderr.write("\\nMODULES " + json.dumps([inside(seen), inside(bodies)]) + "\\n")
"""


def sources(root: Path) -> list[Path]:
    """Return the package's modules."""
    found = (root / "edgellm").rglob("*.py")
    return sorted(path for path in found if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")))


def homonyms(paths: list[Path]) -> list[str]:
    """Return the names of public classes that are defined more than once."""
    names = Counter(name for path in paths for name in _classes(ast.parse(path.read_text(encoding="utf-8"))))
    return sorted(name for name, count in names.items() if count > 1)


def _classes(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


Ran = dict[str, list[str]]
"""What ran, by module: the names of functions, or of classes whose body ran."""


def modules_run(root: Path, words: tuple[str, ...]) -> tuple[Ran, Ran]:
    """Return the functions that a command runs, and the bodies of classes, by module."""
    python = root / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [str(python), "-c", _TRACED, *words], cwd=root, capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, "EDGELLM_HOME": home},
        )  # fmt: skip
    printed = [line for line in done.stderr.splitlines() if line.startswith("MODULES ")]
    if not printed:
        raise SystemExit(f"{' '.join(words)} failed in {root}:\n{done.stderr}")
    functions, bodies = (
        {name: ran for name, ran in each.items() if "_pb2" not in name}
        for each in json.loads(printed[-1].removeprefix("MODULES "))
    )
    return functions, bodies


def counts(functions: Ran, bodies: Ran) -> dict[str, int]:
    """Return the number of modules of which a function ran, and of those of which a function or a class body did."""
    return {"functions": len(functions), "functions or class bodies": len(functions | bodies)}


def figures(root: Path) -> dict[str, object]:
    """Return everything about one checkout."""
    paths = sources(root)
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    found: dict[str, object] = {
        "modules": sum(path.name != "__init__.py" for path in paths), "lines": lines, "homonyms": homonyms(paths),
    }  # fmt: skip
    return found | {f"modules for {name}": counts(*modules_run(root, words)) for name, words in COMMANDS.items()}


def listed(root: Path) -> str:
    """Return the modules that each command runs, with the names of what runs of them."""
    lines = []
    for command, words in COMMANDS.items():
        functions, bodies = modules_run(root, words)
        lines += ["", f"{command}: functions of {len(functions)} modules"]
        lines += [f"  {name}: {', '.join(ran)}" for name, ran in sorted(functions.items())]
        lines += [f"{command}: bodies of classes alone of {len(bodies.keys() - functions)} modules"]
        lines += [f"  {name}: {', '.join(ran)}" for name, ran in sorted(bodies.items()) if name not in functions]
    return "\n".join(lines[1:]) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--list"]:
        sys.stdout.write(listed(HERE))
        return
    for root in map(Path, sys.argv[1:] or [str(HERE)]):
        sys.stdout.write(json.dumps({"checkout": root.name, **figures(root.resolve())}, indent=2) + "\n")


if __name__ == "__main__":
    main()
