"""Printing of a reply as it is generated, until the user stops it."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from rich.table import Table
from rich.text import Text

from edgellm.cli.views.console import MEANINGS, STYLES, THOUGHT, TokenWriter, emit, err, redrawable, say, size
from edgellm.cli.views.progress import PromptBar
from edgellm.flags import flag

if TYPE_CHECKING:
    from edgellm.spec.stream import Reply
    from edgellm.spec.types import Explanation, Notice, Summary, Token


_OUTPUT = "Output"  # a section of help pages


@dataclass(frozen=True, slots=True)
class Display:
    """Settings for showing a reply: JSON in place of text; the reason why each chunk was verified or not; all figures,
    a line of figures, or none with `quiet`; `colours` by each token's source in place of rendered Markdown."""

    as_json: bool = flag(False, "Print one JSON object per token, then a summary.", names=("--json",))
    colours: bool = flag(
        False, "On a terminal, show by colours which model wrote what, in place of rendered Markdown.",
        names=("--colors/--no-colors",),
    )  # fmt: skip
    quiet: bool = flag(False, "Print the reply without a line of figures.", names=("-q", "--quiet"))
    explain: bool = flag(False, "Say why each chunk was verified or not.", names=("--explain",), panel=_OUTPUT)
    stats: bool = flag(False, "Print all figures of each reply.", names=("--stats",), panel=_OUTPUT)


class Writer(Protocol):
    """Writes a reply to stdout."""

    def write(self, text: str, source: str) -> None:
        """Write a token's text; `source`: THOUGHT, or the name of its source."""

    def pause(self) -> None:
        """Make room for other output, and go on with the next token."""

    def end_line(self) -> None:
        """Write held-back text, and end the line if one is begun."""


Heard = list[tuple[str, str]]
"""The texts of a reply, each with its source."""


def print_reply(reply: Reply, display: Display, heard: Heard | None = None) -> Summary:
    """Print a reply on stdout as it is generated, then its figures on stderr, and return its summary. `heard` gets the
    printed text.

    A terminal gets rendered Markdown; anything else gets the text as the model wrote it.

    Ctrl-C stops the reply; the summary's `finish_reason` then is `cancelled`.
    """
    reasons: list[Explanation] = []
    if display.explain:
        reply.listen(on_explain=reasons.append)
    sources = Counter[str]()
    with stoppable(reply):
        if display.as_json:
            _print_json(reply)
        else:
            sources = _print_text(reply, _writer(display.colours), [] if heard is None else heard)
    summary = reply.summary
    for reason in reasons:
        about = "reply" if reason.round is None else f"round {reason.round}"
        say(f"{about}: {reason.text}", style="dim")
    if display.as_json:
        emit(summary_json(summary))
    elif not display.quiet:
        print_summary(summary, sources if display.colours else Counter())
    if display.stats:
        print_stats(summary)
    return summary


def _writer(colours: bool) -> Writer:
    if colours or not redrawable(sys.stdout):
        return TokenWriter(by_source=colours)
    from edgellm.cli.views.markdown_stream import MarkdownWriter

    return MarkdownWriter()


def print_again(heard: Heard) -> None:
    """Print the text of a reply once more, with the colours of its sources."""
    writer = TokenWriter(by_source=True)
    for text, source in heard:
        writer.write(text, source)
    writer.end_line()


def _print_text(reply: Reply, writer: Writer, heard: Heard) -> Counter[str]:
    """Print the text of a reply; return how many tokens each source has."""
    from edgellm.spec.stream import Utf8
    from edgellm.spec.types import Channel

    texts, sources = {channel: Utf8() for channel in Channel}, Counter[str]()
    last, thought, began = "draft", 0, None

    def write(text: str, source: str) -> None:
        heard.append((text, source))
        writer.write(text, source)

    def notice(news: Notice) -> None:
        writer.pause()
        bar.say(news.text, style="yellow")

    def end_thought() -> None:
        nonlocal began
        if began is not None:
            writer.pause()
            say(f"thought for {perf_counter() - began:.0f} s, {thought} tokens", style="dim")
            began = None

    bar = PromptBar()
    reply.listen(on_notice=notice, on_progress=bar)
    try:
        for token in reply:
            bar.stop()
            sources[token.source] += 1
            text = texts[token.channel].feed(token.piece)
            if token.channel is Channel.THINKING:
                thought += 1  # a token of markup has no text
                began = perf_counter() if text and began is None else began
                write(text, THOUGHT)
            else:
                last = token.source
                end_thought()
                write(text, last)
        write(texts[Channel.ANSWER].end(), last)
    finally:
        bar.stop()
        end_thought()
        writer.end_line()
    return sources


