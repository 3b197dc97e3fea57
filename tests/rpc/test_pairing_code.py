"""Codes that people read on one screen and type at another."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import InvalidOption
from edgellm.rpc.trust.pairing import NUMBERS, WORDS, Code

codes = st.builds(Code, st.integers(1, NUMBERS), st.tuples(st.sampled_from(WORDS), st.sampled_from(WORDS)))


def changes(one: str, other: str) -> int:
    """Damerau-Levenshtein: letters put in, left out, replaced, or exchanged with their neighbour."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        last, row = row, [i]
        for j, there in enumerate(other, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != there))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == there:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before = last
    return row[-1]


def test_the_words_are_easy_to_tell_apart() -> None:
    assert len(WORDS) == 256
    assert len({word[:3] for word in WORDS}) == 256
    assert all(re.fullmatch("[a-z]{3,8}", word) for word in WORDS)
    assert not [pair for pair in combinations(WORDS, 2) if changes(*pair) < 3]


@given(codes, st.sampled_from([str, str.upper, str.title]), st.sampled_from(["-", " ", "_", " - "]))
def test_it_is_read_as_people_type_it(code: Code, case: object, between: str) -> None:
    text = between.join((str(code.number), *code.words))
    assert Code.parse(f" {case(text)} ") == code  # type: ignore[operator]
    assert Code.parse(f"{code.number} {code.words[0][:3]} {code.words[1][:3]}") == code


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "7-lamp-otter") for text in ("", "lamp-otter", "7-lamp", "0-lamp-otter", "0991-lamp-otter")),
        *((text, "7-lamp-otter") for text in ("100-lamp-otter", "٧-lamp-otter", "7-lamp-otter-otter")),
        ("099" + "9" * 5000 + "-lamp-otter", "7-lamp-otter"),
        ("7-lmap-otter", "Is it 'lamp'"),
        ("7-la-otter", "'la' is not a word"),
        ("7-lamp-xxxxxx", "'xxxxxx' is not a word of any code. Compare"),
    ],
)
def test_a_typing_error_is_found_before_it_costs_the_guess(text: str, says: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(says)):
        Code.parse(text)
