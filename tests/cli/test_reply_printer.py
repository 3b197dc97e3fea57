"""A reply on its way to the screen, with a scripted model behind it; text that commands no terminal; and progress."""

import io
import json
import os
import signal
import sys
import threading
import unicodedata
from collections.abc import Callable, Generator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.cli.views import progress
from edgellm.cli.views.console import STYLES, harmless
from edgellm.cli.views.progress import ProgressBar, PromptBar
from edgellm.cli.views.reply_printer import Display, print_reply
from edgellm.engine import Context, ContextSpec, Model
from edgellm.spec.stats import Summary
from edgellm.spec.stream import Reply
from edgellm.spec.types import Channel, Event, Explanation, Notice, PromptProgress, Source, Token
from tests.http.test_streaming import scripted as reply_of

Written = Generator[Event, None, None]
Capture = pytest.CaptureFixture[str]


def scripted(
    events: Sequence[Event | BaseException | Callable[[], None]], stopped_early: bool = False, **figures: int
) -> Reply:
    """A reply that consists of `events`; an exception among them is raised, a function called."""

    def script(stats: Summary, stopped: Callable[[], bool]) -> Written:
        for name, figure in figures.items():
            setattr(stats, name, figure)
        for event in events:
            if isinstance(event, BaseException):
                raise event
            if callable(event):
                event()
                continue
            if stopped_early and stopped():
                return
            yield event
        stats.finish("stop")

    return reply_of(script)