def _print_json(reply: Reply) -> None:
    """Print a JSON object per token. A token that ends within a character is printed after the next token; a channel's
    last token gets the rest of the text."""
    from edgellm.spec.stream import Utf8

    bar = PromptBar()
    reply.listen(on_notice=lambda news: bar.say(news.text), on_progress=bar)
    text, waiting = Utf8(), None
    try:
        for token in reply:
            bar.stop()
            if waiting is not None:
                before, complete = waiting
                emit(token_json(before, complete if before.channel is token.channel else complete + text.end()))
            waiting = (token, text.feed(token.piece))
            if not text.has_partial:
                emit(token_json(*waiting))
                waiting = None
    finally:
        bar.stop()
    if waiting is not None:
        token, complete = waiting
        emit(token_json(token, complete + text.end()))


@contextmanager
def stoppable(reply: Reply) -> Iterator[None]:
    """Let Ctrl-C stop the reply within the `with`, even while a prompt is read. If that has no effect, a second Ctrl-C
    stops the program.

    Python calls a signal handler only when the main thread leaves llama.cpp, which may take long; but it writes the
    signal to a socket at once, which a thread reads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        reply.cancel()

    sender, receiver = socket.socketpair()
    sender.setblocking(False)
    watch = threading.Thread(target=_watch, args=(receiver, reply), name="edgellm-ctrl-c", daemon=True)
    watch.start()
    before, woken = signal.signal(signal.SIGINT, stop), signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGINT, before)
        sender.close()
        watch.join()
        receiver.close()
        if sys.exc_info()[0] is not None:
            reply.cancel()


def _watch(receiver: socket.socket, reply: Reply) -> None:
    """Cancel the reply when `receiver` gets a SIGINT; return when the other end is closed."""
    while numbers := receiver.recv(64):
        if signal.SIGINT in numbers:
            reply.cancel()


def token_json(token: Token, text: str) -> str:
    """Return a token as a JSON object. `text`: the characters that it completes; joined, they are the text of its
    channel."""
    return json.dumps(
        {
            "id": token.id,
            "text": text,
            "source": token.source,
            "channel": token.channel,
            "confidence": _short(token.confidence),
            "importance": _short(token.importance),
            "exit_layer": token.exit_layer,
            "round": token.round,
        }
    )


def summary_json(summary: Summary) -> str:
    figures = {name: _short(value) for name, value in dataclasses.asdict(summary).items()}
    del figures["first_at"]  # a time of this process's own clock
    return json.dumps({"summary": figures})


def print_summary(summary: Summary, sources: Counter[str]) -> None:
    """Print a line of figures on stderr; before it, if there are `sources`, the legend with their counts."""
    console = err()
    if sources:
        legend = [Text(f"■ {source} {sources[source]}", style=STYLES[source]) for source in STYLES if sources[source]]
        console.print(Text("  ").join(legend))
    console.print(Text(" · ".join(_headline(summary)), style="dim"))


_ENDS = {"length": "stopped at the length limit, see --max-tokens", "cancelled": "stopped by you"}


def _headline(summary: Summary) -> Iterator[str]:
    """Yield the figures that say the most."""
    yield f"{summary.tokens} {'token' if summary.tokens == 1 else 'tokens'}"
    if summary.thinking_tokens:
        yield f"{summary.thinking_tokens} of them thought"
    if summary.tokens_per_second is not None:
        yield f"{summary.tokens_per_second:.{0 if summary.tokens_per_second >= 100 else 1}f} tokens/s"
    thought, answer = summary.share_verified_thinking, summary.share_verified_answer
    if summary.share_verified == 1.0:
        yield "all verified"
    elif summary.share_verified is not None:
        apart = (
            "" if thought is None or answer is None else f" ({thought:.0%} of the thought, {answer:.0%} of the answer)"
        )
        yield f"{summary.share_verified:.0%} verified{apart}"
    elif summary.tokens:
        yield "not verified"
    if summary.finish_reason in _ENDS:
        yield _ENDS[summary.finish_reason]


def print_stats(summary: Summary) -> None:
    """Print every figure and its meaning on stderr."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_column(style="dim")
    for value, name, meaning in _rows(summary):
        table.add_row(value, name, meaning)
    err().print(table)


