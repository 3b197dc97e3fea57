"""Rules of the architecture, checked on the source."""

import ast
import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "edgellm"
MODULES = 15

# Who may know whom: a package imports itself and the packages below it.
PACKAGES = (
    "cli", "http", "diagnostics", "rpc_engine", "llm", "services", "upstream", "mesh", "verifier", "spec", "coldstart",
    "rpc", "storage", "engine", "isolation", "layer_range", "sleeping", "state", "system", "flags", "errors",
)  # fmt: skip
FORBIDDEN_PAIRS = {("rpc", "spec")}
BESIDE = {"models", "bench", "testkit", "tests", "tools", "docs", "examples"}  # beside the package, and not in it
LIBRARIES = {
    "llama_cpp": {"engine"}, "jinja2": {"isolation"}, "typer": {"cli"}, "rich": {"cli"}, "markdown_it": {"cli"},
    "prompt_toolkit": {"cli"}, "fastapi": {"http"}, "starlette": {"http"}, "pydantic": {"http", "mesh"},
    "uvicorn": {"http"}, "prometheus_client": {"http"}, "segno": {"cli"}, "grpc": {"rpc", "rpc_engine", "services"},
    "cryptography": {"rpc"}, "spake2": {"rpc"}, "zeroconf": {"rpc"}, "huggingface_hub": {"storage"},
    "aiohttp": {"upstream"}, "fcntl": {"system"}, "resource": {"system"},
    **{name: set() for name in ("grp", "msvcrt", "pty", "pwd", "termios", "tty", "winreg")}, "torch": set(),
    "tokenizers": set(), "click": set(),
}  # fmt: skip


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")))


def package(path: Path) -> str:
    """Return the package directly below `edgellm` that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return {"__init__": "llm", "__main__": "cli"}.get(first, first)


@pytest.fixture(scope="module", autouse=True)
def _trees_are_dropped() -> Iterator[None]:
    yield
    nodes.cache_clear()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return a file's syntax tree, its root first. No garbage is looked for meanwhile: that takes most of the time."""
    gc.disable()
    try:
        return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    finally:
        gc.enable()


def tree_of(path: Path) -> ast.Module:
    root = nodes(path)[0]
    assert isinstance(root, ast.Module)
    return root


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module or ""
            if (node.module or "").split(".")[0] == "edgellm":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(paths: Iterable[Path], faults_of: Callable[[Path], Iterable[object]]) -> dict[str, list[object]]:
    """Return what `faults_of` finds, by the files in which it finds something."""
    found = {str(path.relative_to(ROOT)): list(faults_of(path)) for path in paths}
    assert found, "there is nothing to look at"
    return {path: there for path, there in found.items() if there}


def test_imports_go_down_the_list() -> None:
    def wrong(path: Path) -> Iterator[str]:
        mine = package(path)
        if mine not in PACKAGES:
            yield "is in no package"
            return
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "edgellm" and len(parts) > 1 and parts[1] in PACKAGES:
                if PACKAGES.index(parts[1]) < PACKAGES.index(mine) or (mine, parts[1]) in FORBIDDEN_PAIRS:
                    yield name
            elif mine not in LIBRARIES.get(parts[0], {mine}) or parts[0] in BESIDE:
                yield name

    assert faults(sources(), wrong) == {}


def test_the_planner_knows_numbers_and_nothing_else() -> None:
    pure = {*sys.stdlib_module_names, "numpy"} - {"os", "pathlib", "random", "socket", "subprocess", "time"}

    def wrong(path: Path) -> Iterator[str]:
        for name in imports(path):
            ours = name.startswith(("edgellm.coldstart.", "edgellm.errors", "edgellm.layer_range"))
            if not ours and name.split(".")[0] not in pure:
                yield name

    assert faults(sources(PACKAGE / "coldstart"), wrong) == {}


def test_the_package_itself_needs_nothing_to_be_imported() -> None:
    top = tree_of(PACKAGE / "__init__.py").body
    names = [name.name for node in top if isinstance(node, ast.Import) for name in node.names]
    names += [node.module or "" for node in top if isinstance(node, ast.ImportFrom)]
    assert set(names) <= {"__future__", "importlib", "logging", "typing"}


@pytest.mark.parametrize("folder", [PACKAGE, ROOT / "bench", ROOT / "testkit"], ids=lambda folder: folder.name)
def test_a_package_has_few_modules(folder: Path) -> None:
    count = Counter(path.parent for path in sources(folder) if path.name != "__init__.py")
    assert not {str(package.relative_to(ROOT)): modules for package, modules in count.items() if modules > MODULES}


def test_only_tests_of_benchmarks_import_benchmarks() -> None:
    others = (path for path in sources(ROOT / "tests") if not path.is_relative_to(ROOT / "tests" / "bench"))
    assert faults(others, lambda path: _roots_among(path, "bench")) == {}


def test_the_testkit_knows_neither_tests_nor_benchmarks() -> None:
    assert faults(sources(ROOT / "testkit"), lambda path: _roots_among(path, "tests", "bench")) == {}


