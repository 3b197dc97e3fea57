"""Print how large the project is, beside what it may be and what it is to become.

    python -m tools.budget

`budget.toml` has for each figure what it may be at most today, and the aim; `tests/test_budget.py` holds the former. A
change that lowers a figure lowers its limit, too; none raises one. Generated code is not counted.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tools.architecture import run

ROOT = Path(__file__).resolve().parent.parent
BUDGET = Path(__file__).with_name("budget.toml")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
WIDE, RECORD_FIELDS, ATTRIBUTES, MODULES = 8, 15, 14, 15
"""Parameters of a wide function, at least; fields of a record, attributes of an object and modules of a package, at
most."""
QUESTION = ("chat", "Where is my mug?", "--max-tokens", "24", "--json")
PLAIN = (*QUESTION, "--draft", "none", "--retrieval", "off")
CLAUSE = re.compile(r"# *(of|that|which|whose|for which|in which|than)\b")
"""A comment whose first half stands in the code on its left."""
HEADLESS = ("What ", "Whether ", "Who ", "Where ", "Those ", "How ", "See ")
"""A docstring that begins neither with a verb nor with a noun."""
SIGNS = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)
"""What a number is written with."""


def sources(folder: Path) -> list[Path]:
    """Return the Python files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*.py") if not path.name.endswith(GENERATED))


def lines(paths: Iterable[Path]) -> int:
    """Return the lines of some files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@dataclass(frozen=True, slots=True)
class Code:
    """The syntax trees of a package's modules, by path."""

    trees: dict[Path, ast.Module]

    @classmethod
    def of(cls, package: Path) -> "Code":
        """Return the code of a package."""
        return cls({path: ast.parse(path.read_text(encoding="utf-8")) for path in sources(package)})

    def nodes(self) -> Iterator[ast.AST]:
        """Yield all nodes of all modules."""
        return chain.from_iterable(map(ast.walk, self.trees.values()))

    def parameters(self) -> list[int]:
        """Return the number of parameters of each function, without `self` and `cls`."""
        found = []
        for node in self.nodes():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                found.append(len(names) - (names[:1] in (["self"], ["cls"])))
        return found

    def classes(self, ending: str = "") -> list[ast.ClassDef]:
        """Return all classes whose name has this ending."""
        return [node for node in self.nodes() if isinstance(node, ast.ClassDef) and node.name.endswith(ending)]

    def functions(self, name: str) -> int:
        """Return the number of a module's functions of this name."""
        bodies = chain.from_iterable(tree.body for tree in self.trees.values())
        return sum(isinstance(node, ast.FunctionDef) and node.name == name for node in bodies)

    def headless(self) -> int:
        """Return the number of docstrings, also those of constants, that begin with neither a verb nor a noun."""
        texts = (node.value for node in self.nodes() if isinstance(node, ast.Expr))
        return sum(isinstance(text, ast.Constant) and str(text.value).startswith(HEADLESS) for text in texts)

    def clauses(self) -> int:
        """Return the number of comments that begin in the middle of a sentence."""
        return sum(len(CLAUSE.findall(path.read_text(encoding="utf-8"))) for path in self.trees)

    def numbers(self, package: str = "") -> int:
        """Return the numeric constants of modules, below `package` if given."""
        trees = [tree for path, tree in self.trees.items() if f"/edgellm/{package}" in path.as_posix()]
        return sum(map(_numbers, chain.from_iterable(tree.body for tree in trees)))


def _numbers(node: ast.stmt) -> int:
    """Return how many names a statement of a module sets to a number."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return 0
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    return sum(map(_is_number, values))


def _is_number(value: ast.expr) -> bool:
    parts = list(ast.walk(value))
    numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
    return all(isinstance(part, SIGNS) for part in parts) and all(type(each) in (int, float) for each in numbers)


def _fields(node: ast.ClassDef) -> int:
    """Return the number of a record's fields."""
    is_record = any("dataclass" in ast.unparse(each) for each in node.decorator_list) or any(
        ast.unparse(base) in ("BaseModel", "TypedDict", "NamedTuple") for base in node.bases
    )
    return sum(isinstance(each, ast.AnnAssign) for each in node.body) if is_record else 0


def _attributes(node: ast.ClassDef) -> int:
    """Return the number of attributes that the methods of a class set on `self`."""
    found = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    return len(found)


def words(folder: Path) -> int:
    """Return the words of all pages below a folder, without what is printed in fences."""
    pages = (path.read_text(encoding="utf-8") for path in folder.rglob("*.md"))
    return sum(len(re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE).split()) for page in pages)


def runs(root: Path = ROOT) -> dict[str, int]:
    """Return each figure of `budget.toml` for which a question is asked: the least of three times, as what is measured
    in idle slices may come within the question."""
    asked, plain = ([run(root, words) for _ in range(3)] for words in (QUESTION, PLAIN))
    return {
        "files run for a question": min(len(one.functions) for one in asked),
        "modules imported for a question": min(one.imported for one in asked),
        "files run for a plain question": min(len(one.functions) for one in plain),
    }


def measured(root: Path = ROOT) -> dict[str, int]:
    """Return each figure of `budget.toml` that can be read off the files."""
    code = Code.of(root / "edgellm")
    packages = [path.parent for path in code.trees if path.name == "__init__.py"]
    beside = {name: lines(sources(root / name)) for name in ("tests", "bench", "testkit")}
    parameters = code.parameters()
    return {
        "lines": lines(code.trees),
        "modules": sum(path.name != "__init__.py" for path in code.trees),
        "large packages": sum(sum(1 for _ in each.glob("*.py")) - 1 > MODULES for each in packages),
        "wide functions": sum(count >= WIDE for count in parameters),
        "parameters": max(parameters),
        "large records": sum(_fields(node) > RECORD_FIELDS for node in code.classes()),
        "large classes": sum(_attributes(node) > ATTRIBUTES for node in code.classes()),
        "numeric constants": code.numbers(),
        "numeric constants of spec": code.numbers("spec"),
        "session classes": len(code.classes("Session")),
        "pending classes": len(code.classes("Pending")),
        "child processes": sum(path.stem.endswith("child") for path in code.trees),
        "functions place": code.functions("place"),
        "comments in mid-sentence": code.clauses(),
        "docstrings without a head": code.headless(),
        "lines of tests": beside["tests"],
        "lines of bench and testkit": beside["bench"] + beside["testkit"],
        "words of docs": words(root / "docs"),
    }


def limits() -> dict[str, tuple[int, int]]:
    """Return for each figure what it may be at most, and the aim."""
    return {name: (limit, aim) for name, (limit, aim) in tomllib.loads(BUDGET.read_text(encoding="utf-8")).items()}


def table(found: dict[str, int]) -> str:
    """Return a line for each figure: what it is, what it may be, and the aim."""
    known = limits()
    rows = [f"{'':32}{'is':>8}{'at most':>9}{'aim':>8}"]
    rows += [f"{name:32}{found[name]:8,}{limit:9,}{aim:8,}" for name, (limit, aim) in known.items() if name in found]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(measured() | runs()))