def _rows(summary: Summary) -> Iterator[tuple[str, str, str]]:
    """Yield each figure with its name and its meaning."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    chunks = f"{summary.chunks_verified_thinking} of its {summary.chunks_thinking} chunks"
    whole = f"{summary.chunks_accepted_whole} of {summary.chunks_verified}"
    sources = ", ".join(f"{name} {count}" for name, count in summary.retrieved_from)
    copied = f"accepted, from these sources: {sources}" if sources else "drafts from earlier text that were accepted"
    yield str(summary.prompt_tokens), "prompt tokens", "the whole conversation, as the model gets it"
    yield str(summary.tokens), "tokens", "in this reply"
    yield str(summary.thinking_tokens), "tokens of thought", "before the answer, with the markup around it"
    yield number(summary.ttft_ms, ".1f"), "ms to the first", "from the request to the first token"
    yield number(summary.tokens_per_second, ".1f"), "tokens/s", "after the first round"
    yield number(summary.share_verified, ".1%"), "verified", "tokens accepted or written by the verifier"
    yield number(summary.share_verified_thinking, ".1%"), "of the thought verified", chunks
    yield number(summary.acceptance_rate, ".1%"), "of drafts accepted", "of the drafted tokens that the verifier judged"
    yield number(summary.mean_acceptance_length, ".2f"), "tokens per check", "with the verifier's own token"
    yield number(summary.verifier_passes_per_token, ".2f"), "verifier passes per token", "1 without drafts"
    yield whole, "chunks whole", "accepted to their last token"
    yield str(summary.drafted), "drafted", f"in {summary.rounds} rounds"
    yield str(summary.retrieved), "copied", copied
    yield _trying(summary)
    yield "", "drafted now", "" if summary.trying is None else summary.trying.reason
    yield str(summary.from_context), "from the context", "drafted where the draft model was unsure"
    yield str(summary.exits), "early exits", "drafted without the draft model's last layers"
    yield number(summary.share_offloaded, ".1%"), "offloaded", "of all chunks so far, to hold against the budget"
    guesses = f"{summary.guesses_hit} of {summary.guesses_tried}"
    yield guesses, "verdicts predicted", "while they were pending"
    yield number(summary.stall_hidden, ".0%"), "of waiting hidden", "spent on drafts that were used"
    yield number(summary.bytes_per_chunk, ".0f"), "bytes per chunk", "sent and received, with the prompt's share"
    yield size(summary.bytes_up), "up", "sent to the verifier"
    yield size(summary.bytes_down), "down", "received from it"
    yield str(summary.seed), "seed", "repeats a sampled reply with --seed"
    yield summary.finish_reason, "ended by", "stop: the model; length: the limit; cancelled: you"


def _trying(summary: Summary) -> tuple[str, str, str]:
    """Return the cost of exploring lookups and drafts."""
    cost, tokens, name = summary.trying, summary.tokens, "spent on trying"
    if cost is None or not tokens:
        return "-", name, "lookups and wrong drafts, of plain decoding's time"
    lookups, copies, model, saved = (
        f"{decodes / tokens:.2%}" for decodes in (cost.lookups, cost.copies, cost.model, cost.saved)
    )
    return (
        f"{cost.total / tokens:.2%}",
        name,
        f"of plain decoding's time: lookups {lookups}, wrong copies {copies}, the draft model {model}; saved {saved}",
    )


def print_legend() -> None:
    """Print the meaning of each colour on stderr."""
    console = err()
    for source, meaning in MEANINGS.items():
        console.print(Text.assemble(("■ ", STYLES[source]), (f"{source:<10}", STYLES[source]), meaning))


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value
