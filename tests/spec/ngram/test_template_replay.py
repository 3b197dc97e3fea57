"""Replies by analogy: what a past reply took from its prompt is taken from this one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.ngram.template_replay import MAX_PROMPTS, Analogy, runs

MEET, AT, END, HI, YES, BYE = 1, 2, 3, 4, 5, 6  # words that every letter has
ANNA, BEN, CARLA, PARK, ZOO = 20, 21, 22, 30, 31


def letter(place: int, sender: int, ask: int = 7) -> list[int]:
    return [MEET, AT, place, END, 8, sender, 9, ask]


def reply(place: int, sender: int) -> list[int]:
    return [HI, sender, YES, 10, place, BYE]


def written(analogy: Analogy, n: int = 12) -> list[int]:
    found: list[int] = []
    cursor = analogy.cursor()
    while cursor is not None and len(found) < n and (token := cursor.offer()[0]) >= 0:
        found.append(token)
        cursor.advance(token)
    return found


def test_names_and_places_of_this_letter_take_the_place_of_those_of_the_last() -> None:
    analogy = Analogy()
    analogy.add(letter(PARK, ANNA), reply(PARK, ANNA))
    analogy.begin(letter(ZOO, BEN))
    assert written(analogy) == reply(ZOO, BEN)


def test_the_most_similar_conversation_is_followed() -> None:
    analogy = Analogy()
    analogy.add(letter(PARK, ANNA, ask=70), reply(PARK, ANNA))
    analogy.add([50, 51, 52, 53], [60, 61])
    analogy.begin([50, 51, 52, 54])
    assert written(analogy) == [60, 61]


def test_where_the_verifier_writes_another_name_the_thread_goes_on_behind_it() -> None:
    analogy = Analogy()
    analogy.add(letter(PARK, ANNA), reply(PARK, ANNA))
    analogy.begin([CARLA, 43, *letter(ZOO, BEN)])
    analogy.extend([HI, CARLA, 43])
    analogy.extend([YES])
    assert written(analogy) == [10, ZOO, BYE]


def test_a_word_that_was_left_out_is_skipped() -> None:
    analogy = Analogy()
    analogy.add([11, 12, 13], [90, 91, 92, 93])
    analogy.begin([11, 12, 14])
    analogy.extend([90, 92])
    assert written(analogy) == [93]


def test_without_anything_similar_nothing_is_offered() -> None:
    analogy = Analogy()
    analogy.begin([1, 2, 3])
    assert analogy.cursor() is None
    analogy.extend([1])
    analogy.add([5, 6], [7])
    analogy.begin([1, 2, 3])
    assert analogy.cursor() is None


def test_what_every_prompt_has_says_nothing_about_which_is_similar() -> None:
    analogy = Analogy()
    for at in range(MAX_PROMPTS + 1):
        analogy.add([1, 2, 100 + at], [200 + at])
    analogy.begin([1, 2, 99])
    assert analogy.cursor() is None


small = st.lists(st.integers(0, 5), max_size=10)


@given(small, small)
def test_every_run_says_where_it_comes_from(prompt: list[int], text: list[int]) -> None:
    at = 0
    for place, length in runs(prompt, text):
        if place < 0:
            assert text[at] not in prompt
        else:
            assert prompt[place : place + length] == text[at : at + length]
        at += length
    assert at == len(text)


@given(small, small, small, st.lists(st.integers(0, 5), max_size=12))
def test_whatever_comes_it_offers_tokens_that_it_has_seen(
    prompt: list[int], past: list[int], now: list[int], comes: list[int]
) -> None:
    analogy = Analogy()
    analogy.add(prompt, past)
    analogy.begin(now)
    for token in comes:
        cursor = analogy.cursor()
        assert cursor is None or cursor.offer()[0] in {*now, *past}
        analogy.extend([token])
