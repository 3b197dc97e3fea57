"""Patterns as automata: they accept what a regular expression finds, and refuse what is not regular."""

from __future__ import annotations

import re
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine.grammar.automaton import complement, intersection, limited
from edgellm.engine.grammar.pattern import WRITABLE, automaton_of
from edgellm.errors import InvalidOption
from tests.engine.grammar.walks import walk

atoms = st.sampled_from(
    ["a", "b", "c", "-", r"\d", r"\w", r"\s", r"\.", "[ab]", "[^a]", "[a-c0-1]", r"[\d_]", r"\x41", "é"]
)
patterns = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"])).map(
            lambda parts: f"(?:{parts[0]}){parts[1]}"
        )
    ),
    max_leaves=6,
)
anchored = st.tuples(st.sampled_from(["", "^"]), patterns, st.sampled_from(["", "$"])).map("".join)


@given(pattern=anchored, text=st.text("abc-_01.A é\t", max_size=6))
@settings(max_examples=300, deadline=None)
def test_it_accepts_what_a_regular_expression_finds(pattern: str, text: str) -> None:
    assert automaton_of(pattern).accepts(text) == bool(re.search(pattern, text, re.ASCII))


@given(pattern=anchored, seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_its_texts_are_found_by_the_pattern(pattern: str, seed: int) -> None:
    text = walk(automaton_of(pattern), seed)
    assert text is None or "\n" in text or re.search(pattern, text)


@given(
    one=anchored,
    other=anchored,
    text=st.text("abc-_01.A é", max_size=6),
    ends=st.tuples(st.integers(0, 3), st.integers(3, 6)),
)
@settings(max_examples=150, deadline=None)
def test_automata_are_sets(one: str, other: str, text: str, ends: tuple[int, int]) -> None:
    first, second = automaton_of(one), automaton_of(other)
    assert intersection(first, second).accepts(text) == (first.accepts(text) and second.accepts(text))
    assert complement(first, WRITABLE).accepts(text) != first.accepts(text)
    assert limited(first, *ends).accepts(text) == (first.accepts(text) and ends[0] <= len(text) <= ends[1])


@pytest.mark.parametrize(
    ("pattern", "found", "not_found"),
    [
        (r"^(?=.*[A-Z])(?=.*\d).{8,}$", ["Passw0rds", "12345678A"], ["password1", "Pass1"]),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["3.14", "-.5", "007"], ["+", "", "3.1.4"]),  # pydantic's Decimal
        (r"^a|b$", ["ax", "xb"], ["xa", "bx"]),
        (r"(^x$)|y", ["x", "ayb"], ["xx"]),
        (r"^$", [""], ["a"]),
        (r"^\S+$", ["né"], ["a b", "a\u00a0b"]),
        (r"^\D+$", ["né"], ["1", "\u0661"]),
        (r"^[^\D]+$", ["12"], ["a"]),
        (r"^(?<year>\d{4})-(?P<month>\d\d)$", ["2024-12"], ["2024"]),
        (r"^a{b}$", ["a{b}"], ["a"]),
        (r"^[]$", [], ["", "a"]),
        (r"^[a\-\]]+$", ["a-]"], ["b"]),
        (r"^\u00e9\t\cJ$", ["é\t\n"], ["e"]),
        ("", ["", "anything"], []),
    ],
)  # fmt: skip
def test_what_clients_write(pattern: str, found: list[str], not_found: list[str]) -> None:
    automaton = automaton_of(pattern)
    assert [text for text in found if not automaton.accepts(text)] == []
    assert [text for text in not_found if automaton.accepts(text)] == []


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (r"(a)\1", r"back reference \\1"), (r"(?<n>a)\k<n>", r"back reference \\k"), ("a(?=b)", "look-ahead"),
        ("(?<=a)b", "look-behind"), ("(?<!a)b", "look-behind"), (r"\bword", "word boundary"), (r"\p{L}", "class of"),
        ("(?i)a", r"\(\?i"), ("a**", "repeated"), ("*a", "nothing to repeat"), ("(a", "too early"),
        ("a)", "not opened"), ("[z-a]", "before it begins"), ("a{3,1}", "no range"), ("[a", "too early"),
        (r"\y", "not known"), ("\\", "early"), ("(" * 60 + ")" * 60, "groups deep"), ("a{1,100000}", "too large"),
        ("((a{0,1000}){0,1000}){0,1000}", "too large"), ("(((){1000}){1000}){1000}", "too large"),
        ("^(a|b)*a(a|b){20}$", "states"), ("^(?=a)b|c", "one alternative"),
    ],
)  # fmt: skip
def test_what_is_not_regular_or_too_much_is_refused_by_name(pattern: str, named: str) -> None:
    began = process_time()
    with pytest.raises(InvalidOption, match=named):
        automaton_of(pattern)
    assert process_time() - began < 5.0
