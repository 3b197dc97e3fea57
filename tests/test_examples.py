"""Drafter, gate and verifier of a stranger's, each in one file outside the package: they run, and the text stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgellm.errors import InvalidOption
from edgellm.llm import LLM
from edgellm.spec.params import ReplyOptions
from examples.drafter import LastTime
from examples.gate import Digits
from tests.spec.real import case

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["drafter", "gate", "verifier"])
def test_an_example_runs_as_it_says(name: str) -> None:
    run = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert ("corrected" if name == "gate" else "the same text: True") in done.stdout


def test_with_a_drafter_of_ones_own_the_text_is_the_verifiers(pair: LLM, alone: LLM) -> None:
    accepted = 0
    for number in range(6):
        wanted = [token.id for token in alone.reply(case(number), max_tokens=24)]
        reply = pair.reply(case(number), max_tokens=24, drafter=LastTime())
        assert [token.id for token in reply] == wanted
        by_itself = alone.reply(case(number), max_tokens=24, drafter=LastTime())
        assert [token.id for token in by_itself] == wanted
        accepted += reply.summary.accepted
    assert accepted > 0


def test_a_drafter_of_ones_own_says_nothing_that_a_budget_could_go_by(pair: LLM) -> None:
    with pytest.raises(InvalidOption, match=r"the budget 0\.2 only handles"):
        ReplyOptions(drafter=LastTime(), budget=0.2)
    reply = pair.reply(case(0), max_tokens=8, drafter=LastTime(), gate=Digits(pair.piece))
    assert list(reply)
