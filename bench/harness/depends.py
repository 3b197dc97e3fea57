"""The modules of edgellm that a benchmark measures: those that it imports, by itself or by its helpers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from testkit import ROOT

HELPERS = ("bench", "testkit")
"""Packages whose modules are part of a benchmark. Those of `bench.harness` measure nothing."""


def measured_files(module: str) -> tuple[Path, ...]:
    """Return the files of edgellm that the benchmark in `module` imports, and its helpers do, sorted."""
    seen, waiting, found = set[str](), [module], set[Path]()
    while waiting:
        name = waiting.pop()
        if name in seen or (path := _file(name)) is None:
            continue
        seen.add(name)
        for package, imported in _imports(path):
            if package.startswith("edgellm"):
                found |= _defining(package, imported)
            elif package.split(".")[0] in HELPERS and not package.startswith("bench.harness"):
                waiting += [package, f"{package}.{imported}"]
    return tuple(sorted(found))


def _file(module: str) -> Path | None:
    """Return the file of a module, of a package that of its `__init__`; None where there is none."""
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def _imports(path: Path) -> tuple[tuple[str, str], ...]:
    """Return the names that a file imports, each behind its module."""
    return tuple(_found(ast.parse(path.read_text(encoding="utf-8"))))


def _found(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)


def _defining(package: str, name: str) -> set[Path]:
    """Return the file that defines a name: a module's own, or the one from which a package has the name."""
    if (module := _file(f"{package}.{name}")) is not None and module.name != "__init__.py":
        return {module}
    path = _file(package)
    if path is None:
        return set()
    if path.name != "__init__.py":
        return {path}
    origins = {_file(source) for source, imported in _imports(path) if imported == name}
    return {origin for origin in origins if origin is not None} or {path}
