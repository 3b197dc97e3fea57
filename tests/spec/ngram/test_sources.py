"""The context and the history as sources, and what the model expects as a third."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.ngram.sources import NOTHING, PROMPT_TAIL, ContextIndex, Cursor, HistoryIndex
from edgellm.spec.sampling import likeliest
from edgellm.spec.types import Expected


def read(cursor: Cursor | None, n: int) -> list[int]:
    """What a cursor offers, followed."""
    found: list[int] = []
    while cursor is not None and len(found) < n and (token := cursor.offer()[0]) >= 0:
        found.append(token)
        cursor.advance(token)
    return found


def test_the_context_goes_on_as_it_did_before() -> None:
    context = ContextIndex()
    context.begin([5, 6, 7, 8, 9, 5, 6])
    assert read(context.cursor(), 3) == [7, 8, 9]
    context.extend([7])
    token, matched, share = context.cursor().offer()
    assert (token, matched, share) == (8, 3, 1.0)


def test_of_several_continuations_the_likeliest_is_offered_with_its_share() -> None:
    context = ContextIndex()
    context.begin([1, 2, 0, 1, 3, 8, 1, 3, 7, 1])
    token, matched, share = context.cursor().offer()
    assert (token, matched) == (3, 1)
    assert share == pytest.approx(2 / 3)


def test_nothing_is_offered_behind_what_was_never_seen() -> None:
    context = ContextIndex()
    context.begin([1, 2, 3])
    assert context.cursor().offer() == NOTHING


def test_where_a_match_ends_a_shorter_one_goes_on() -> None:
    context = ContextIndex()
    context.begin([4, 1, 2, 3, 8, 2, 3, 1, 2, 3])
    assert read(context.cursor(), 1) == [8]


def test_a_prompt_that_goes_on_is_not_indexed_anew_and_another_one_is() -> None:
    context = ContextIndex()
    context.begin([1, 2, 3])
    context.extend([4, 5])
    kept = context.automaton
    context.begin([1, 2, 3, 4, 5, 6])
    assert context.automaton is kept
    assert context.text == [1, 2, 3, 4, 5, 6]
    context.begin([1, 2, 9])
    assert context.automaton is not kept
    assert context.text == [1, 2, 9]


def test_a_prompt_asked_before_leads_to_its_reply() -> None:
    history = HistoryIndex()
    history.add([1, 2, 3], [7, 8])
    history.add([1, 2, 4], [9, 9])
    history.begin([6, 1, 2, 3])
    assert read(history.cursor(), 5) == [7, 8]  # and not on into the next conversation
    history.begin([6, 1, 2, 4])
    assert read(history.cursor(), 5) == [9, 9]


def test_only_the_end_of_a_prompt_is_remembered() -> None:
    history = HistoryIndex()
    history.add(range(100, 100 + 2 * PROMPT_TAIL), [7])
    assert len(history.automaton) == PROMPT_TAIL + 2


def test_the_model_is_expected_to_say_what_it_said_while_reading() -> None:
    context = ContextIndex()
    calibration = Calibration(context)
    prompt = [1, 2, 3, 4, 5, 1]
    context.begin(prompt)
    calibration.begin(prompt)
    assert calibration.cursor() is None
    # Behind 1 it expects 4, though the context goes on with 2, and behind 4 a 5.
    said = Expected(0, np.array([4, 9, 9, 5, 9, 9], np.int32), np.array([0.8, 1, 1, 0.8, 0.01, 1], np.float32))
    calibration.expect(said)
    assert read(calibration.cursor(), 4) == [4, 5]  # sampled, searched, sampled; then nothing is likely


def test_a_prompt_that_begins_alike_keeps_what_is_known_of_that() -> None:
    calibration = Calibration(ContextIndex(), owns=True)
    calibration.begin([1, 2, 3])
    calibration.expect(Expected(0, np.array([7, 8, 9], dtype=np.int32), np.ones(3, dtype=np.float32)))
    calibration.begin([1, 2, 4])
    assert [calibration.expected(place)[0] for place in range(3)] == [7, 8, -1]


@given(st.integers(0, 2**32 - 1))
def test_the_likeliest_tokens_have_their_probabilities(seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(3, 9)).astype(np.float32)
    found = likeliest(rows, 4)
    whole = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    assert found.start == 4
    np.testing.assert_array_equal(found.ids, rows.argmax(axis=1))
    np.testing.assert_allclose(found.probs, whole.max(axis=1), rtol=1e-5)
