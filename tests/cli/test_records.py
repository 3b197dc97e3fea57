"""Records become the options of a command: their flags, what completes them, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from edgellm.cli.options import completion, only, with_records
from edgellm.errors import InvalidOption
from edgellm.flags import flag


@dataclass(frozen=True, slots=True)
class Shelf:
    """A record with a field of each kind."""

    mug: str = flag("red", "Its colour.", choices={"red": "like a rose", "blue": "like the sea"})
    tools: tuple[Path, ...] = flag((), "What lies on it.", "FILE")
    height: float = flag(1.0, "How high it hangs.", "M", least=0.5, shown="as is usual")
    ladder: bool = flag(False, "", refused="is for the attic")
    kept: int = 7


@dataclass(frozen=True, slots=True)
class Attic(Shelf):
    """Another shelf, in another place."""

    height: float = flag(3.0, "How high the attic is.", "M")


def given(record: type[Shelf], *words: str) -> Shelf:
    found: list[Shelf] = []

    def command(name: str, shelf: Shelf) -> None:
        assert name == "here"
        found.append(shelf)

    command.__annotations__["shelf"] = record
    app = typer.Typer()
    app.command()(with_records(command))
    done = CliRunner().invoke(app, ["here", *words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return found[0]


def test_a_command_gets_the_record_of_its_flags() -> None:
    assert given(Shelf) == Shelf()
    words = ("--mug", "blue", "--tools", "a", "--tools", "b", "--height", "2")
    assert given(Shelf, *words) == Shelf("blue", (Path("a"), Path("b")), 2.0)
    assert given(Attic).height == 3.0
    assert given(Annotated[Shelf, only("height")], "--height", "2") == Shelf(height=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [("--mug", "green"), ("--height", "0"), ("--kept", "3"), ("--tool", "a")])
def test_what_a_record_does_not_have_is_wrong_usage(words: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match="Usage"):
        given(Shelf, *words)
    with pytest.raises(InvalidOption, match="--ladder is for the attic"):
        given(Shelf, "--ladder")


def test_choices_complete_and_several_are_separated_by_commas() -> None:
    colours = {"any": "each", "red": "like a rose", "blue": "like the sea"}
    assert [*completion(colours)("R")] == [("red", "like a rose")]
    some = completion(colours, ("red", "blue"))
    assert [name for name, _ in some("")] == ["any", "red", "blue"]
    assert [name for name, _ in some("blue,")] == ["blue,red"]
