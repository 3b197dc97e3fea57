"""A past question and its reply, and the line of JSON that holds them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime

_FRAME = 128  # bytes, more than what a line holds beside its two texts
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """A question and its reply. `when` it was added: UTC, to the second."""

    question: str
    reply: str
    when: datetime


def to_line(question: str, reply: str, most_bytes: int) -> bytes:
    """A line, its end included, of at most `most_bytes`: of a text longer than half of that the beginning is kept.

    What is no character (a lone surrogate) becomes U+FFFD.
    """
    room = (most_bytes - _FRAME) // 2
    said = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "question": _beginning(_characters(question), room),
        "reply": _beginning(_characters(reply), room),
    }
    return json.dumps(said, ensure_ascii=False).encode() + b"\n"


def from_line(line: bytes) -> ChatEntry | None:
    """What a line holds; None where it is damaged."""
    try:
        said = json.loads(line.decode())
        when = datetime.fromisoformat(said["when"])
        if when.tzinfo is None:
            return None
        return ChatEntry(_characters(said["question"]), _characters(said["reply"]), when.astimezone(UTC))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


def _beginning(text: str, room: int) -> str:
    """As much of `text` as takes `room` bytes in JSON; line ends and the like take more there than in memory."""
    while (size := len(json.dumps(text, ensure_ascii=False).encode())) > room:
        text = text[: len(text) * room // size]
    return text


def _characters(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)