def _roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def _roots_among(path: Path, *names: str) -> set[str]:
    """Return which of `names` a file imports. One that does not even say such a word after "import" is not parsed."""
    words = "|".join(names)
    said = re.search(rf"^\s*(from|import)\b.*\b({words})\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    return _roots(path) & {*names} if said else set()


def test_no_import_cycle() -> None:
    """Imports inside functions count, too: they hide a cycle and do not end it."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()}
    known = {
        name: {one for imported in imports(path) if (one := _module(imported, names)) and one != name}
        for name, path in names.items()
    }
    TopologicalSorter(known).prepare()


def _module(imported: str, names: Mapping[str, Path]) -> str | None:
    return next((one for one in (imported, imported.rpartition(".")[0]) if one in names), None)


def test_nothing_is_ever_unpickled_evaluated_or_printed_from_the_library() -> None:
    def wrong(path: Path) -> set[str]:
        calls = (node.func for node in nodes(path) if isinstance(node, ast.Call))
        called = {name.id for name in calls if isinstance(name, ast.Name)}
        streams = {
            node.attr for node in nodes(path) if isinstance(node, ast.Attribute) and _named(node.value, "sys")
        } & {"stdout", "stderr"}
        printed = set() if package(path) == "cli" else called & {"print"} | streams
        unpickled = _roots(path) & {"pickle", "marshal", "shelve", "dill", "joblib"}
        return called & {"eval", "exec", "compile", "__import__"} | printed | unpickled

    assert faults(sources(), wrong) == {}


def test_no_default_address_is_open_to_everybody() -> None:
    def wrong(path: Path) -> set[str]:
        texts = {node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        return texts & {"0.0.0.0", "::", "[::]"}

    assert faults(sources(), wrong) == {}


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
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert not {name: paths for name, paths in classes.items() if len(paths) > 1}


ANNOTATED = {"VerifyRequest", "Judgement", "Job"}
"""Records that travel, and are filled on their way: the scheduler and the engine note in them what they know."""
FOREIGN = {
    "params", "batch", "buffer", "library", "config", "console", "table", "node", "message", "prepare", "view", "idle",
}  # fmt: skip
"""Names of what other libraries' objects are called where attributes of them are set."""


def written(tree: ast.Module) -> list[tuple[ast.AST, tuple[str, ...]]]:
    """Every class, annotation and attribute that is set, each with the classes that it is in."""
    found: list[tuple[ast.AST, tuple[str, ...]]] = []
    left: list[tuple[ast.AST, tuple[str, ...]]] = [(tree, ())]
    while left:
        node, classes = left.pop()
        kept = isinstance(node, ast.ClassDef | ast.AnnAssign)
        if kept or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
            found.append((node, classes))
        inside = (*classes, node.name) if isinstance(node, ast.ClassDef) else classes
        left += [(inner, inside) for inner in ast.iter_child_nodes(node)]
    return found


def attributes(node: ast.AST) -> Iterator[str]:
    """The public attribute that a class declares or sets in this node, if it does."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    if isinstance(node, ast.Attribute) and _named(node.value, "self"):
        yield node.attr


def _named(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def set_from_outside(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """The places where a public attribute is set outside its class. A private class belongs to its module."""
    owners: dict[str, set[tuple[Path, str]]] = {}
    annotated: set[str] = set()
    places = {path: written(tree) for path, tree in trees.items()}
    for path, found in places.items():
        for attribute, owner in (
            (one, owner) for node, classes in found for one in attributes(node) for owner in classes
        ):
            owners.setdefault(attribute, set()).add((path, owner))
            if owner in ANNOTATED:
                annotated.add(attribute)
    for path, found in places.items():
        private = {node.name for node, _ in found if isinstance(node, ast.ClassDef) and node.name[0] == "_"}
        for node, classes in found:
            if not isinstance(node, ast.Attribute) or node.attr not in owners or node.attr.startswith("_"):
                continue
            if _named(node.value, "self", "cls", *FOREIGN) or (
                ast.unparse(node.value).rpartition(".")[2] in ("request", "job") and node.attr in annotated
            ):
                continue
            if not any((path, owner) in owners[node.attr] for owner in {*classes, *private}):
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_no_public_attribute_is_set_from_outside_its_class() -> None:
    found = set_from_outside({path: tree_of(path) for path in sources()})
    assert not list(found)


def test_the_page_on_the_architecture_names_what_is_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", page))
    assert len(named) > 50
    missing = [name for name in sorted(named) if not any((folder / name).exists() for folder in (ROOT, PACKAGE))]
    beside = {path.name for path in sources()}  # "`a/b.py`, `c.py`": in the folder named before
    assert not [name for name in missing if "/" in name or name not in beside]
    modules = {"layer_range", "sleeping", "state", "system", "flags", "errors"}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {*PACKAGES} - modules
    terms = re.findall(r"^\| ([\w ,]+) \| ", page.split("## Glossary")[1], re.MULTILINE)[1:]
    assert len(terms) <= 40
    assert terms == sorted(terms, key=str.lower)
