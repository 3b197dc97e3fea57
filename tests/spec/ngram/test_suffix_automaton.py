"""The automaton against what a search of the whole text says."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.ngram.sources import DEEPEST, ROOT, SuffixAutomaton

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
