"""JSON that every reader takes: only numbers that JSON knows, and only texts that UTF-8 can hold."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_HALF_PAIR = re.compile("[\ud800-\udfff]")  # json joins whole surrogate pairs; what is left has no other half


def _number(text: str) -> float | str:
    """Return a number, or its text where it is too large for a finite float."""
    try:
        value = int(text) if text.lstrip("-").isdecimal() else float(text)
        return value if math.isfinite(value) else text
    except (ValueError, OverflowError):
        return text


_DECODER = json.JSONDecoder(parse_float=_number, parse_int=_number, parse_constant=str, strict=False)


def read_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the value at `at`, and its end. NaN and numbers beyond finite floats are read as texts, and texts may
    contain bare line breaks. Raise ValueError for a missing or incomplete value, and RecursionError for too deep
    nesting."""
    return _DECODER.raw_decode(text, at)


def write_json(value: object) -> str:
    """Return a value as JSON, with U+FFFD for each half of a surrogate pair. Raise ValueError for NaN and infinity."""
    return valid_text(json.dumps(value, ensure_ascii=False, allow_nan=False))


def valid_text(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair."""
    return _HALF_PAIR.sub("\ufffd", text)
