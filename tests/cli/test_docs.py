"""What the documentation shows is what the commands print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.models import CommandInfo

from docs import generate
from edgellm.cli.app import app
from edgellm.cli.help_examples import EXAMPLES
from edgellm.cli.views.console import MEANINGS, STYLES
from tests.cli.conftest import Done

ROOT = Path(__file__).parents[2]
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_block_is_fresh() -> None:
    assert generate.stale() == [], "run: ./start docs"


def test_a_block_that_differs_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- $ echo 3.1 tokens/s, hello -->\n```\n$ echo 3.1 tokens/s, hello\n9 tokens/s, hello\n```\n<!-- end -->"
    )
    monkeypatch.setattr(generate, "PAGES", (page,))
    assert generate.stale() == []  # figures may differ
    page.write_text(page.read_text().replace("9 tokens/s, hello", "9 tokens/s, Hello"))
    assert generate.stale() == ["page.md"]


def registered() -> list[tuple[str, CommandInfo]]:
    """Every command by what a user types, those in groups too."""
    groups = [("", app), *((f"{group.name} ", group.typer_instance) for group in app.registered_groups)]
    return [
        (f"{before}{info.name}", info)
        for before, each in groups
        if each is not None
        for info in each.registered_commands
    ]


def commands() -> list[str]:
    return [name for name, info in registered() if not info.hidden]


def test_every_command_has_its_block_and_its_examples() -> None:
    for command in commands():
        assert f"<!-- $ edgellm {command} --help -->" in COMMANDS
        assert len(EXAMPLES[command]) >= 2
    assert set(EXAMPLES) == set(commands())


def examples() -> list[str]:
    return [line for rows in EXAMPLES.values() for line, _ in rows]


@pytest.mark.parametrize("line", examples())
def test_every_example_is_a_command_line_that_is_understood(
    line: str, edge: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    (words,) = [shlex.split(part) for part in re.split(r"\|", line) if "edgellm" in part]
    words = words[words.index("edgellm") + 1 :]
    for _, info in registered():
        monkeypatch.setattr(info, "callback", _same_signature(info.callback))
    done = edge(*words)
    assert (done.code, done.err) == (0, "")


def _same_signature(callback: Callable[..., object] | None) -> Callable[..., None]:
    def nothing(**_: object) -> None:
        return None

    nothing.__wrapped__ = callback  # type: ignore[attr-defined]
    nothing.__annotations__ = dict(callback.__annotations__) if callback else {}
    return nothing


def test_colours_and_meanings_are_those_of_the_program() -> None:
    for source, meaning in MEANINGS.items():
        assert f"| `{source}` | {STYLES[source].replace('_', ' ')} | {meaning} |" in COMMANDS


def test_links_lead_somewhere() -> None:
    for page, text in ((ROOT / "README.md", README), (ROOT / "docs" / "commands.md", COMMANDS)):
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), target


def test_the_tree_in_the_readme_is_the_tree() -> None:
    tree = re.search(r"```\nedgellm/\n(.*?)```", README, re.DOTALL)
    assert tree is not None
    for line in tree[1].splitlines():
        name = line.split()[0]
        folder = ROOT / "edgellm" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) < 130


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md", "CONTRIBUTING.md", "bench/README.md", "models/README.md"])
def test_files_that_are_named_are_there(name: str) -> None:
    """Also in `docs/`, which is looked at with the first."""
    pages = [ROOT / name, *((ROOT / "docs").glob("*.md") if name == "README.md" else ())]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`((?:edgellm|tests|testkit|bench|docs|tools|models|examples)/[\w./]+\.\w+)`", text)
        assert not [one for one in named if not (ROOT / one).exists()], page.name