def tokens(*pieces: bytes, source: Source = Source.ACCEPTED) -> list[Token]:
    return [Token(number, piece, source, 0.5, round=number) for number, piece in enumerate(pieces)]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, Terminal]:
    """stdout and stderr, which are terminals now."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


def test_the_answer_alone_goes_to_stdout(capsys: Capture) -> None:
    assert set(STYLES) == set(Source)
    reply = scripted([*tokens(b"Hel", b"lo"), Notice("The verifier is gone."), *tokens(b"!", source=Source.DRAFT)])
    print_reply(reply, Display())
    shown = capsys.readouterr()
    assert shown.out == "Hello\n!\n"
    assert "The verifier is gone." in shown.err
    assert shown.err.endswith("3 tokens · not verified\n")
    assert "■" not in shown.err
    assert "\x1b" not in shown.out + shown.err
    print_reply(scripted(tokens(b"a")), Display(quiet=True))
    assert capsys.readouterr() == ("a\n", "")
    print_reply(scripted(tokens(b"a", source=Source.VERIFIER), passes=1), Display())
    assert "verified" not in capsys.readouterr().err, "a model that is alone"
    for explain in (True, False):
        print_reply(scripted([Explanation(4, "drafted 3")]), Display(explain=explain))
        assert ("round 4: drafted 3" in capsys.readouterr().err) == explain
    with pytest.raises(RuntimeError):
        print_reply(scripted([*tokens(b"Hel"), RuntimeError("x")]), Display())
    assert capsys.readouterr().out == "Hel\n", "an error ends the line first"


THOUGHT = [
    Token(1, b"", Source.VERIFIER, channel=Channel.THINKING),
    Token(2, b"hm", Source.VERIFIER, channel=Channel.THINKING),
    Token(3, b"", Source.VERIFIER, channel=Channel.THINKING),
    Token(4, b"Hi", Source.VERIFIER),
]


def test_a_thought_is_no_part_of_stdout(capsys: Capture) -> None:
    print_reply(scripted(THOUGHT), Display(stats=True))
    shown = capsys.readouterr()
    assert shown.out == "Hi\n"
    assert "hm" not in shown.err
    assert "thought for 0 s, 3 tokens\n" in shown.err
    assert "4 tokens · 3 of them thought" in shown.err


def test_a_narrow_terminal_shows_each_figure_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, _ = at_terminal(monkeypatch)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    print_reply(scripted(THOUGHT), Display(stats=True))
    assert terminal.getvalue().count("\n") < 40


def test_a_thought_is_dim_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for events, after in ((THOUGHT, "Hi"), (THOUGHT[:2], "")):
        terminal, _ = at_terminal(monkeypatch)
        monkeypatch.setattr(sys, "stderr", terminal)
        print_reply(scripted(events), Display())
        shown = terminal.getvalue()
        assert "\x1b[2mhm\x1b[0m\n" in shown
        assert shown.index("hm") < shown.index("thought for") < shown.index(after or "tokens")


def in_json(capsys: Capture, reply: Reply) -> tuple[list[tuple[str, str]], dict[str, object]]:
    """Return the channel and the text of each token of a reply in JSON, and its summary."""
    capsys.readouterr()
    print_reply(reply, Display(as_json=True))
    *rows, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    return [(row["channel"], row["text"]) for row in rows], last["summary"]


def test_json_has_the_channel_of_each_token(capsys: Capture) -> None:
    events = [*THOUGHT[:2], Token(5, b"\xc3", Source.VERIFIER, channel=Channel.THINKING), THOUGHT[3]]
    rows, summary = in_json(capsys, scripted(events))
    assert rows == [("thinking", ""), ("thinking", "hm"), ("thinking", "\ufffd"), ("answer", "Hi")]
    assert (summary["thinking"], summary["text"], summary["thinking_tokens"]) == ("hm\ufffd", "Hi", 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.binary(max_size=5), max_size=8))
def test_json_texts_joined_are_the_reply(capsys: Capture, pieces: list[bytes]) -> None:
    rows, summary = in_json(capsys, scripted(tokens(*pieces)))
    assert len(rows) == len(pieces)
    assert "".join(text for _, text in rows) == summary["text"] == b"".join(pieces).decode("utf-8", "replace")


def test_a_model_cannot_command_the_terminal(capsys: Capture) -> None:
    evil: list[Event] = [*tokens(b"\x1b", b"]52;c;aGk=\x07", b"\x9b"), Notice("\x1b[2J"), Explanation(0, "\x1b[2J")]
    print_reply(scripted(evil), Display(explain=True, stats=True))
    shown = capsys.readouterr()
    assert not {"\x1b", "\x07"} & {*shown.out, *shown.err}


@pytest.mark.parametrize(
    ("sources", "shown"),
    [
        ((Source.DRAFT, *(Source.ACCEPTED,) * 3), "75% verified (50% of the thought, 100% of"),
        ((Source.ACCEPTED,) * 4, "all verified"),
        ((Source.DRAFT,) * 4, " · 0% verified"),
    ],
)
def test_verified_shares_of_thought_and_answer_are_told_where_they_may_differ(
    capsys: Capture, sources: tuple[Source, ...], shown: str
) -> None:
    channels = (Channel.THINKING,) * 2 + (Channel.ANSWER,) * 2
    written = [Token(1, b"a", source, channel=channel) for source, channel in zip(sources, channels, strict=True)]
    verdicts = sources.count(Source.ACCEPTED)
    print_reply(scripted(written, passes=2, verdicts_on_drafts=verdicts), Display(stats=True))
    said = capsys.readouterr().err
    assert shown in said
    assert "of the thought verified" in said


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colours_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    out, err = at_terminal(monkeypatch)
    print_reply(scripted(tokens(b"a")), Display(stats=True, colours=True))
    assert "\x1b" not in out.getvalue() + err.getvalue()


def test_markdown_is_rendered_for_a_person_alone(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
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


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_the_reply_and_leaves_the_handler_as_it_was(capsys: Capture) -> None:
    before = signal.getsignal(signal.SIGINT)
    reply = scripted([*tokens(*[b"x"] * 3), press, *tokens(*[b"x"] * 7)], stopped_early=True)
    assert print_reply(reply, Display()).finish_reason == "cancelled"
    assert capsys.readouterr().out == "xxx\n"
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):  # a second one gets through
        print_reply(scripted([press, press, *tokens(b"x")]), Display())


def test_ctrl_c_is_heard_while_llama_cpp_computes(verifier_model: Model, capsys: Capture) -> None:
    """Python's own handler, which has to wait until it is out of there, does nothing here."""
    passes = 0

    def write(stats: Summary, explain: bool, stopped: Callable[[], bool], *_: object) -> Written:
        nonlocal passes
        signal.signal(signal.SIGINT, lambda *_: None)
        with Context(verifier_model, ContextSpec(n_ctx=1024, n_batch=1024, threads=1)) as context:
            context.set_cancel(stopped)
            threading.Timer(0.01, press).start()
            while passes < 10:
                passes += 1
                context.clear()
                context.decode(np.ones(1024, dtype=np.int32))
        yield from ()

    summary = print_reply(Reply(write, prompt_tokens=1, seed=0), Display())
    assert summary.finish_reason == "cancelled"
    assert passes < 10


