"""What the documentation shows is what the commands print."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs import generate
from edgellm.cli import app as application
from edgellm.cli.app import pages
from tests.cli.conftest import Edge, commands

ROOT = Path(__file__).parents[2]


def test_every_block_is_fresh() -> None:
    assert generate.stale() == [], "run: ./start docs"


@pytest.fixture(scope="module")
def idle_commands() -> Callable[..., object]:
    """The tree of commands that take their options and do nothing."""
    found = [*commands()]
    for one in found:
        one.command.callback = lambda **_: None
    root: Any = found[0].find_root().command
    return root


def test_every_command_has_examples_and_each_is_a_command_line_that_is_understood(
    edge: Edge, idle_commands: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {name for name, page in pages().items() if page.home} == {
        one.command_path.partition(" ")[2] for one in commands()
    }
    assert all(len(page.examples) >= 2 for page in pages().values() if page.home)
    monkeypatch.setattr(application, "tree", lambda: idle_commands)
    for line in (line for page in pages().values() for line, _ in page.examples):
        (words,) = [shlex.split(part) for part in line.split("|") if "edgellm" in part]
        done = edge(*words[words.index("edgellm") + 1 :])
        assert (line, done.code, done.err) == (line, 0, "")


def documents() -> list[Path]:
    """Every page of the repository, but nothing in `.venv` and the like."""
    return [
        page
        for top in sorted(ROOT.iterdir())
        if not top.name.startswith(".")
        for page in ([top] if top.suffix == ".md" else sorted(top.rglob("*.md")))
    ]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and GitLab name them, and those set by hand."""
    text = prose(page)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


def dead_links(page: Path) -> list[str]:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        if "://" in target or (there.exists() and (not anchor or anchor in anchors(there))):
            continue
        dead.append(target)
    return dead


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_that_are_named_are_there(page: Path) -> None:
    assert dead_links(page) == []
    folders = "edgellm|tests|testkit|bench|docs|tools|models|examples"
    named = re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_index_names_every_page() -> None:
    docs = ROOT / "docs"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for index in docs.rglob("README.md")
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(index))
    }
    assert {page for page in docs.rglob("*.md") if page.parent.name != "decisions"} - {docs / "README.md"} <= linked


def test_the_tree_in_the_readme_is_the_tree() -> None:
    tree = re.search(r"```\nedgellm/\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tree is not None
    for line in tree[1].splitlines():
        name = line.split()[0]
        folder = ROOT / "edgellm" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name
