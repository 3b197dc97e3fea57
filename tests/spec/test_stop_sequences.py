"""Stop sequences, however the text is cut into tokens."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import VerifierLost
from edgellm.spec.stats import Summary
from edgellm.spec.stream import cut_at_stops
from edgellm.spec.types import Event, Notice, Source, Token

LETTERS = "abé"


def events(pieces: Sequence[bytes], stats: Summary) -> Generator[Event, None, None]:
    for number, piece in enumerate(pieces):
        token = Token(number, piece, Source.DRAFT)
        stats.token(token)
        stats.show(token)
        yield token
    stats.finish_reason = "length"


def expected(text: bytes, stops: Sequence[str]) -> bytes:
    """Byte by byte: the text before the first sequence that is complete."""
    for end in range(1, len(text) + 1):
        found = [len(stop.encode()) for stop in stops if text[:end].endswith(stop.encode())]
        if found:
            return text[: end - max(found)]
    return text


@given(
    st.text(LETTERS, max_size=30),
    st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), max_size=60),
)
def test_the_reply_ends_before_the_first_sequence_that_is_complete(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    data, pieces, at = text.encode(), [], 0
    for length in lengths:
        pieces.append(data[at : at + length])
        at += length
    pieces.append(data[at:])
    stats = Summary()
    tokens = [event for event in cut_at_stops(stops, events(pieces, stats), stats) if isinstance(event, Token)]
    wanted = expected(data, stops)
    assert b"".join(token.piece for token in tokens) == wanted
    assert stats.text.encode() == wanted
    assert [token.id for token in tokens] == sorted(token.id for token in tokens)
    stopped = wanted != data
    assert stats.finish_reason == ("stop" if stopped else "length")
    assert (stats.stopped_by in stops) is stopped


def test_a_token_goes_out_as_soon_as_no_sequence_can_begin_in_it() -> None:
    stats = Summary()
    going = cut_at_stops(["END"], events([b"one", b" E", b"N", b"x", b"EN", b"D!", b"never"], stats), stats)
    seen = []
    for event in going:
        assert isinstance(event, Token)
        seen.append((event.piece, stats.tokens))
    assert seen == [(b"one", 1), (b" E", 4), (b"N", 4), (b"x", 4)]
    assert stats.tokens == 6  # the last one was never asked for
    assert stats.stopped_by == "END"


def test_what_is_held_back_is_not_lost_with_the_verifier() -> None:
    def cut(stats: Summary) -> Generator[Event, None, None]:
        yield from events([b"a", b"E"], stats)
        yield Notice("something")
        raise VerifierLost("It is gone.", "Start it again.")

    stats, heard = Summary(), []
    going = cut_at_stops(["END"], cut(stats), stats)

    def listen() -> None:
        for event in going:
            heard.append(event)  # noqa: PERF402  what came before the error counts

    with pytest.raises(VerifierLost):
        listen()
    assert [event.piece for event in heard if isinstance(event, Token)] == [b"a", b"E"]
    assert any(isinstance(event, Notice) for event in heard)


def test_the_reply_is_closed_with_what_reads_it() -> None:
    stats = Summary()
    reply = events([b"x", b"y"], stats)
    going = cut_at_stops(["END"], reply, stats)
    next(going)
    going.close()
    assert inspect.getgeneratorstate(reply) == inspect.GEN_CLOSED


@pytest.mark.parametrize(
    ("pieces", "source", "shown"),
    [
        ([b"At 8.", b"\n", b"user", b"\n", b"Where?"], Source.DRAFT, b"At 8."),
        ([b"At 8.\nus", b"er\nWhere?"], Source.PARALLEL, b"At 8."),
        ([b"At 8.\n\nuser\n"], Source.DRAFT, b"At 8.\n"),
        ([b"At 8.", b"\n", b"user", b"s"], Source.DRAFT, b"At 8.\nusers"),
        ([b"A user\n", b"x"], Source.DRAFT, b"A user\nx"),
        ([b"At 8.", b"\n", b"user", b"\n"], Source.ACCEPTED, b"At 8.\nuser\n"),
    ],
)
def test_what_is_not_verified_ends_where_another_turn_begins(pieces: list[bytes], source: Source, shown: bytes) -> None:
    stats = Summary()
    given = (replace(event, source=source) for event in events(pieces, stats) if isinstance(event, Token))
    tokens = [event for event in cut_at_stops((), given, stats, ["\nuser\n"]) if isinstance(event, Token)]
    assert b"".join(token.piece for token in tokens) == shown
    assert not stats.stopped_by
    assert stats.finish_reason == ("length" if shown == b"".join(pieces) else "stop")
