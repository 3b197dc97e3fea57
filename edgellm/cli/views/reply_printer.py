"""Printing of a reply as it is written, until the user stops it."""

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

from edgellm.cli.views.console import Painter, emit, say
from edgellm.cli.views.report import print_stats, print_summary, summary_json, token_json

if TYPE_CHECKING:
    from edgellm.spec.stream import Reply
    from edgellm.spec.types import Explanation, Notice, Summary


def speak(reply: Reply, *, as_json: bool, explain: bool, stats: bool) -> Summary:
    """Write a reply to stdout as it comes, and its figures to stderr after it.

    Ctrl-C stops the reply; `finish_reason` of the summary then is `cancelled`. Errors of the reply are passed on.
    """
    show = _json if as_json else _words
    reasons: list[Explanation] = []
    if explain:
        reply.listen(on_explain=reasons.append)
    with stoppable(reply):
        sources = show(reply)
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


def _words(reply: Reply) -> Counter[str]:
    from edgellm.spec.stream import Utf8

    painter, text, sources = Painter(), Utf8(), Counter[str]()
    last = ""

    def notice(news: Notice) -> None:
        painter.end_line()
        say(news.text, style="yellow")

    reply.listen(on_notice=notice)
    try:
        for token in reply:
            last = token.source
            sources[last] += 1
            painter.write(text.feed(token.piece), last)
        painter.write(text.end(), last or "draft")
    finally:
        painter.end_line()
    return sources


def _json(reply: Reply) -> Counter[str]:
    """Print a JSON object per token. A token that leaves a character incomplete waits for the next one, and gets the
    rest of the text if there is none."""
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
    """Let Ctrl-C stop the reply within the `with`, also while a prompt is read; a second Ctrl-C, if the first has no
    effect, stops the program.

    Python calls a signal's handler once the main thread is out of llama.cpp, which may take long; but the signal is
    written to a socket at once, and a thread listens there.
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

    told, heard = socket.socketpair()
    told.setblocking(False)
    watch = threading.Thread(target=_watch, args=(heard, reply), name="edgellm-ctrl-c", daemon=True)
    watch.start()
    before, woken = signal.signal(signal.SIGINT, stop), signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGINT, before)
        told.close()
        watch.join()
        heard.close()
        if sys.exc_info()[0] is not None:
            reply.cancel()


def _watch(heard: socket.socket, reply: Reply) -> None:
    """Stop the reply at a SIGINT that `heard` brings; return when the other end is closed."""
    while numbers := heard.recv(64):
        if signal.SIGINT in numbers:
            reply.cancel()
