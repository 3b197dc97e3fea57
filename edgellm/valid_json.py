"""JSON that every reader takes: only numbers that JSON knows, and only texts that UTF-8 can hold."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_HALF_PAIR = re.compile("[\ud800-\udfff]")  # json joins whole surrogate pairs; what is left has no other half


def _number(text: str) -> float | str:
    """Return a number; the text itself of one that is beyond the numbers which all readers have."""
    try:
        value = int(text) if text.lstrip("-").isdecimal() else float(text)
        return value if math.isfinite(value) else text
    except (ValueError, OverflowError):
        return text


_DECODER = json.JSONDecoder(parse_float=_number, parse_int=_number, parse_constant=str, strict=False)


def read_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the value that stands at `at`, and where it ends. NaN, and numbers that not all readers have, are read as
    texts, and line breaks may stand in texts as they are. Raise ValueError where there is no value, or not all of it,
    and RecursionError where it is nested too deep."""
    return _DECODER.raw_decode(text, at)


def write_json(value: object) -> str:
    """Return a value as JSON, with U+FFFD for each half of a surrogate pair. Raise ValueError for NaN and infinity."""
    return valid_text(json.dumps(value, ensure_ascii=False, allow_nan=False))


def valid_text(text: str) -> str:
    """Return a text with U+FFFD for each half of a surrogate pair."""
    return _HALF_PAIR.sub("\ufffd", text)
