"""Rules of the architecture, checked on the source."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "edgellm"
MODULES = 15

# Who may know whom: a package imports itself and the packages below it.
PACKAGES = (
    "cli", "http", "diagnostics", "llm", "services", "upstream", "mesh", "verifier", "spec", "coldstart", "rpc",
    "storage", "engine", "isolation", "places", "layer_range", "system", "errors",
)  # fmt: skip
FORBIDDEN_PAIRS = {("rpc", "spec")}
BESIDE = {"models", "bench", "testkit", "tests", "tools", "docs", "examples"}  # beside the package, and not in it
LIBRARIES = {
    "llama_cpp": {"engine"},
    "jinja2": {"isolation"},
    "typer": {"cli"},
    "rich": {"cli"},
    "markdown_it": {"cli"},
    "prompt_toolkit": {"cli"},
    "fastapi": {"http"},
    "starlette": {"http"},
    "pydantic": {"http"},
    "uvicorn": {"http"},
    "prometheus_client": {"http"},
    "grpc": {"rpc", "services"},
    "cryptography": {"rpc"},
    "spake2": {"rpc"},
    "zeroconf": {"rpc"},
    "huggingface_hub": {"storage"},
    "h11": {"upstream"},
    "fcntl": {"system"},
    "resource": {"system"},
    **{name: set() for name in ("grp", "msvcrt", "pty", "pwd", "termios", "tty", "winreg")},
    "torch": set(),
    "tokenizers": set(),
    "click": set(),
}


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")))


def package(path: Path) -> str:
    """Return the package directly below `edgellm` that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return {"__init__": "llm", "__main__": "cli"}.get(first, first)


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module or ""
            if node.module == "edgellm":
                yield from (f"edgellm.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_the_list(path: Path) -> None:
    mine = package(path)
    assert mine in PACKAGES, f"{path} is in no package"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "edgellm" and len(parts) > 1 and parts[1] in PACKAGES:
            assert PACKAGES.index(parts[1]) >= PACKAGES.index(mine), f"{mine} imports {name}"
            assert (mine, parts[1]) not in FORBIDDEN_PAIRS, f"{mine} imports {name}"
        if parts[0] in LIBRARIES:
            assert mine in LIBRARIES[parts[0]], f"{mine} imports {name}"
        assert parts[0] not in BESIDE, f"the package imports {name}"


@pytest.mark.parametrize("path", sources(PACKAGE / "coldstart"), ids=lambda path: path.name)
def test_the_planner_knows_numbers_and_nothing_else(path: Path) -> None:
    pure = {*sys.stdlib_module_names, "numpy"} - {"os", "pathlib", "random", "socket", "subprocess", "time"}
    for name in imports(path):
        ours = name.startswith(("edgellm.coldstart.", "edgellm.errors", "edgellm.layer_range"))
        assert ours or name.split(".")[0] in pure, f"coldstart imports {name}"


def test_the_package_itself_needs_nothing_to_be_imported() -> None:
    top = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
    names = [name.name for node in top if isinstance(node, ast.Import) for name in node.names]
    names += [node.module or "" for node in top if isinstance(node, ast.ImportFrom)]
    assert set(names) <= {"__future__", "importlib", "logging", "typing"}


@pytest.mark.parametrize("folder", [PACKAGE, ROOT / "bench", ROOT / "testkit"], ids=lambda folder: folder.name)
def test_a_package_has_few_modules(folder: Path) -> None:
    count = Counter(path.parent for path in sources(folder) if path.name != "__init__.py")
    assert not {str(package.relative_to(ROOT)): modules for package, modules in count.items() if modules > MODULES}


@pytest.mark.parametrize("path", sources(ROOT / "tests"), ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_only_tests_of_benchmarks_import_benchmarks(path: Path) -> None:
    known = {name.split(".")[0] for name in imports(path)}
    assert "bench" not in known or path.is_relative_to(ROOT / "tests" / "bench")


@pytest.mark.parametrize("path", sources(ROOT / "testkit"), ids=lambda path: str(path.relative_to(ROOT / "testkit")))
def test_the_testkit_knows_neither_tests_nor_benchmarks(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {"tests", "bench"}


def test_no_import_cycle() -> None:
    """Imports inside functions count, too: they hide a cycle and do not end it."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()}
    known = {
        name: {one for imported in imports(path) if (one := _module(imported, names)) and one != name}
        for name, path in names.items()
    }
    assert not list(_cycles(known))


def _module(imported: str, names: Mapping[str, Path]) -> str | None:
    return next((one for one in (imported, imported.rpartition(".")[0]) if one in names), None)


def _cycles(known: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield modules that import each other, by way of others or not."""
    left = dict(known)
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    while free := [name for name in left if not any(name in imported for imported in left.values())]:
        for name in free:
            del left[name]
    yield from sorted(left)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_ever_unpickled_evaluated_or_printed_from_the_library(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}
    streams = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _named(node.value, "sys")}
    assert package(path) == "cli" or not ("print" in called or streams & {"stdout", "stderr"})
    assert not {name.split(".")[0] for name in imports(path)} & {"pickle", "marshal", "shelve", "dill", "joblib"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_default_address_is_open_to_everybody(path: Path) -> None:
    values = [
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not {"0.0.0.0", "::", "[::]"} & set(values)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_an_assert_is_no_answer_to_a_user(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def tracked_texts() -> list[Path]:
    kinds = ("*.py", "*.md", "*.toml", "*.txt", "*.proto", "start", "run", "justfile")
    folders = ("edgellm", "models", "bench", "testkit", "docs", "examples", "tools", "tests", ".ci")
    found = {path for kind in kinds for path in ROOT.glob(kind)}
    found |= {path for folder in folders for kind in kinds for path in (ROOT / folder).rglob(kind)}
    return sorted(path for path in found if path.name != "test_architecture.py")


def test_no_place_of_one_machine_is_written_down() -> None:
    home, checkout = re.escape(str(Path.home())), re.escape(str(ROOT))
    pattern = re.compile(rf"/(?:home/[a-z]+|Users/[A-Za-z]+)/|{home}/|{checkout}/")
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in tracked_texts()
        if (match := pattern.search(path.read_text(encoding="utf-8")))
    }
    assert not found


def test_no_two_public_classes_share_a_name() -> None:
    classes: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert not {name: paths for name, paths in classes.items() if len(paths) > 1}


ANNOTATED = {"VerifyRequest"}
"""Records that travel, and are filled on their way: the scheduler and the engine note in them what they know."""
FOREIGN = {
    "params", "batch", "buffer", "library", "config", "console", "table", "node", "message", "prepare", "view", "idle",
}  # fmt: skip
"""Names of what other libraries' objects are called where attributes of them are set."""


def attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Public attributes of the classes of a module, each with its class."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                yield inner.target.id, node.name
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _named(inner.value, "self"):
                yield inner.attr, node.name


def stores(node: ast.AST, classes: tuple[str, ...] = ()) -> Iterator[tuple[ast.Attribute, tuple[str, ...]]]:
    """Every place where an attribute is set, with the classes that it is in."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner, classes
        yield from stores(inner, (*classes, inner.name) if isinstance(inner, ast.ClassDef) else classes)


def _named(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def set_from_outside(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """The places where a public attribute is set outside its class. A private class belongs to its module."""
    owners: dict[str, set[tuple[Path, str]]] = {}
    annotated: set[str] = set()
    for path, tree in trees.items():
        for attribute, owner in attributes(tree):
            owners.setdefault(attribute, set()).add((path, owner))
            if owner in ANNOTATED:
                annotated.add(attribute)
    for path, tree in trees.items():
        private = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name[0] == "_"}
        for node, classes in stores(tree):
            if node.attr not in owners or node.attr.startswith("_") or _named(node.value, "self", "cls", *FOREIGN):
                continue
            if _named(node.value, "request") and node.attr in annotated:
                continue
            if not any((path, owner) in owners[node.attr] for owner in {*classes, *private}):
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_no_public_attribute_is_set_from_outside_its_class() -> None:
    found = set_from_outside({path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()})
    assert not list(found)


def test_an_attribute_that_is_set_from_outside_its_class_is_found() -> None:
    """In the same module, too, and by another class; not by the class itself or in a private record."""
    source = """
class Counter:
    def __init__(self):
        self.count = 0
    def add(self, other):
        other.count += 1
class Reader:
    def read(self, counter, entry):
        counter.count = 2
        entry.users = 1
class _Entry:
    users: int
"""
    assert list(set_from_outside({Path("a.py"): ast.parse(source)})) == ["a.py:9: counter.count"]


def test_the_page_on_the_architecture_names_what_is_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", page))
    assert len(named) > 50
    missing = [name for name in sorted(named) if not any((folder / name).exists() for folder in (ROOT, PACKAGE))]
    beside = {path.name for path in sources()}  # "`a/b.py`, `c.py`": in the folder named before
    assert not [name for name in missing if "/" in name or name not in beside]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {*PACKAGES} - {
        "places",
        "layer_range",
        "system",
        "errors",
    }
    terms = re.findall(r"^\| ([\w ,]+) \| ", page.split("## Glossary")[1], re.MULTILINE)[1:]
    assert len(terms) <= 40
    assert terms == sorted(terms, key=str.lower)
