"""A conversation: its messages, context, stored copy and next reply. Prints warnings alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from edgellm.cli.views.console import say
from edgellm.errors import EdgeError, HistoryUnusable, InvalidOption, PromptTooLong

if TYPE_CHECKING:
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.engine import Message
    from edgellm.llm import LLM
    from edgellm.spec.params import ReplyOptions
    from edgellm.spec.stream import Reply
    from edgellm.spec.types import Summary
    from edgellm.storage.chat_log import Conversation, Conversations


Remember = Callable[[str, str], None]
RECALLED = 2**16
"""Bytes of past conversations that are drafted from: more would delay the first token of a reply noticeably."""
_COUNTED = 2**20
"""Tokens up to which a text that is too long is counted."""
_MARKUP = 64
"""Tokens that the chat template adds, at most, when a longer context is proposed."""


def recall(pair: LLM) -> Remember | None:
    """Give `pair` the past conversations to draft from, and return a function that adds a question and its reply to
    the history; None if that is off, or cannot be used, which is printed.
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
            say(f"This conversation is not added to the history: {error}", style="yellow")

    return remember


@dataclass(slots=True)
class StoredConversation:
    """The stored copy of the current conversation, from which it can be continued later."""

    store: Conversations
    conversation: Conversation
    on: bool

    @classmethod
    def open(cls, again: bool, which: str | None, on: bool) -> Self:
        """Open the last conversation (`again`), the one named `which`, or a new one. Nothing is stored unless `on`, or
        while the history is off.

        Raises:
            InvalidOption: there is no such conversation, or both are given.
        """
        from edgellm.storage import History
        from edgellm.storage.chat_log import Conversation, Conversations

        if again and which is not None:
            raise InvalidOption("--continue and --conversation exclude each other.", "Leave one of them out.")
        store = Conversations()
        past = store.find(which) if which is not None else store.latest() if again else Conversation.new()
        return cls(store, past, on and History().on)

    def messages(self) -> list[Message]:
        """Return the stored messages."""
        from edgellm.engine import Message

        return [Message(role, text) for role, text in self.conversation.turns]

    def save(self, messages: Sequence[Message]) -> None:
        """Store all messages. An error is printed once, and ends the storing."""
        if not self.on:
            return
        if list(messages[: len(self.conversation.turns)]) != self.messages():  # cleared: a new one begins
            self.conversation = type(self.conversation).new()
        self.conversation = self.conversation.with_turns([(message.role, message.content) for message in messages])
        try:
            self.store.save(self.conversation)
        except EdgeError as error:
            say(f"This conversation cannot be continued later: {error}", style="yellow")
            self.on = False


class ChatSession:
    """The messages so far. `context` texts are part of the first turn, and of the first one after `clear`.

    A conversation that is longer than the model's context loses its oldest turns: they stay in the stored copy, and are
    no longer sent. The system prompt and the context texts always are.
    """

    def __init__(
        self,
        pair: LLM,
        options: ReplyOptions,
        *,
        context: Sequence[tuple[str, str]],
        system: str | None,
        remember: Callable[[str, str], None] | None = None,
        history: Sequence[Message] = (),
        keep: Callable[[Sequence[Message]], None] | None = None,
        reports: Reports | None = None,
    ) -> None:
        """Args:
        context: names and texts.
        history: earlier messages.
        remember: called with each question, without the context, and its complete reply.
        keep: called with all messages after each reply.
        reports: prints a report after each reply, if several devices hold the model.
        """
        self.pair = pair
        self.options = options
        self.summary: Summary | None = None
        self._context = context
        self._system = system
        self._history: list[Message] = list(history)
        self._context_at = -1  # place in the history of the message with the context texts
        self._left_out = 0  # messages at the beginning of the history that are no longer sent
        self._keep = keep
        self._asked: list[Message] = []
        self._question = ""
        self._remember, self._reports = remember, reports

    def ask(self, prompt: str) -> Reply:
        """Return the reply to `prompt`. Raises what `LLM.reply` raises, and then does not keep `prompt`; PromptTooLong
        with the tokens of each text, and what would help."""
        self._question = prompt
        if self._reports is not None:
            self._reports.reply_started()
        before, step = self._left_out, 1
        while True:
            try:
                reply = self._request(prompt)
            except PromptTooLong:
                if not self._leave_out(step):
                    self._left_out = before
                    raise self._too_long(prompt) from None
            else:
                if reply.prompt_tokens + self._room() <= self.pair.context_length or not self._leave_out(step):
                    break
            step *= 2
        if self._left_out and not before:
            length = self.pair.context_length
            say(
                f"The conversation is longer than the context of {length} tokens. Its oldest turns are no longer sent"
                " to the model; for a longer context: --ctx-size",
                style="yellow",
            )
        return reply

    def _too_long(self, prompt: str) -> PromptTooLong:
        """Return the error for texts and a question that are longer than the context."""
        texts = [*self._context, ("The question", prompt)]
        if self._system:
            texts.insert(0, ("The system prompt", self._system))
        counts: list[tuple[int, str]] = []
        for name, text in texts:
            try:
                counts.append((self.pair.count_tokens(text, _COUNTED), name))
            except PromptTooLong:
                counts.append((_COUNTED, name))
        longest, name = max(counts)
        length, total = self.pair.context_length, sum(count for count, _ in counts)
        other = f", {total} with the rest of the prompt" if total > longest else ""
        more = "more than " if longest == _COUNTED else ""
        return PromptTooLong(
            f"{name} has {more}{longest} tokens{other}, and the context holds {length} with the reply.",
            self.pair.longer_context(total + _MARKUP + self._room()),
        )

    def _request(self, prompt: str) -> Reply:
        from edgellm.llm import compose

        opening = [message for message in self._history[: min(1, self._left_out)] if message.role == "system"]
        self._asked = compose(
            prompt, context=() if self._context_is_sent() else [text for _, text in self._context],
            history=[*opening, *self._history[self._left_out :]], system=self._system,
        )  # fmt: skip
        return self.pair.reply(self._asked, self.options)

    def _context_is_sent(self) -> bool:
        return self._context_at >= self._left_out >= 0

    def _room(self) -> int:
        """Return how many tokens of the context the reply should have."""
        return min(self.options.max_tokens, self.pair.context_length // 4)

    def _leave_out(self, turns: int) -> bool:
        """Leave out more of the oldest turns; return False if there are none. A turn begins with a user's message."""
        starts = [at for at, message in enumerate(self._history) if message.role == "user" and at >= self._left_out]
        if not starts:
            return False
        self._left_out = starts[turns] if turns < len(starts) else len(self._history)
        return True

    def add_reply(self, summary: Summary) -> None:
        """Add the finished reply to the conversation: a stopped one as far as it got, an empty one not at all."""
        from edgellm.engine import Message

        self.summary = summary
        if self._reports is not None:
            self._reports.reply_finished(summary)
        if summary.text:
            opening = self._asked[:1] if not self._history and self._asked[0].role == "system" else []
            if not self._context_is_sent():
                self._context_at = len(self._history) + len(opening)
            self._history += [*opening, self._asked[-1], Message("assistant", summary.text)]
            if self._keep is not None:
                self._keep(self._history)
            if self._remember is not None and summary.finish_reason == "stop":
                self._remember(self._question, summary.text)

    def clear(self) -> None:
        """Forget all messages."""
        self._history, self._context_at, self._left_out = [], -1, 0
        self.summary = None