# --- text ---------------------------------------------------------------------------------------------------------


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert {c for c in harmless(text) if unicodedata.category(c) == "Cc"} <= {"\n", "\t"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("safe\rEVIL", "safeEVIL"),
        ("\x9b2J\x7f\x00", "\ufffd2J␡␀"),
        ("\u202egnp.exe", "\ufffdgnp.exe"),
        ("tab\tand\nline é 漢 🙂", "tab\tand\nline é 漢 🙂"),
    ],
)
def test_a_command_to_a_terminal_is_shown_instead(text: str, shown: str) -> None:
    assert harmless(text) == shown


# --- progress ------------------------------------------------------------------------------------------------------


class Watched(Terminal):
    """A terminal; `shown` is set once it shows `wanted`."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self.wanted, self.shown = wanted, threading.Event()

    def write(self, text: str) -> int:
        if self.wanted in text:
            self.shown.set()
        return super().write(text)


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(progress, "time", ticking := Clock())
    return ticking


def test_a_wait_is_shown_at_a_terminal_until_it_ends(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Watched("reading the prompt"))
    with PromptBar():
        assert screen.shown.wait(60.0)
    assert screen.getvalue().endswith("\x1b[2K"), "the line is cleared"
    monkeypatch.setattr(sys, "stderr", screen := Watched("loading dra␛ft.gguf 50%"))
    with ProgressBar() as loading:
        clock.now = 2.0
        loading("dra\x1bft.gguf", 0.25)
        loading("dra\x1bft.gguf", 0.5)
    assert "50%" in screen.getvalue()
    monkeypatch.setattr(sys, "stderr", screen := Watched("512 of 4,096 tokens, 256/s, about 14 s left"))
    with PromptBar() as bar:
        bar.hear(PromptProgress("verifier", 0, 0, 4096))
        clock.now += 2.0
        bar.hear(PromptProgress("verifier", 0, 512, 4096))
        assert screen.shown.wait(60.0)
        bar.say("The budget is spent.")
    assert "The budget is spent." in screen.getvalue()


@pytest.mark.parametrize(
    ("before", "at", "printed"),
    [
        (0, 2.0, "reading the prompt with verifier: 512 of 4,096 tokens, 256/s, about 14 s left\n"),
        (312, 2.0, "reading the prompt with verifier: 512 of 4,096 tokens, 100/s, about 36 s left\n"),  # read before
        (0, 0.5, ""),  # it is not known yet that it will take long
    ],
)
def test_elsewhere_a_line_tells_of_a_long_wait(
    before: int, at: float, printed: str, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with PromptBar() as bar:
        bar.hear(PromptProgress("verifier", before, before, 4096))
        clock.now = at
        bar.hear(PromptProgress("verifier", 0, 512, 4096))
        bar.hear(PromptProgress("verifier", 0, 512, 4096))
    bar.hear(PromptProgress("draft", 0, 0, 4096))  # begins to read once the verifier has written the first word
    clock.now += 2.0
    bar.hear(PromptProgress("draft", 0, 512, 4096))
    assert capsys.readouterr().err == printed


def test_each_slow_model_is_told_once_where_nobody_watches(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with ProgressBar() as loading:
        for name in ("draft.gguf", "verifier.gguf"):
            for share in (0.1, 0.2, 0.3):
                loading(name, share)
                clock.now += 1.0
            loading(name, 1.0)
    shown = capsys.readouterr().err.splitlines()
    assert [line[:-len(", about 8 s left")] for line in shown] == [f"loading {name}: 20%" for name in
                                                                   ("draft.gguf", "verifier.gguf")]  # fmt: skip
