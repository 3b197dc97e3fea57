"""Short device IDs: typed by people, from other screens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import InvalidOption
from edgellm.rpc.trust.identity import ALPHABET, DeviceID, parse_short

shorts = st.builds(lambda digest: DeviceID(digest).short, st.binary(min_size=32, max_size=32))
LOOK_ALIKES = {"1": "1iIlL", "0": "0oO", "8": "8bB"}


@given(shorts, st.data())
def test_case_grouping_and_look_alikes_do_not_matter(short: str, data: st.DataObject) -> None:
    assert parse_short(short) == short
    typed = "".join(
        data.draw(st.sampled_from(LOOK_ALIKES.get(sign, sign + sign.lower()))) for sign in short if sign != "-"
    )
    assert parse_short(typed[:5] + data.draw(st.sampled_from(["", " ", "-", " - "])) + typed[5:]) == short


@given(shorts, st.integers(0, 7), st.sampled_from(ALPHABET))
def test_any_single_wrong_sign_is_found(short: str, at: int, wrong: str) -> None:
    signs = short.replace("-", "")
    if signs[at] != wrong:
        with pytest.raises(InvalidOption, match="mistyped"):
            parse_short(signs[:at] + wrong + signs[at + 1 :])


@given(shorts, st.integers(0, 7), st.integers(0, 7))
def test_two_signs_that_changed_places_are_found(short: str, first: int, second: int) -> None:
    signs = list(short.replace("-", ""))
    if signs[first] != signs[second]:
        signs[first], signs[second] = signs[second], signs[first]
        with pytest.raises(InvalidOption, match="mistyped"):
            parse_short("".join(signs))


@pytest.mark.parametrize("text", ["", "K7QF", "K7QF-2MXU", "K7QF-2MX\x1b", "äöüäöüäö", "K7QF-2MX9-1"])
def test_what_is_none_is_said(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_short(text)
