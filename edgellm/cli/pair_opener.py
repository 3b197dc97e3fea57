"""Opening the models of a conversation, at its beginning and when another model takes over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.cli.model_options import DRAFT, VERIFIER, HardwareOptions
from edgellm.cli.views.console import Loading, announce, say
from edgellm.errors import HistoryUnusable

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.spec.params import ReplyOptions
    from edgellm.upstream.opening import UpstreamOptions

Remember = Callable[[str, str], None]
RECALLED = 2**16
"""Bytes of past conversations that are drafted from: more would delay the first token of a reply noticeably."""
TOY = (
    "This toy pair knows a small made-up home. For real models: edgellm setup\n"
    'Try: "The film night is on Friday at 20:00.", then: "When is the film night?"'
)
"""What to know about the bundled models."""


@dataclass(frozen=True, slots=True)
class ChatPairOpener:
    """Opens pairs that can make replies with these options. Without `history` nothing of past conversations is used;
    `introduce` prints `TOY` where the bundled models answer. A stock server is used as `upstream` says. Prompts that
    were read are kept in `prompt_cache` bytes on disk."""

    options: ReplyOptions
    hardware: HardwareOptions
    history: bool
    introduce: bool = False
    upstream: UpstreamOptions | None = None
    prompt_cache: int = 0

    def open(self, draft: str, verifier: str, peers: Sequence[str] = (), profile: Path | None = None) -> LLM:
        """Open a pair; one of the `peers` verifies if there are any. Raise what `LLM.open` and `prepare` raise."""
        from edgellm.llm import AUTO, LLM
        from edgellm.storage import ALIASES

        with Loading() as loading:
            pair = LLM.open(
                draft, AUTO if peers else verifier, profile=profile, progress=loading, peers=peers,
                history=self.history, hardware=self.hardware.of(VERIFIER), draft_hardware=self.hardware.of(DRAFT),
                upstream=self.upstream, prompt_cache=self.prompt_cache,
            )  # fmt: skip
        if self.introduce and not peers and {draft, verifier} <= {*ALIASES, "none"}:
            say(TOY, style="dim")
        return self.prepare(pair)

    def prepare(self, pair: LLM) -> LLM:
        """Return an opened pair, once it is known to be able to make the replies, and has said what to know about it.

        Raises:
            InvalidOption: it cannot; it is closed then.
        """
        from edgellm.spec.gates.factory import needs_profile

        announce(pair.verifier_reason, pair.notices)
        with ExitStack() as failed:
            failed.push(pair)
            pair.check_options(self.options)
            if needs_profile(self.options):
                with Loading("hashing") as hashing:
                    pair.hash_models(hashing)
            failed.pop_all()
        return pair

    def recall(self, pair: LLM) -> Remember | None:
        """Give `pair` the past conversations to draft from, and return a function that adds a question and its reply to
        the history; None if that is off, or cannot be used, which is printed."""
        from edgellm.storage import History

        history = History()
        try:
            if not (self.history and self.options.sources() and history.on):
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
