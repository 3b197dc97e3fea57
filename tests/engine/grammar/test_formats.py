"""Formats as patterns: their texts are valid for a validator and for pydantic, and what is not valid is refused."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

import jsonschema_rs
import pytest
from pydantic import UUID4, AnyUrl, Base64Bytes, Base64UrlBytes, IPvAnyAddress, TypeAdapter

from edgellm.engine.grammar.formats import FORMATS
from edgellm.engine.grammar.pattern import automaton_of
from tests.engine.grammar.walks import walk

READ_AS: dict[str, Any] = {
    "date": date, "time": time, "date-time": datetime, "duration": timedelta, "uuid": UUID, "uuid4": UUID4,
    "ipv4": IPv4Address, "ipv6": IPv6Address, "ipvanyaddress": IPvAnyAddress, "uri": AnyUrl, "base64": Base64Bytes,
    "base64url": Base64UrlBytes,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_a_format_are_valid(name: str) -> None:
    schema = jsonschema_rs.validator_for({"type": "string", "format": name}, validate_formats=True)
    automaton = automaton_of(FORMATS[name])
    texts = [text for seed in range(60) if (text := walk(automaton, seed)) is not None]
    assert len(texts) > 30
    for text in texts:
        assert schema.is_valid(text), text
        if name in READ_AS:
            TypeAdapter(READ_AS[name]).validate_json(json.dumps(text))


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
    automaton = automaton_of(FORMATS[name])
    assert [text for text in valid if not automaton.accepts(text)] == []
    assert [text for text in not_valid if automaton.accepts(text)] == []
