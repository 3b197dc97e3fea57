"""Printing of a reply as it is generated, until the user stops it."""

from __future__ import annotations

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
from typing import TYPE_CHECKING, TypeAlias

from rich.text import Text

from edgellm.cli.options import option
from edgellm.cli.views import console as ui
from edgellm.cli.views.progress import PromptBar
from edgellm.errors import size

if TYPE_CHECKING:
    from edgellm.cli.views.markdown_stream import MarkdownWriter
    from edgellm.spec.stats import Summary
    from edgellm.spec.stream import Reply
    from edgellm.spec.types import Explanation, Notice

_OUTPUT = "Output"  # a section of help pages
Heard: TypeAlias = list[tuple[str, str]]
"""The texts of a reply, each with its source."""


@dataclass(frozen=True, slots=True)
class Display:
    """Settings for showing a reply."""

    as_json: bool = option(False, names=("--json",))
    colours: bool = option(False, names=("--colors/--no-colors",))
    quiet: bool = option(False, names=("-q", "--quiet"))
    explain: bool = option(False, names=("--explain",), panel=_OUTPUT)
    stats: bool = option(False, names=("--stats",), panel=_OUTPUT)


def print_reply(reply: Reply, display: Display, heard: Heard | None = None) -> Summary:
    """Print a reply on stdout as it is generated, then its figures on stderr; return its summary. `heard` gets the
    printed text. Ctrl-C stops the reply: its `finish_reason` is `cancelled`."""
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
        ui.say(f"{'reply' if reason.round is None else f'round {reason.round}'}: {reason.text}", style="dim")
    if display.as_json:
        figures = {name: _short(value) for name, value in summary.figures().items()}
        ui.emit_json({"summary": figures}, indent=None)
    elif not display.quiet:
        if display.colours and sources:
            legend = [
                Text(f"■ {name} {sources[name]}", style) for name, (style, _) in ui.STYLES.items() if sources[name]
            ]
            ui.err().print(Text("  ").join(legend))
        ui.say(" · ".join(_headline(summary)), style="dim")
    if display.stats:
        print_stats(summary)
    return summary


def _writer(colours: bool) -> ui.TokenWriter | MarkdownWriter:
    if colours or not ui.redrawable(sys.stdout):
        return ui.TokenWriter(by_source=colours)
    from edgellm.cli.views.markdown_stream import MarkdownWriter

    return MarkdownWriter()


def print_again(heard: Heard) -> None:
    """Print the text of a reply once more, with the colours of its sources."""
    writer = ui.TokenWriter(by_source=True)
    for text, source in heard:
        writer.write(text, source)
    writer.end_line()


def _print_text(reply: Reply, writer: ui.TokenWriter | MarkdownWriter, heard: Heard) -> Counter[str]:
    """Print the text of a reply; return how many tokens each source has."""
    from edgellm.spec.stream import whole_characters
    from edgellm.spec.types import Channel

    sources, bar, thought, began = Counter[str](), PromptBar(), 0, None

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
            ui.say(f"thought for {perf_counter() - began:.0f} s, {thought} tokens", style="dim")
            began = None

    reply.listen(on_notice=notice, on_progress=bar.hear)
    try:
        for delta in whole_characters(bar.over(reply)):
            sources.update(token.source for token in delta.tokens)
            if delta.channel is Channel.THINKING:
                thought += len(delta.tokens)  # a token of markup has no text
                began = perf_counter() if delta.text and began is None else began
                write(delta.text, ui.THOUGHT)
            else:
                end_thought()
                write(delta.text, delta.tokens[-1].source)
    finally:
        end_thought()
        writer.end_line()
    return sources


def _print_json(reply: Reply) -> None:
    """Print a JSON object per token. Of several that share a character, the last one has the text."""
    from edgellm.spec.stream import whole_characters

    bar, names = PromptBar(), ("source", "channel", "confidence", "importance", "exit_layer", "round")
    reply.listen(on_notice=lambda news: bar.say(news.text), on_progress=bar.hear)
    for delta in whole_characters(bar.over(reply)):
        for token, text in delta.parts():
            figures = {name: _short(getattr(token, name)) for name in names}
            ui.emit_json({"id": token.id, "text": text, **figures}, indent=None)


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


@contextmanager
def stoppable(reply: Reply) -> Iterator[None]:
    """Let Ctrl-C stop the reply within the `with`, even while a prompt is read; a second one stops the program.

    Python calls a signal handler only when the main thread leaves llama.cpp, which may take long; but it writes the
    signal to a socket at once, which a thread reads."""
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

    def watch() -> None:
        while numbers := receiver.recv(64):  # empty once the other end is closed
            if signal.SIGINT in numbers:
                reply.cancel()

    sender, receiver = socket.socketpair()
    sender.setblocking(False)
    watching = threading.Thread(target=watch, name="edgellm-ctrl-c", daemon=True)
    watching.start()
    before, woken = signal.signal(signal.SIGINT, stop), signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGINT, before)
        sender.close()
        watching.join()
        receiver.close()
        if sys.exc_info()[0] is not None:
            reply.cancel()


