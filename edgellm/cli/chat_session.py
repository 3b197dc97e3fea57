"""A conversation: its messages, its context, and the next reply. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.cli.views.mesh_report import Reports
    from edgellm.engine import Message
    from edgellm.llm import Pair
    from edgellm.spec.params import ReplyOptions
    from edgellm.spec.stream import Reply
    from edgellm.spec.types import Summary


class ChatSession:
    """The turns so far. `context` texts are part of the first turn, and again of the first one after `clear`."""

    def __init__(
        self,
        pair: Pair,
        options: ReplyOptions,
        *,
        context: Sequence[str],
        system: str | None,
        remember: Callable[[str, str], None] | None = None,
        history: Sequence[Message] = (),
        keep: Callable[[Sequence[Message]], None] | None = None,
        reports: Reports | None = None,
    ) -> None:
        """`remember` is called with each question, without the context, and its reply, once that is complete; `keep`
        with all messages, after each reply; `reports` with each reply, where several devices hold the model. `history`
        are earlier messages."""
        self.pair = pair
        self.options = options
        self.summary: Summary | None = None
        self._context = context
        self._system = system
        self._history: list[Message] = list(history)
        self._new = True  # the context is still to be sent
        self._keep = keep
        self._asked: list[Message] = []
        self._question = ""
        self._remember, self._reports = remember, reports

    def ask(self, prompt: str) -> Reply:
        """Return the next reply, to `prompt`. Raises what `Pair.reply` raises; `prompt` is forgotten then."""
        from edgellm.llm import compose

        self._question = prompt
        context = self._context if self._new else ()
        if self._reports is not None:
            self._reports.asked()
        self._asked = compose(prompt, context=context, history=self._history, system=self._system)
        return self.pair.reply(self._asked, self.options)

    def heard(self, summary: Summary) -> None:
        """Take the reply into the conversation; a stopped one as far as it came, an empty one not at all."""
        from edgellm.engine import Message

        self.summary = summary
        if self._reports is not None:
            self._reports.heard(summary)
        if summary.text:
            self._history, self._new = [*self._asked, Message("assistant", summary.text)], False
            if self._keep is not None:
                self._keep(self._history)
            if self._remember is not None and summary.finish_reason == "stop":
                self._remember(self._question, summary.text)

    def clear(self) -> None:
        """Forget all messages."""
        self._history, self._new = [], True
        self.summary = None
