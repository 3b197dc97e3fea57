"""Thoughts and answer are told apart, whatever tokens the text comes in, and markup is never shown."""

import inspect
import itertools
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine.chat.prompt import ThinkingMarkup, find_markup
from edgellm.errors import Stopped, VerifierLost
from edgellm.spec import loop
from edgellm.spec.protocols import GenerationLimits, GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.stream import ChannelSplitter, cut_at_stops, split_text
from edgellm.spec.types import Channel, Event, Notice, Source, Token
from tests.spec.fakes import FakeVerifier
from tests.spec.running import going

TAGS = ThinkingMarkup("<think>", "</think>")
WRAPPED = ThinkingMarkup("<think>", "</think>", ("<response>", "</response>"))
HARMONY = find_markup("<|channel|>analysis<|message|>", lambda _: False)
assert HARMONY is not None
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"


def cut(text: bytes, ends: list[int]) -> list[Token]:
    places = sorted({0, len(text), *(end % (len(text) + 1) for end in ends)})
    return [Token(i, text[a:b], Source.VERIFIER) for i, (a, b) in enumerate(itertools.pairwise(places))]


def split(splitter: ChannelSplitter, tokens: list[Token]) -> list[Token]:
    out = [one for token in tokens for one in splitter.feed(token)]
    return [*out, *splitter.end()]


def texts(tokens: list[Token]) -> tuple[str, str]:
    thought, answer = (
        b"".join(token.piece for token in tokens if token.channel is channel).decode() for channel in Channel
    )
    return thought.rstrip(), answer


