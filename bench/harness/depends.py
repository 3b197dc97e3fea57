"""The modules of edgellm that a benchmark measures: those that it imports, by itself or by its helpers."""

import ast
from collections.abc import Iterator
from functools import cache

from bench.harness.results import git
from testkit import ROOT

HELPERS = ("bench", "testkit")
"""Packages whose modules are part of a benchmark. Those of `bench.harness` measure nothing."""
_FOLDERS = ("edgellm", *HELPERS)


def measured_files(module: str, commit: str = "") -> tuple[str, ...]:
    """Return the files of edgellm that the benchmark in `module` imports, and its helpers do, sorted: now, or as it was
    at a commit."""
    seen, waiting, found = set[str](), [module], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or not (path := _file(name, commit)):
            continue
        seen.add(name)
        for package, imported in _imports(path, commit):
            if package.startswith("edgellm"):
                found |= _defining(package, imported, commit)
            elif package.split(".")[0] in HELPERS and not package.startswith("bench.harness"):
                waiting += [package, f"{package}.{imported}"]
    return tuple(sorted(found))


@cache
def _files(commit: str) -> frozenset[str]:
    if commit:
        return frozenset((git("ls-tree", "-r", "--name-only", commit, "--", *_FOLDERS) or "").splitlines())
    return frozenset(str(path.relative_to(ROOT)) for name in _FOLDERS for path in (ROOT / name).rglob("*.py"))


def _file(module: str, commit: str) -> str:
    """Return the file of a module, of a package that of its `__init__`; "" where there is none."""
    base = module.replace(".", "/")
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in _files(commit)), "")


@cache
def _imports(path: str, commit: str) -> tuple[tuple[str, str], ...]:
    """Return the names that a file imports, each behind its module."""
    text = git("show", f"{commit}:{path}") if commit else (ROOT / path).read_text(encoding="utf-8")
    return tuple(_found(ast.parse(text or "")))


def _found(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)


def _defining(package: str, name: str, commit: str) -> set[str]:
    """Return the file that defines a name: a module's own, or the one from which a package has the name."""
    if (module := _file(f"{package}.{name}", commit)) and not module.endswith("__init__.py"):
        return {module}
    path = _file(package, commit)
    if not path.endswith("__init__.py"):
        return {path} - {""}
    origins = {_file(source, commit) for source, imported in _imports(path, commit) if imported == name}
    return origins - {""} or {path}
