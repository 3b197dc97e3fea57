"""Bytes become characters as they complete, and no character commands the terminal."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.cli.views.console import decode, harmless, size
from edgellm.errors import InputNotText
from edgellm.spec.stream import Utf8


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)))
def test_pieces_give_the_same_text_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    decoder = Utf8()
    ends = [0, *sorted(cuts), len(data)]
    text = "".join(decoder.feed(data[a:b]) for a, b in pairwise(ends)) + decoder.end()
    assert text == data.decode("utf-8", "replace")


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    left = {c for c in harmless(text) if unicodedata.category(c) == "Cc"}
    assert left <= {"\n", "\t"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("safe\rEVIL", "safeEVIL"),
        ("\x9b2J\x7f\x00", "\ufffd2J␡␀"),
        ("\u202egnp.exe", "\ufffdgnp.exe"),
        ("tab\tand\nline é 漢 🙂", "tab\tand\nline é 漢 🙂"),
    ],
)
def test_what_would_command_a_terminal_is_shown_instead(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_input_that_is_not_text_says_where() -> None:
    with pytest.raises(InputNotText, match=r"notes\.txt is not UTF-8 text: byte 3 is 0xff.*iconv -f ISO-8859-1"):
        decode(b"abc\xff", "notes.txt")
    with pytest.raises(InputNotText, match="iconv -f UTF-16"):
        decode("hi".encode("utf-16"), "notes.txt")


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (7 * 10**9, "7.0 GB")]
)
def test_sizes_are_for_people(count: int, shown: str) -> None:
    assert size(count) == shown
