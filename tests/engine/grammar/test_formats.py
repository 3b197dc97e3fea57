"""Formats as patterns: what is valid is found by them, and what is not valid is not."""

from __future__ import annotations

import re

import pytest

from edgellm.engine.grammar.formats import FORMATS


@pytest.mark.parametrize(
    ("name", "valid", "not_valid"),
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"],
         ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "0000-01-01"]),
        ("time", ["12:30:00Z", "23:59:59.5+02:00"], ["24:00:00Z", "12:30:00", "12:60:00Z"]),
        ("date-time", ["2024-02-29T08:00:00Z"], ["2024-02-29 08:00", "2024-02-30T08:00:00Z"]),
        ("duration", ["PT5M", "P1DT2H", "P3W"], ["P", "PT", "5 minutes"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "123e4567e89b12d3a456426614174000"]),
        ("uuid4", ["123e4567-e89b-42d3-a456-426614174000"], ["123e4567-e89b-12d3-a456-426614174000"]),
        ("email", ["ada@example.org", "a.b+c@mail.example.co"], ["ada", "a@b", "a..b@example.org"]),
        ("ipv4", ["192.168.0.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
        ("ipv6", ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1:2:3", ":::", "1::2::3", "g::"]),
        ("uri", ["https://example.org/a?b=c#d", "http://10.0.0.1:21/x%20y"],
         ["ftp://10.0.0.1", "example.org", "https://", "a b://c.de"]),
        ("hostname", ["a-b.example.org"], ["-a.org", "a_b.org"]),
    ],
)  # fmt: skip
def test_what_a_format_is(name: str, valid: list[str], not_valid: list[str]) -> None:
    assert [text for text in valid if not re.search(FORMATS[name], text)] == []
    assert [text for text in not_valid if re.search(FORMATS[name], text)] == []
