"""Help pages: the short ones are short, and nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from edgellm.cli.app import pages
from edgellm.cli.help_pages import SHORT
from tests.cli.conftest import Done, commands

ROOT = Path(__file__).parents[2]
Edge = Callable[..., Done]


def each() -> list[Any]:
    return [pytest.param(one, id=one.command_path) for one in commands()]


def options(context: typer.Context) -> dict[str, str]:
    """The visible options of a command by their parameters' names, each with its long name."""
    given = [one for one in context.command.params if one.param_type_name == "option" and not one.is_eager]
    return {one.name: one.opts[-1] for one in given if not one.hidden}  # type: ignore[attr-defined]


def listed(page: str) -> set[str]:
    names = re.findall(r"^  (?:-\w, )?(--[\w\[\]-]+)", page.partition("\nOptions:")[2], re.MULTILINE)
    return {name.replace("[no-]", "") for name in names} - {"--help", "--help-all"}


@pytest.mark.parametrize("context", each())
def test_a_short_page_is_short_and_the_other_has_everything(context: typer.Context, edge: Edge) -> None:
    words, known = context.command_path.split()[1:], options(context)
    short, whole = edge(*words, "--help"), edge(*words, "--help-all")
    assert (short.code, whole.code) == (0, 0)
    assert listed(whole.out) == set(known.values())
    assert len(listed(short.out)) <= SHORT
    assert listed(short.out) <= listed(whole.out)
    assert (f"{context.command_path} --help-all" in short.out) == (len(known) > SHORT)
    assert all(f"  {line}\n" in whole.out for line, _ in pages()[" ".join(words)].examples)


@pytest.mark.parametrize("context", each())
def test_everything_is_completed(context: typer.Context) -> None:
    completed = {one.value for one in context.command.shell_complete(context, "--")}
    assert completed >= {*options(context).values(), "--help", "--help-all"}


def test_a_group_without_a_command_prints_its_page(edge: Edge) -> None:
    for words in ((), ("mesh",), ("config",)):
        done = edge(*words)
        assert (done.code, done.err) == (2, "")
        assert ("\nCommands:\n" if words else "\nTalk:\n") in done.out
        assert "-h, --help" in done.out
        assert edge(*words, "--help").out == done.out


def test_the_first_page_has_every_command_once(edge: Edge) -> None:
    page = edge("--help").out
    for name in filter(str.isalpha, pages()):
        assert len(re.findall(rf"^  {name} +\S", page, re.MULTILINE)) == 1
