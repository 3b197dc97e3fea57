"""Device IDs: typed by people, from other screens."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import InvalidOption
from edgellm.rpc.trust.device_id import ALPHABET, DeviceID, parse_short

ids = st.builds(DeviceID, st.binary(min_size=32, max_size=32))
LOOK_ALIKES = {"1": "1iIlL", "0": "0oO", "8": "8bB"}


@given(ids)
def test_what_is_written_can_be_read(device: DeviceID) -> None:
    assert DeviceID.parse(str(device)) == device
    assert parse_short(device.short) == device.short
    assert [len(group) for group in str(device).split("-")] == [7] * 8


@given(ids, st.data())
def test_case_grouping_and_look_alikes_do_not_matter(device: DeviceID, data: st.DataObject) -> None:
    for text, read in ((str(device), lambda typed: str(DeviceID.parse(typed))), (device.short, parse_short)):
        typed = "".join(
            data.draw(st.sampled_from(LOOK_ALIKES.get(sign, sign + sign.lower()))) for sign in text if sign != "-"
        )
        typed = typed[:5] + data.draw(st.sampled_from(["", " ", "-", " - "])) + typed[5:]
        assert read(typed) == text


@given(ids, st.data())
def test_any_single_wrong_sign_is_found(device: DeviceID, data: st.DataObject) -> None:
    for text, read in ((str(device), DeviceID.parse), (device.short, parse_short)):
        at = data.draw(st.sampled_from([index for index, sign in enumerate(text) if sign != "-"]))
        wrong = data.draw(st.sampled_from(ALPHABET.replace(text[at], "")))
        with pytest.raises(InvalidOption, match="mistyped"):
            read(text[:at] + wrong + text[at + 1 :])


@given(ids, st.data())
def test_two_signs_that_changed_places_are_found(device: DeviceID, data: st.DataObject) -> None:
    for text, read in ((str(device).replace("-", "")[:14], None), (device.short.replace("-", ""), parse_short)):
        first, second = sorted(data.draw(st.lists(st.integers(0, len(text) - 1), min_size=2, max_size=2, unique=True)))
        if text[first] == text[second]:
            continue
        swapped = text[:first] + text[second] + text[first + 1 : second] + text[first] + text[second + 1 :]
        with pytest.raises(InvalidOption, match="mistyped"):
            read(swapped) if read else DeviceID.parse(swapped + str(device).replace("-", "")[14:])


@given(st.text(max_size=80))
def test_anything_else_is_an_invalid_option(text: str) -> None:
    for read in (DeviceID.parse, parse_short):
        with suppress(InvalidOption):
            read(text)


@pytest.mark.parametrize("text", ["", "K7QF", "K7QF-2MXU", "äöü", "K7QF-2MX9-1"])
def test_what_is_none_is_said(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_short(text)
    with pytest.raises(InvalidOption):
        DeviceID.parse(text)


def test_every_text_means_another_device() -> None:
    """The last sign holds one bit only: the other four must not be free to choose."""
    text = str(DeviceID(bytes(32))).replace("-", "")
    head = text[:42]
    for sign in ALPHABET[1:16]:
        part = "0" * 12 + sign
        total = 0
        for one in part:
            total = (total ^ ALPHABET.index(one)) << 1
            total ^= 0b100101 if total & 32 else 0
        with pytest.raises(InvalidOption, match="last group"):
            DeviceID.parse(head + part + ALPHABET[total])