_ENDS = {"length": "stopped at the length limit, see --max-tokens", "cancelled": "stopped by you"}


def _headline(summary: Summary) -> Iterator[str]:
    yield ui.counted(summary.tokens, "token")
    if summary.thinking_tokens:
        yield f"{summary.thinking_tokens} of them thought"
    if (speed := summary.tokens_per_second) is not None:
        yield f"{speed:.{0 if speed >= 100 else 1}f} tokens/s"
    share, thought, answer = summary.share_verified, summary.share_verified_thinking, summary.share_verified_answer
    if share == 1.0:
        if summary.verdicts_on_drafts:  # A model alone verifies nobody's drafts.
            yield "all verified"
    elif share is not None:
        apart = "" if None in (thought, answer) else f" ({thought:.0%} of the thought, {answer:.0%} of the answer)"
        yield f"{share:.0%} verified{apart}"
    elif summary.tokens:
        yield "not verified"
    if summary.finish_reason in _ENDS and not summary.context_full:
        yield _ENDS[summary.finish_reason]


def print_stats(summary: Summary) -> None:
    """Print every figure on stderr, and its meaning where there is room beside it."""
    narrow = ui.err().width < 60
    made = ui.grid({"justify": "right"}, {}, {"style": "dim", "overflow": "fold"})
    for value, form, name, meaning in _rows(summary):
        made.add_row("-" if value is None else format(value, form), name, "" if narrow else meaning)
    ui.err().print(made)


def _rows(summary: Summary) -> Iterator[tuple[float | str | None, str, str, str]]:
    chunks = f"{summary.chunks_verified_thinking} of its {summary.chunks_thinking} chunks"
    whole = f"{summary.chunks_accepted_whole} of {summary.chunks_verified}"
    sources = ", ".join(f"{name} {count}" for name, count in summary.retrieved_from)
    copied = f"accepted, from these sources: {sources}" if sources else "drafts from earlier text that were accepted"
    yield summary.prompt_tokens, "", "prompt tokens", "the whole conversation, as the model gets it"
    yield summary.tokens, "", "tokens", "in this reply"
    yield summary.thinking_tokens, "", "tokens of thought", "before the answer, with the markup around it"
    yield summary.ttft_ms, ".1f", "ms to the first", "from the request to the first token"
    yield summary.tokens_per_second, ".1f", "tokens/s", "after the first round"
    yield summary.share_verified, ".1%", "verified", "tokens accepted or written by the verifier"
    yield summary.share_verified_thinking, ".1%", "of the thought verified", chunks
    yield summary.acceptance_rate, ".1%", "of drafts accepted", "of the drafted tokens that the verifier judged"
    yield summary.mean_acceptance_length, ".2f", "tokens per check", "with the verifier's own token"
    yield summary.verifier_passes_per_token, ".2f", "verifier passes per token", "1 without drafts"
    yield whole, "", "chunks whole", "accepted to their last token"
    yield summary.drafted, "", "drafted", f"in {summary.rounds} rounds"
    yield summary.retrieved, "", "copied", copied
    yield "", "", "drafted now", summary.drafting
    yield summary.from_context, "", "from the context", "drafted where the draft model was unsure"
    yield summary.exits, "", "early exits", "drafted without the draft model's last layers"
    yield summary.share_offloaded, ".1%", "offloaded", "of all chunks so far, to hold against the budget"
    guesses = f"{summary.guesses_hit} of {summary.guesses_tried}"
    yield guesses, "", "verdicts predicted", "while they were pending"
    yield summary.stall_hidden, ".0%", "of waiting hidden", "spent on drafts that were used"
    yield summary.bytes_per_chunk, ".0f", "bytes per chunk", "sent and received, with the prompt's share"
    yield size(summary.bytes_up), "", "up", "sent to the verifier"
    yield size(summary.bytes_down), "", "down", "received from it"
    yield summary.seed, "", "seed", "repeats a sampled reply with --seed"
    yield summary.finish_reason, "", "ended by", "stop: the model; length: the limit; cancelled: you"


def print_legend() -> None:
    """Print the meaning of each colour on stderr."""
    for source, (style, meaning) in ui.STYLES.items():
        ui.err().print(Text.assemble(("■ ", style), (f"{source:<10}", style), meaning))
