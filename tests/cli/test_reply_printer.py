"""A reply on its way to the screen, with a scripted model behind it."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.cli.views.console import SOURCES
from edgellm.cli.views.reply_printer import Display, print_reply
from edgellm.engine import Context, ContextSpec, Model
from edgellm.spec.loop import Event
from edgellm.spec.stats import Summary
from edgellm.spec.stream import Reply
from edgellm.spec.types import Channel, Explanation, Notice, Source, Token


def scripted(events: Sequence[Event | BaseException]) -> Reply:
    """A reply that consists of `events`; an exception among them is raised."""

    def write(stats: Summary, explain: bool, stopped: object, *_: object) -> Generator[Event, None, None]:
        for event in events:
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Token):
                stats.token(event)
                stats.show(event)
            yield event
        stats.finish_reason = "stop"

    return Reply(write, prompt_tokens=3, seed=0)


def tokens(*pieces: bytes, source: Source = Source.ACCEPTED) -> list[Token]:
    return [Token(number, piece, source, 0.5, round=number) for number, piece in enumerate(pieces)]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_every_source_has_a_colour_and_a_meaning() -> None:
    assert set(SOURCES) == set(Source)


def test_the_answer_alone_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    reply = scripted([*tokens(b"Hel", b"lo"), Notice("The verifier is gone."), *tokens(b"!", source=Source.DRAFT)])
    print_reply(reply, Display())
    shown = capsys.readouterr()
    assert shown.out == "Hello\n!\n"
    assert "The verifier is gone." in shown.err
    assert shown.err.endswith("3 tokens · not verified\n")
    assert "■" not in shown.err
    assert "\x1b" not in shown.out + shown.err


THOUGHT = [
    Token(1, b"", Source.VERIFIER, channel=Channel.THINKING),
    Token(2, b"hm", Source.VERIFIER, channel=Channel.THINKING),
    Token(3, b"", Source.VERIFIER, channel=Channel.THINKING),
    Token(4, b"Hi", Source.VERIFIER),
]


def test_a_thought_is_no_part_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_reply(scripted(THOUGHT), Display(stats=True))
    shown = capsys.readouterr()
    assert shown.out == "Hi\n"
    assert "hm" not in shown.err
    assert "thought for 0 s, 3 tokens\n" in shown.err
    assert "4 tokens · 3 of them thought" in shown.err


def test_a_thought_is_dim_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for events, after in ((THOUGHT, "Hi"), (THOUGHT[:2], "")):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        print_reply(scripted(events), Display())
        shown = terminal.getvalue()
        assert "\x1b[2mhm\x1b[0m\n" in shown
        assert shown.index("hm") < shown.index("thought for") < shown.index(after or "tokens")


def test_json_has_the_channel_of_each_token(capsys: pytest.CaptureFixture[str]) -> None:
    events = [*THOUGHT[:2], Token(5, b"\xc3", Source.VERIFIER, channel=Channel.THINKING), THOUGHT[3]]
    print_reply(scripted(events), Display(as_json=True))
    *rows, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [(row["channel"], row["text"]) for row in rows] == [
        ("thinking", ""), ("thinking", "hm"), ("thinking", "\ufffd"), ("answer", "Hi"),
    ]  # fmt: skip
    assert (last["summary"]["thinking"], last["summary"]["text"]) == ("hm\ufffd", "Hi")
    assert last["summary"]["thinking_tokens"] == 3


def test_a_model_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil: list[Event | BaseException] = [
        *tokens(b"\x1b", b"]52;c;aGk=\x07", b"\x9b"),
        Notice("\x1b[2J"),
        Explanation(0, "\x1b[2J"),
    ]
    print_reply(scripted(evil), Display(explain=True, stats=True))
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "\x07" not in shown.out


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.binary(max_size=5), max_size=8))
def test_json_texts_joined_are_the_reply(capsys: pytest.CaptureFixture[str], pieces: list[bytes]) -> None:
    capsys.readouterr()
    print_reply(scripted(tokens(*pieces)), Display(as_json=True))
    *rows, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert len(rows) == len(pieces)
    assert (
        "".join(row["text"] for row in rows) == last["summary"]["text"] == b"".join(pieces).decode("utf-8", "replace")
    )


def test_reasons_are_told_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for explain in (True, False):
        print_reply(scripted([Explanation(4, "drafted 3")]), Display(explain=explain))
        assert ("round 4: drafted 3" in capsys.readouterr().err) == explain


@pytest.mark.parametrize(
    ("sources", "shown"),
    [
        (
            (Source.DRAFT, Source.ACCEPTED, Source.ACCEPTED, Source.ACCEPTED),
            "75% verified (50% of the thought, 100% of",
        ),
        ((Source.ACCEPTED,) * 4, "all verified"),
        ((Source.DRAFT,) * 4, " · 0% verified"),
    ],
)
def test_verified_shares_of_thought_and_answer_are_told_where_they_may_differ(
    capsys: pytest.CaptureFixture[str], sources: tuple[Source, ...], shown: str
) -> None:
    def write(stats: Summary, *_: object) -> Generator[Event, None, None]:
        stats.passes = 2
        for number, source in enumerate(sources):
            token = Token(number, b"a", source, channel=Channel.THINKING if number < 2 else Channel.ANSWER)
            stats.token(token)
            stats.show(token)
            yield token
        stats.finish("stop")

    print_reply(Reply(write, prompt_tokens=3, seed=0), Display(stats=True))
    said = capsys.readouterr().err
    assert shown in said
    assert "of the thought verified" in said


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, Terminal]:
    """stdout and stderr, which are terminals now."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colours_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    out, err = at_terminal(monkeypatch)
    print_reply(scripted(tokens(b"a")), Display(stats=True, colours=True))
    assert "\x1b" not in out.getvalue() + err.getvalue()


