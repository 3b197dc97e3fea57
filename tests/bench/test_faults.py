"""Replies over a link that goes wrong in every way. The long run is `python -m bench run robustness/faults`."""

from pathlib import Path

import pytest

from bench.mesh.kill_worker import run as kill_workers
from bench.robustness.attack import browser
from bench.robustness.faults import DEADLINE, KINDS, Outcome, failures, figures_of, judged, run, table
from edgellm.spec.types import Source, Token
from tests.http.test_page import needs_browser


@pytest.mark.nightly
def test_every_word_is_what_it_says_whatever_goes_wrong() -> None:
    outcomes, left = run([*KINDS, "reply abandoned", "none"], seed=3, prompts=1)
    assert [(one.kind, one.problems) for one in outcomes if one.problems] == []
    assert any(one.unchecked for one in outcomes)  # some of it did go wrong
    found = {"faults": figures_of(outcomes), "replies": 15, "wrong": 0, "late": 0, "left": left}
    assert failures(found) == []
    assert "0 with a wrong" in table(found)


def test_a_pair_that_says_something_else_is_found_out() -> None:
    def said(*tokens: tuple[int, Source]) -> tuple[int, list[str]]:
        return judged("none", [Token(token, b"", source) for token, source in tokens], [1, 2, 3])

    checked, draft = Source.ACCEPTED, Source.DRAFT
    assert said((1, checked), (2, checked), (3, checked)) == (0, [])
    assert said((1, checked), (2, draft), (9, draft)) == (2, [])
    assert said((1, checked), (9, checked), (3, checked))[1] == ["what was checked is not the verifier's own text"]
    assert said((1, checked), (2, checked))[1] == ["2 tokens, and the verifier writes 3"]
    assert figures_of([Outcome("none", 1.0, DEADLINE + 1, 0, back=False)])["none"]["late"] == 1


@needs_browser
def test_hostile_text_on_the_page_stays_text() -> None:
    assert browser.page_with_hostile_text(quick=True).wrong == ()


@needs_browser
def test_pages_of_other_origins_read_nothing_and_begin_no_reply() -> None:
    assert browser.hostile_pages(quick=True).wrong == ()


@pytest.mark.nightly
def test_replies_are_complete_and_the_same_when_workers_die_or_hang(f32_pair: tuple[Path, Path]) -> None:
    outcomes = list(kill_workers(*f32_pair, replies=5, seed=2))  # four kills and one hang
    assert [outcome.problems for outcome in outcomes] == [()] * 5
    assert sum(outcome.recovered > 0 for outcome in outcomes) >= 2
