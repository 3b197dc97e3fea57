"""The functions of Python's standard library, as the interpreter that runs this has it, and the calls between them."""

import ast
import functools
import os
import sysconfig
import textwrap
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data")
)
"""Folders of others' code, of tests (few systems have them), and of tables."""
LARGEST = 400_000  # characters of a file: beyond it, tables
HELD_OUT_OF = 12
"""One file in so many is held out, by the checksum of its path."""
LONGEST = 1_800  # characters of a function
_FEWEST_LINES = 3


class Split(StrEnum):
    TRAIN = "train"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Function:
    """A function without the indentation of its class. `around` has the dotted name of its module and of the class."""

    around: str
    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function that the same module or class defines, with the lines before it.

    `before` ends where the call begins, and `source` is the call on its one line; both are dedented together.
    """

    of: Function
    before: str
    source: str
    after: str


@dataclass(frozen=True, slots=True)
class Library:
    """The files of a split as texts, with their functions and the calls of these."""

    files: tuple[str, ...]
    functions: tuple[Function, ...]
    calls: tuple[Call, ...]


def split_of(path: str) -> Split:
    """Return the split of the file with this path in the library."""
    return Split.TEST if zlib.crc32(path.encode()) % HELD_OUT_OF == 0 else Split.TRAIN


@functools.cache
def library(split: Split) -> Library:
    """Return what the files of a split have, in the order of their paths. ASCII alone is read."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[str] = []
    functions: list[Function] = []
    calls: list[Call] = []
    for path in sorted(_files(root)):
        name = path.relative_to(root).as_posix()
        if split_of(name) is not split:
            continue
        raw = path.read_bytes()
        if not raw.isascii() or not 0 < len(raw) <= LARGEST:
            continue
        text = raw.decode("ascii").replace("\r\n", "\n").expandtabs(8)
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(text)
        except SyntaxError:
            continue  # on purpose, in files of examples
        files.append(text)
        of_file = list(_functions(tree, text.splitlines(), name.removesuffix(".py").replace("/", ".")))
        functions += [function for function, _ in of_file]
        calls += _calls(of_file, text.splitlines())
    return Library(tuple(files), tuple(functions), tuple(calls))


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


Found = tuple[Function, ast.FunctionDef]


def _functions(tree: ast.Module, lines: list[str], around: str) -> Iterator[Found]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield from _function(node, lines, around)
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield from _function(method, lines, f"{around}.{node.name}")


def _function(node: ast.FunctionDef, lines: list[str], around: str) -> Iterator[Found]:
    source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    if source.startswith("def ") and source.count("\n") + 1 >= _FEWEST_LINES and len(source) <= LONGEST:
        yield Function(around, node.name, source), node


def _calls(found: list[Found], lines: list[str]) -> Iterator[Call]:
    known = {(function.around, function.name): function for function, _ in found}
    for function, node in found:
        module = function.around.rpartition(".")[0]
        for call in ast.walk(node):
            if not isinstance(call, ast.Call) or call.lineno != call.end_lineno or not (call.args or call.keywords):
                continue
            if isinstance(call.func, ast.Name):
                of = known.get((function.around, call.func.id)) or known.get((module, call.func.id))
            elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
                of = known.get((function.around, call.func.attr)) if call.func.value.id == "self" else None
            else:
                of = None
            if of is None or of.name == function.name:
                continue
            first = max(node.lineno, call.lineno - 6) - 1
            part = textwrap.dedent("\n".join(lines[first : call.lineno])).split("\n")
            removed = len(lines[call.lineno - 1]) - len(part[-1])
            begin, end = call.col_offset - removed, (call.end_col_offset or 0) - removed
            before = "\n".join([*part[:-1], part[-1][:begin]])
            yield Call(of, before, part[-1][begin:end], part[-1][end:])


def renamed(source: str, old: str, new: str) -> str:
    """Return `source`, a function, with its variable `old` called `new`."""
    lines = source.split("\n")
    places = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Name) and node.id == old) or (isinstance(node, ast.arg) and node.arg == old)
    }
    for line, column in sorted(places, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + new + text[column + len(old) :]
    return "\n".join(lines)


def variables(source: str) -> list[str]:
    """Return the parameters and variables of a function that are renamed soundly, and used at least twice: no name
    occurs in a string, a comment, an attribute, a keyword or a declaration."""
    tree = ast.parse(source)
    named: dict[str, int] = {}
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            named[node.id] = named.get(node.id, 0) + 1
            if isinstance(node.ctx, ast.Store):
                own.add(node.id)
        elif isinstance(node, ast.arg):
            named[node.arg] = named.get(node.arg, 0) + 1
            own.add(node.arg)
    return sorted(name for name in own - {"self", "cls"} if named[name] >= 2 and _words(source, name) == named[name])


def _words(source: str, name: str) -> int:
    """Return how often `name` stands in `source` as a word of its own."""
    count = at = 0
    while (at := source.find(name, at)) >= 0:
        before, after = source[at - 1 : at], source[at + len(name) : at + len(name) + 1]
        count += not (before.isidentifier() or before.isdigit() or after.isidentifier() or after.isdigit())
        at += len(name)
    return count
