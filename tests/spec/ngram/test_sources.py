"""The sources of copies: context, history, expectations of the model, and rejected drafts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.ngram import sources
from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.ngram.reuse import Reuse, plausible_segment
from edgellm.spec.ngram.sources import DEEPEST, PROMPT_TAIL, ROOT, ContextIndex, Cursor, HistoryIndex, SuffixAutomaton
from edgellm.spec.sampling import likeliest
from edgellm.spec.types import Chunk, Expected
from edgellm.spec.verification import LIKELY, plausible


def read(cursor: Cursor | None, n: int) -> list[int]:
    """What a cursor offers, followed."""
    found: list[int] = []
    while cursor is not None and len(found) < n and (token := cursor.offer()[0]) >= 0:
        found.append(token)
        cursor.advance(token)
    return found


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ([5, 6, 7, 8, 9, 5, 6], (7, 2, 1.0)),
        ([5, 6, 7, 8, 9, 5, 6, 7], (8, 3, 1.0)),
        ([1, 2, 0, 1, 3, 8, 1, 3, 7, 1], (3, 1, pytest.approx(2 / 3))),  # the likeliest, with its share
        ([4, 1, 2, 3, 8, 2, 3, 1, 2, 3], (8, 3, 1.0)),  # behind 3, 1, 2, 3 nothing is known
        ([1, 2, 3], sources.NOTHING),
    ],
)
def test_the_context_goes_on_as_it_did_before(text: list[int], offered: tuple[int, int, float]) -> None:
    context = ContextIndex()
    context.begin(text[:-1])
    context.extend(text[-1:])
    assert context.cursor().offer() == offered


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
    history, one, other = HistoryIndex(), [*range(100, 115), 3], [*range(100, 115), 4]
    history.add(one, [7, 8])
    history.add(other, [9, 9])
    history.begin([6, *one])
    assert read(history.cursor(), 5) == [7, 8]  # and not on into the next conversation
    history.begin([6, *other])
    assert read(history.cursor(), 5) == [9, 9]
    history.begin([5, *other[1:]])
    assert read(history.cursor(), 5) == [], "the end of a chat template stands in every prompt"


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


def inside(token: int) -> bool:
    return token >= 50


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 12))
def test_the_longest_plausible_run_is_found(marks: list[bool], rejected: int) -> None:
    begin, end = plausible_segment(marks, rejected)
    runs = [(b, e) for b in range(rejected, len(marks)) for e in range(b + 1, len(marks) + 1) if all(marks[b:e])]
    if not runs:
        assert begin == end
        return
    longest = max(e - b for b, e in runs)
    assert (begin, end) == min(run for run in runs if run[1] - run[0] == longest)


@pytest.mark.parametrize(
    ("draft", "accepted", "plausible", "written", "wanted"),
    [
        ([1, 2, 3, 4, 5], 1, (True, False, True, True, False), [1, 9], [3, 4]),  # spliced behind the correction
        ([1, 50, 51, 4, 5], 0, None, [8], [4, 5]),  # without the rest of a rejected word
        ([4, 2, 4, 5], 1, None, [4, 9], [4, 5]),  # the accepted 4 is another one than the 4 that is kept
    ],
)
def test_what_is_kept_of_a_rejected_draft(
    draft: list[int], accepted: int, plausible: tuple[bool, ...] | None, written: list[int], wanted: list[int]
) -> None:
    reuse = Reuse(inside)
    reuse.rejected(draft, accepted, plausible)
    reuse.extend(written)
    assert read(reuse.cursor(), 9) == wanted
    reuse.begin([])
    assert read(reuse.cursor(), 9) == []  # the next reply begins without it


def test_a_segment_is_used_up_as_it_is_written_and_replaced_by_the_next() -> None:
    reuse = Reuse(inside)
    reuse.rejected([1, 2, 3, 4], 0, None)
    reuse.extend([9])
    reuse.rejected([2, 3], 2, None)
    reuse.extend([2, 3])
    assert read(reuse.cursor(), 9) == [4]
    reuse.rejected([7, 6, 5], 0, None)
    reuse.extend([8])
    assert read(reuse.cursor(), 9) == [6, 5]


def test_a_segment_of_which_nothing_comes_is_given_up() -> None:
    reuse = Reuse(inside)
    reuse.rejected([1, 2, 3], 0, None)
    reuse.extend([9])
    assert read(reuse.cursor(), 9) == [2, 3]
    reuse.rejected([5], 0, None)
    assert read(reuse.cursor(), 9) == []


@given(st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_plausible_is_what_has_the_probability(accepted: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (3 * rng.normal(size=(5, 7))).astype(np.float32)
    chunk = Chunk(rng.integers(0, 7, 4).astype(np.int32), retrieved=True)
    probs = np.exp(rows.astype(np.float64)) / np.exp(rows.astype(np.float64)).sum(axis=1, keepdims=True)
    own = probs[np.arange(4), chunk.ids]
    marks = plausible(chunk, rows, accepted)
    for at, mark in enumerate(marks):
        if at < accepted:
            assert mark
        elif abs(own[at] - LIKELY) > 1e-4:
            assert mark == (own[at] >= LIKELY)


# --- the automaton against a search of the whole text -----------------------------------------------------------------


texts = st.lists(st.integers(0, 3), max_size=DEEPEST)  # short enough for every count to be exact


def grown(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    return automaton


def places(text: list[int], part: list[int]) -> list[int]:
    """Where `part` ends in `text`."""
    return [at + len(part) - 1 for at in range(len(text) - len(part) + 1) if text[at : at + len(part)] == part]


def state_of(automaton: SuffixAutomaton, part: list[int]) -> int:
    state = ROOT
    for token in part:
        state = automaton.step(state, token)
        if state < 0:
            return -1
    return state


@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_it_knows_every_part_how_often_it_occurs_and_where_first(text: list[int], part: list[int]) -> None:
    automaton = grown(text)
    state, found = state_of(automaton, part), places(text, part)
    if not found:
        assert state < 0
        return
    assert automaton.count[state] == len(found)
    assert automaton.end[state] == found[0]


@given(texts, texts)
def test_following_a_text_finds_its_longest_end(text: list[int], other: list[int]) -> None:
    automaton = grown(text)
    state, matched = ROOT, 0
    for at, token in enumerate(other):
        state, matched = automaton.follow(state, matched, token)
        read = other[: at + 1]
        longest = max(n for n in range(at + 2) if n == 0 or places(text, read[-n:]))
        assert matched == longest


@given(texts)
def test_what_was_seen_is_the_longest_end_that_occurs_earlier_too(text: list[int]) -> None:
    automaton = grown(text)
    longest = max(n for n in range(len(text) + 1) if n == 0 or len(places(text, text[-n:])) > 1)
    assert automaton.length[automaton.seen] == longest


@given(texts, st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_the_likeliest_is_what_followed_most_often(text: list[int], part: list[int]) -> None:
    automaton = grown(text)
    state = state_of(automaton, part)
    if state < 0:
        return
    followed = Counter(text[end + 1] for end in places(text, part) if end + 1 < len(text))
    token, to, count = automaton.likeliest(state)
    assert count == max(followed.values(), default=0)
    if followed:
        assert followed[token] == count
        assert to == automaton.step(state, token)
    else:
        assert token < 0


@given(texts, texts)
def test_it_grows_as_if_all_had_come_at_once(one: list[int], other: list[int]) -> None:
    bit_by_bit, at_once = grown(one), grown([*one, *other][: DEEPEST * 2])
    bit_by_bit.extend(other)
    assert len(bit_by_bit) == len(at_once) == len(one) + len(other)
    assert bit_by_bit.length == at_once.length
    assert bit_by_bit.link == at_once.link
    assert bit_by_bit.count == at_once.count


def test_a_text_that_only_repeats_itself_stays_cheap() -> None:
    automaton = grown([1] * 20_000)  # every count would be carried along 20,000 links
    assert len(automaton.length) == 20_001
    assert automaton.likeliest(automaton.seen)[0] == 1