CASES = [
    (TAGS, False, "\n<think>hm\n</think>\n\nHi!", "hm", "Hi!"),
    (TAGS, True, "<think>\nhm</think>Hi", "hm", "Hi"),
    (WRAPPED, False, "<think>hm</think><response>Hi\n</response>", "hm", "Hi\n"),
    (HARMONY, False, f"{CHANNEL}analysis{MESSAGE}hm{END}{START}assistant{CHANNEL}final{MESSAGE}Hi!", "hm", "Hi!"),
    (HARMONY, False, f"{CHANNEL}final{MESSAGE}Hi!", "", "Hi!"),
    (HARMONY, False, "Hi!", "", "Hi!"),
    (
        HARMONY, False,
        (f"{CHANNEL}analysis{MESSAGE}a{END}{START}assistant{CHANNEL}commentary to=functions.x <|constrain|>json"
        f"{MESSAGE}{{}}{END}{START}assistant{CHANNEL}final <|constrain|>json{MESSAGE}1"),
        "a{}", "1",
    ),
    (HARMONY, False, f"{CHANNEL}analysis{MESSAGE}ünï{END}{START}assistant{MESSAGE}ö", "ünï", "ö"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[2][:40])
@settings(max_examples=25)
@given(ends=st.lists(st.integers(0, 200)))
def test_channels_do_not_depend_on_tokens(case: tuple[ThinkingMarkup, bool, str, str, str], ends: list[int]) -> None:
    markup, opened, text, thought, answer = case
    tokens = cut(text.encode(), ends)
    out = split(ChannelSplitter(markup, opened=opened), tokens)
    assert texts(out) == (thought, answer)
    numbers = [token.id for token in out]
    assert numbers == sorted(numbers)
    assert {*numbers} == {token.id for token in tokens}
    assert len(numbers) - len({*numbers}) <= 1  # a token that ends the thought and begins the answer


PARTS = ("<think>", "</think>", "<thin", "</", "< /think>", "hm", "ü", " ", "\n")
marked = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@given(text=marked, ends=st.lists(st.integers(0, 60)), opened=st.booleans())
def test_no_answer_is_lost_and_none_invented(text: str, ends: list[int], opened: bool) -> None:
    """By a plain reading of the whole text."""
    out = split(ChannelSplitter(TAGS, opened=opened), cut(text.encode(), ends))
    body, thinks = text.lstrip(), opened
    if body.startswith("<think>"):
        body, thinks = body.removeprefix("<think>"), True
    if not thinks:
        assert texts(out) == ("", text)
        return
    thought, _, answer = body.partition("</think>")
    assert texts(out) == (thought.strip(), answer.lstrip())


def test_text_is_shown_as_soon_as_it_cannot_be_markup() -> None:
    splitter = ChannelSplitter(TAGS, opened=True)
    shown = [
        [(t.piece, t.channel.value) for t in splitter.feed(token)]
        for token in cut(b"a b<c</think> d", [1, 3, 4, 5, 7, 13, 14])
    ]
    assert shown == [
        [(b"a", "thinking")], [(b" b", "thinking")], [], [(b"<", "thinking"), (b"c", "thinking")], [],
        [(b"", "thinking"), (b"", "thinking")], [(b"", "answer")], [(b"d", "answer")],
    ]  # fmt: skip


def test_the_channel_is_known_when_its_markup_is_complete() -> None:
    splitter = ChannelSplitter(TAGS)
    channels = []
    for token in cut(b"<think>a</think>b", [3, 7, 8, 12, 16]):
        list(splitter.feed(token))
        channels.append(splitter.channel.value)
    assert channels == ["answer", "thinking", "thinking", "thinking", "answer", "answer"]
    assert ChannelSplitter(TAGS, opened=True).channel is Channel.THINKING


def test_without_markup_every_token_is_the_answer_as_it_is() -> None:
    tokens = cut(b" <think>x</think> ", [3, 9])
    assert split(ChannelSplitter(), tokens) == tokens


@pytest.mark.parametrize(
    ("markup", "text", "parts"),
    [
        (TAGS, "Hi", ("", "Hi")),
        (TAGS, "hm</think>\n\nHi", ("hm", "Hi")),
        (TAGS, "<think>\nhm\n</think>\n\nHi", ("hm", "Hi")),
        (TAGS, "Between <think> and </think>.", ("", "Between <think> and </think>.")),
        (HARMONY, f"{CHANNEL}analysis{MESSAGE}hm{END}{START}assistant{CHANNEL}final{MESSAGE}Hi", ("hm", "Hi")),
        (HARMONY, f"{CHANNEL}analysis{MESSAGE}only this", ("only this", "")),
    ],
)
def test_a_whole_text_is_split_as_a_stream_is(markup: ThinkingMarkup, text: str, parts: tuple[str, str]) -> None:
    assert split_text(markup, text) == parts


@pytest.mark.parametrize(("error", "shown"), [(Stopped(), []), (VerifierLost("Gone.", "Wait."), [b"<th"])])
def test_what_is_held_back_is_shown_when_the_verifier_is_lost_and_not_when_the_reply_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, error: Exception, shown: list[bytes]
) -> None:
    def rounds(*_: object, **__: object) -> Generator[Event, None, None]:
        yield Token(1, b"<th", Source.VERIFIER)
        raise error

    monkeypatch.setattr(loop, "_rounds", rounds)
    events = going(GenerationState(), None, None, channels=ChannelSplitter(TAGS))
    seen: list[bytes] = []
    with pytest.raises(type(error)):
        seen.extend(event.piece for event in events if isinstance(event, Token))
    assert seen == shown


def test_a_full_context_is_told_within_a_thought() -> None:
    state = GenerationState(np.arange(3, dtype=np.int32), limits=GenerationLimits(1, 5), channel=Channel.THINKING)
    verifier = FakeVerifier(lambda _: np.array([0, 1], dtype=np.float32))
    *tokens, notice = going(state, None, verifier, channels=ChannelSplitter(TAGS, opened=True))
    assert [token.channel for token in tokens if isinstance(token, Token)] == [Channel.THINKING] * 2
    assert isinstance(notice, Notice)
    assert "context of 5 tokens is full" in notice.text


# --- stop sequences ---------------------------------------------------------------------------------------------------


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
def test_the_reply_ends_before_the_first_complete_sequence(text: str, stops: list[str], lengths: list[int]) -> None:
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

    stats, heard = Summary(), list[Event]()
    with pytest.raises(VerifierLost):
        heard.extend(cut_at_stops(["END"], cut(stats), stats))
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
