"""Stop sequences: texts before which a reply ends."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from edgellm.errors import EdgeError
from edgellm.spec.loop import Event
from edgellm.spec.stats import Stats
from edgellm.spec.types import Token


def until(stops: Sequence[str], events: Generator[Event, None, None], stats: Stats) -> Generator[Event, None, None]:
    """Yield the same events, up to where the first of `stops` is complete; nothing of that sequence is yielded.

    A token whose bytes may begin a stop sequence is held back until the bytes behind it are known. A sequence may begin
    and end within tokens: the bytes before it in a token are yielded as that token. `stats` records what ended the
    reply.
    """
    wanted = [(stop.encode(), stop) for stop in stops]
    held: list[Token] = []
    try:
        for event in events:
            if not isinstance(event, Token):
                yield event
                continue
            held.append(event)
            text = b"".join(token.piece for token in held)
            if (found := _first(wanted, text)) is not None:
                start, stop = found
                stats.cut(len(text) - start, stop)
                yield from _up_to(held, start)
                return
            while held and len(text) - len(held[0].piece) >= _open(wanted, text):
                text = text[len(held[0].piece) :]
                yield held.pop(0)
    except EdgeError:  # what has been written is not lost with the verifier
        yield from held
        raise
    finally:
        events.close()
    yield from held


def _first(wanted: Sequence[tuple[bytes, str]], text: bytes) -> tuple[int, str] | None:
    """Return where the sequence that is complete first begins, and which it is; of two that end together the longer
    one."""
    found = [(at + len(data), at, stop) for data, stop in wanted if (at := text.find(data)) >= 0]
    return min(found)[1:] if found else None


def _open(wanted: Sequence[tuple[bytes, str]], text: bytes) -> int:
    """Return how many bytes at the end of `text` may be the beginning of a sequence."""
    most = min(len(text), max(len(data) for data, _ in wanted) - 1)
    return next((n for n in range(most, 0, -1) if any(data.startswith(text[-n:]) for data, _ in wanted)), 0)


def _up_to(tokens: Sequence[Token], end: int) -> Generator[Token, None, None]:
    """Yield the tokens that hold the first `end` bytes; the last of them is cut."""
    for token in tokens:
        if end <= 0:
            return
        yield token if len(token.piece) <= end else replace(token, piece=token.piece[:end])
        end -= len(token.piece)
