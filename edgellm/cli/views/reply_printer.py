"""Printing of a reply as it is generated, until the user stops it."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from edgellm.cli.views.console import TokenWriter, emit, say
from edgellm.cli.views.report import print_stats, print_summary, summary_json, token_json

if TYPE_CHECKING:
    from edgellm.spec.stream import Reply
    from edgellm.spec.types import Explanation, Notice, Summary


def print_reply(reply: Reply, *, as_json: bool, explain: bool, stats: bool) -> Summary:
    """Print a reply on stdout as it is generated, then its figures on stderr, and return its summary.

    Ctrl-C stops the reply; the summary's `finish_reason` then is `cancelled`. Raises what the reply raises.
    """
    print_tokens = _print_json if as_json else _print_text
    reasons: list[Explanation] = []
    if explain:
        reply.listen(on_explain=reasons.append)
    with stoppable(reply):
        sources = print_tokens(reply)
    summary = reply.summary
    for reason in reasons:
        about = "reply" if reason.round is None else f"round {reason.round}"
        say(f"{about}: {reason.text}", style="dim")
    if as_json:
        emit(summary_json(summary))
    else:
        print_summary(summary, sources)
    if stats:
        print_stats(summary)
    return summary


def _print_text(reply: Reply) -> Counter[str]:
    from edgellm.spec.stream import Utf8

    writer, text, sources = TokenWriter(), Utf8(), Counter[str]()
    last = ""

    def notice(news: Notice) -> None:
        writer.end_line()
        say(news.text, style="yellow")

    reply.listen(on_notice=notice)
    try:
        for token in reply:
            last = token.source
            sources[last] += 1
            writer.write(text.feed(token.piece), last)
        writer.write(text.end(), last or "draft")
    finally:
        writer.end_line()
    return sources


def _print_json(reply: Reply) -> Counter[str]:
    """Print a JSON object per token. A token is printed once the next one is there if it ends within a character; the
    last one gets the rest of the text."""
    reply.listen(on_notice=lambda news: say(news.text))
    from edgellm.spec.stream import Utf8

    text, waiting = Utf8(), None
    for token in reply:
        if waiting is not None:
            emit(token_json(*waiting))
        waiting = (token, text.feed(token.piece))
        if not text.half_done:
            emit(token_json(*waiting))
            waiting = None
    if waiting is not None:
        token, complete = waiting
        emit(token_json(token, complete + text.end()))
    return Counter()


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
