"""Past conversations for a chat: what was said before helps to draft, and what is said now is remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgellm.cli.screen import say
from edgellm.errors import HistoryUnusable

if TYPE_CHECKING:
    from edgellm.api import Pair

Remember = Callable[[str, str], None]
RECALLED = 2**16
"""Bytes of past conversations that are drafted from: more would be felt before the first word of a reply."""


def recall(pair: Pair) -> Remember | None:
    """Gives `pair` what is remembered; returns what remembers a question and its reply. None: history is off, or it
    cannot be used, which the user is told.
    """
    from edgellm.store import History

    history = History()
    try:
        if not history.on:
            return None
        pair.remember([(past.question, past.reply) for past in history.recent(RECALLED)])
    except HistoryUnusable as error:
        say(f"Past conversations are not used: {error}", style="yellow")
        return None

    def remember(question: str, reply: str) -> None:
        try:
            history.add(question, reply)
        except HistoryUnusable as error:
            say(f"This conversation is not remembered: {error}", style="yellow")

    return remember
