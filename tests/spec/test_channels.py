"""Thoughts and answer are told apart, whatever tokens the text comes in, and markup is never shown."""

from __future__ import annotations

import itertools
from collections.abc import Generator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine.chat.thinking import ThinkingMarkup, find_markup
from edgellm.errors import Stopped, VerifierLost
from edgellm.spec import loop
from edgellm.spec.protocols import GenerationLimits, GenerationState
from edgellm.spec.stream import ChannelSplitter, split_text
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
    (TAGS, False, "<think>\nhm\n</think>\n\nHi!", "hm", "Hi!"),
    (TAGS, False, "\n<think>hm</think>Hi", "hm", "Hi"),
    (TAGS, False, " Hi <think>no</think>", "", " Hi <think>no</think>"),
    (TAGS, False, "<thin", "", "<thin"),
    (TAGS, False, "<think></think>\n\nHi", "", "Hi"),
    (TAGS, False, "<think>hm < /think> </thin", "hm < /think> </thin", ""),
    (TAGS, True, "hm\n\n</think>\n\nHi </think>!", "hm", "Hi </think>!"),
    (TAGS, True, "<think>\nhm</think>Hi", "hm", "Hi"),
    (TAGS, True, "</think>Hi", "", "Hi"),
    (TAGS, True, "only a thought", "only a thought", ""),
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
def test_the_channels_do_not_depend_on_the_tokens(
    case: tuple[ThinkingMarkup, bool, str, str, str], ends: list[int]
) -> None:
    markup, opened, text, thought, answer = case
    tokens = cut(text.encode(), ends)
    out = split(ChannelSplitter(markup, opened=opened), tokens)
    assert texts(out) == (thought, answer)
    numbers = [token.id for token in out]
    assert numbers == sorted(numbers)
    assert {*numbers} == {token.id for token in tokens}
    assert len(numbers) - len({*numbers}) <= 1  # a token that ends the thought and begins the answer


@given(text=st.text(alphabet="<>/think ü\n", max_size=40), ends=st.lists(st.integers(0, 60)), opened=st.booleans())
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
        [(b"a", "thinking")],
        [(b" b", "thinking")],
        [],
        [(b"<", "thinking"), (b"c", "thinking")],
        [],
        [(b"", "thinking"), (b"", "thinking")],
        [(b"", "answer")],
        [(b"d", "answer")],
    ]


def test_control_tokens_are_markup_too() -> None:
    control = {7: "<think>", 8: "</think>", 9: "<|other|>"}
    tokens = [
        Token(number, piece, Source.VERIFIER)
        for number, piece in [(7, b""), (1, b"hm"), (9, b""), (8, b""), (2, b"Hi")]
    ]
    splitter = ChannelSplitter(TAGS, control_text=lambda token: control[token].encode())
    out = split(splitter, tokens)
    assert [(t.id, t.piece, t.channel.value) for t in out] == [
        (7, b"", "thinking"), (1, b"hm", "thinking"), (9, b"", "thinking"), (8, b"", "thinking"), (2, b"Hi", "answer"),
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
