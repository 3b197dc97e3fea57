"""Results of benchmarks on disk: figures, settings, the machine, and the commit that they were measured at."""

import ast
import json
import platform
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from edgellm.system import allowed_processors, processor
from testkit import ROOT

RESULTS = ROOT / "bench" / "results"

Figures: TypeAlias = dict[str, Any]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(allowed_processors())


def machine() -> Figures:
    """Return the processor's name, the cores that this process may use, the system and Python's version."""
    about = {"system": platform.system(), "python": platform.python_version()}
    return {"processor": processor(), "cores": cores(), **about}


def place(suite: str, name: str) -> Path:
    """Return the file of a result."""
    return RESULTS / suite / f"{name}.json"


def read(suite: str, name: str) -> Figures:
    """Return a stored result. Raise FileNotFoundError if there is none."""
    found: Figures = json.loads(place(suite, name).read_text(encoding="utf-8"))
    return found


def write(suite: str, name: str, settings: Mapping[str, Any], figures: Mapping[str, Any]) -> Path:
    """Write a result, and return its path."""
    path = place(suite, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"commit": git("rev-parse", "HEAD"), "machine": machine(), "settings": dict(settings), **figures}
    path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    return path


def changed_since(commit: str, files: Collection[str]) -> list[str] | None:
    """Return those of some files that differ from what they were at `commit`, or are gone, not only in comments and
    docstrings; None where git does not know it."""
    said = git("diff", "--name-only", commit, "--", *files)
    return None if said is None else [name for name in said.splitlines() if _differs(name, commit)]


def _differs(name: str, commit: str) -> bool:
    now, before = ROOT / name, git("show", f"{commit}:{name}")
    if before is None or not now.exists() or now.suffix != ".py":
        return True
    return _code(now.read_text(encoding="utf-8")) != _code(before)


def _code(text: str) -> str:
    """Return the syntax tree of a module without what only tells about it."""
    return ast.dump(_Untold().visit(ast.parse(text)))


class _Untold(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def date_of(commit: str) -> str | None:
    """Return the day of a commit; None where git does not know it."""
    return git("show", "--no-patch", "--format=%cs", commit)


def git(*words: str) -> str | None:
    """Return what git says of this checkout, without the end of the line; None where it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