def test_markdown_is_rendered_for_a_person_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = b"# Big\n\nSome **bold** `code`.\n"
    print_reply(scripted(tokens(text)), Display())
    assert capsys.readouterr().out == text.decode()
    out, _ = at_terminal(monkeypatch)
    print_reply(scripted(tokens(text)), Display())
    assert "\x1b[1mbold\x1b[0m" in out.getvalue()
    assert "**" not in out.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    out, _ = at_terminal(monkeypatch)
    print_reply(scripted(tokens(text)), Display())
    assert out.getvalue() == text.decode()


def test_a_quiet_reply_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    print_reply(scripted(tokens(b"a")), Display(quiet=True))
    assert capsys.readouterr() == ("a\n", "")


def test_ctrl_c_stops_the_reply_and_leaves_the_handler_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    def write(stats: Summary, explain: bool, stopped: object, *_: object) -> Generator[Event, None, None]:
        for token in tokens(*[b"x"] * 10):
            if token.id == 3:
                os.kill(os.getpid(), signal.SIGINT)
            if stopped():  # type: ignore[operator]
                return
            stats.token(token)
            stats.show(token)
            yield token

    before = signal.getsignal(signal.SIGINT)
    summary = print_reply(Reply(write, prompt_tokens=1, seed=0), Display())
    assert summary.finish_reason == "cancelled"
    assert capsys.readouterr().out == "xxx\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_is_heard_while_llama_cpp_computes(verifier_model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's own handler, which has to wait until it is out of there, does nothing here."""
    passes = 0

    def write(stats: Summary, explain: bool, stopped: Callable[[], bool], *_: object) -> Generator[Event, None, None]:
        nonlocal passes
        signal.signal(signal.SIGINT, lambda *_: None)
        with Context(verifier_model, ContextSpec(n_ctx=1024, n_batch=1024, threads=1)) as context:
            context.set_cancel(stopped)
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
            while passes < 10:
                passes += 1
                context.clear()
                context.decode(np.ones(1024, dtype=np.int32))
        yield from ()

    summary = print_reply(Reply(write, prompt_tokens=1, seed=0), Display())
    assert summary.finish_reason == "cancelled"
    assert passes < 10


def test_a_second_ctrl_c_gets_through(capsys: pytest.CaptureFixture[str]) -> None:
    def write(stats: Summary, explain: bool, stopped: object, *_: object) -> Generator[Event, None, None]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        yield from tokens(b"x")

    with pytest.raises(KeyboardInterrupt):
        print_reply(Reply(write, prompt_tokens=1, seed=0), Display())


def test_an_error_in_the_middle_ends_the_line_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        print_reply(scripted([*tokens(b"Hel"), RuntimeError("x")]), Display())
    assert capsys.readouterr().out == "Hel\n"
