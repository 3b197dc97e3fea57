"""Past conversations for a chat: what was said before helps to draft, and what is said now is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from edgellm.cli.views.console import say
from edgellm.errors import EdgeError, HistoryUnusable, InvalidOption

if TYPE_CHECKING:
    from edgellm.engine import Message
    from edgellm.llm import Pair
    from edgellm.storage.chats.conversations import Conversation, Conversations

Remember = Callable[[str, str], None]
RECALLED = 2**16
"""Bytes of past conversations that are drafted from: more would be felt before the first word of a reply."""


def recall(pair: Pair) -> Remember | None:
    """Gives `pair` what is remembered; returns what remembers a question and its reply. None: history is off, or it
    cannot be used, which the user is told.
    """
    from edgellm.storage import History

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


@dataclass(slots=True)
class Notes:
    """What is kept of the conversation under way, so that it can be taken up again."""

    store: Conversations
    conversation: Conversation
    on: bool

    @classmethod
    def open(cls, again: bool, which: str | None, on: bool) -> Self:
        """Of the last conversation (`again`), of a certain one, or of a new one; nothing is kept where not `on`, or
        where the history is off.

        Raises:
            InvalidOption: there is no such conversation, or both are given.
        """
        from edgellm.storage import History
        from edgellm.storage.chats.conversations import Conversation, Conversations

        if again and which is not None:
            raise InvalidOption("--continue and --conversation are given.", "Leave one of the two out.")
        store = Conversations()
        past = store.find(which) if which is not None else store.latest() if again else Conversation.new()
        return cls(store, past, on and History().on)

    def said(self) -> list[Message]:
        """What was said before."""
        from edgellm.engine import Message

        return [Message(role, text) for role, text in self.conversation.turns]

    def keep(self, messages: Sequence[Message]) -> None:
        """Keeps all that was said; what stands in the way is told once."""
        if not self.on:
            return
        if list(messages[: len(self.conversation.turns)]) != self.said():  # it was cleared: another one begins
            self.conversation = type(self.conversation).new()
        self.conversation = self.conversation.said([(message.role, message.content) for message in messages])
        try:
            self.store.keep(self.conversation)
        except EdgeError as error:
            say(f"This conversation cannot be continued later: {error}", style="yellow")
            self.on = False
