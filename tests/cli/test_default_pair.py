"""Commands without a model's name: the default verifier is fetched once, and a failure is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.storage.default_pair import HOME, SMOLLM2, VARIABLE
from tests.cli.conftest import Done
from tests.storage.wheels import bundled_draft, packages

__all__ = ["bundled_draft", "packages"]

Edge = Callable[..., Done]
HELLO = ("chat", "Hello", "--max-tokens", "4", "--no-history")


@pytest.fixture(autouse=True)
def _real(packages: Path, bundled_draft: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)


def test_the_default_verifier_is_fetched_once(edge: Edge) -> None:
    done = edge(*HELLO)
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("downloading")]
    assert f"downloading {SMOLLM2.verifier} (" in line
    assert "Apache-2.0" in line
    again = edge(*HELLO, "-m", "none")
    assert "downloading" not in again.err
    assert again.out
    assert [row["name"] for row in edge("ls", "--json").answer][-1] == SMOLLM2.verifier


def test_what_cannot_be_fetched_is_said_in_one_line_and_tried_again_later(edge: Edge, packages: Path) -> None:
    wheel = next(packages.glob("*.whl"))
    wheel.rename(kept := packages / "kept")
    done = edge(*HELLO)
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if "The bundled toy pair answers" in line]
    assert "was not fetched" in line
    assert "Traceback" not in done.err
    kept.rename(wheel)
    soon = edge(*HELLO)
    assert "downloading" not in soon.err
    assert soon.out == done.out == edge(*HELLO, "-m", HOME.draft, "--verifier", HOME.verifier).out
    assert edge("pull", SMOLLM2.verifier).code == 0
    assert "toy" not in edge(*HELLO).err


@pytest.mark.parametrize("words", [("--verifier", HOME.verifier), ("--verifier", "none"), ("-m", HOME.draft)])
def test_what_needs_no_default_verifier_fetches_none(edge: Edge, words: tuple[str, ...]) -> None:
    done = edge(*HELLO, *words)
    assert done.code == 0, done.err
    assert "downloading" not in done.err
