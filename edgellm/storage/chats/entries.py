"""A past question and its reply, and the line of JSON that holds them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime

_FRAME = 128  # bytes, more than a line needs besides its two texts
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """A question, its reply, and `when` they were added: UTC, to the second."""

    question: str
    reply: str
    when: datetime


def to_line(question: str, reply: str, most_bytes: int) -> bytes:
    """Return a line, its end included, of at most `most_bytes`: a text longer than half of that is cut at its end.

    A lone surrogate, which is no character, becomes U+FFFD.
    """
    room = (most_bytes - _FRAME) // 2
    said = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "question": _beginning(_characters(question), room),
        "reply": _beginning(_characters(reply), room),
    }
    return json.dumps(said, ensure_ascii=False).encode() + b"\n"


def from_line(line: bytes) -> ChatEntry | None:
    """Return the entry that a line holds; None where the line is damaged."""
    try:
        said = json.loads(line.decode())
        when = datetime.fromisoformat(said["when"])
        if when.tzinfo is None:
            return None
        return ChatEntry(_characters(said["question"]), _characters(said["reply"]), when.astimezone(UTC))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


def _beginning(text: str, room: int) -> str:
    """Return the beginning of `text` that fits `room` bytes as JSON, where line ends and the like are longer."""
    while (size := len(json.dumps(text, ensure_ascii=False).encode())) > room:
        text = text[: len(text) * room // size]
    return text


def _characters(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)
