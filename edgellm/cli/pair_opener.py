"""Opening the models of a conversation, at its beginning and when another model takes over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.cli.options.hardware import DRAFT, VERIFIER, HardwareOptions
from edgellm.cli.options.models import DEFAULT
from edgellm.cli.views.console import announce, say, size
from edgellm.cli.views.progress import Loading, download
from edgellm.errors import EdgeError, HistoryUnusable

if TYPE_CHECKING:
    from edgellm.cli.chat_session import Remember
    from edgellm.llm import LLM
    from edgellm.spec.params import ReplyOptions
    from edgellm.upstream.opening import UpstreamOptions

RECALLED = 2**16
"""Bytes of past conversations to draft from: more would delay a reply's first token noticeably."""
TOY = (
    "This toy pair knows a small made-up home. For real models: edgellm setup\n"
    'Try: "The film night is on Friday at 20:00.", then: "When is the film night?"'
)
"""The notice about the bundled home pair."""
SMALL = "SmolLM2 135M is small: its facts and sums are often wrong. Better: edgellm setup"
"""The notice about the default pair."""
_PAUSE = 600  # seconds after a download that failed, in which the next command does not try again


def with_default_pair(draft: str, verifier: str) -> tuple[str, str]:
    """Return the names of a pair. The default verifier is downloaded if wanted and missing. After a failed download,
    the names of the bundled home pair stand for the defaults, and a line says why."""
    from edgellm import storage
    from edgellm.storage.default_pair import SMOLLM2, resolve_pair

    home = resolve_pair(draft, verifier)
    if home.missing != SMOLLM2.verifier or not {draft, verifier} <= {DEFAULT, "none", *SMOLLM2}:
        return draft, verifier
    failed = storage.cache_dir() / "models" / f"{SMOLLM2.verifier.replace(':', '-')}.failed"
    reason = f"{home.missing} is not here, and could not be fetched a short while ago."
    if not (failed.exists() and time.time() - failed.stat().st_mtime < _PAUSE):
        plan = storage.plan(home.missing)
        say(f"downloading {home.missing} ({size(plan.size)}; {plan.reason}), once", style="dim")
        try:
            download([plan])
        except EdgeError as error:
            reason = error.what
            with suppress(OSError):
                failed.touch()
        else:
            return draft, verifier
    say(
        f"{reason} The bundled toy pair answers, which knows a made-up home; try again: edgellm pull {home.missing}",
        style="yellow",
    )
    return str(home.draft), str(home.verifier)


@dataclass(frozen=True, slots=True)
class ChatPairOpener:
    """Opens pairs that can make replies with these options. Without `history` no past conversation is used; `introduce`
    prints a notice where the home pair or SmolLM2 answers. Prompts that were read are kept in `prompt_cache` bytes on
    disk."""

    options: ReplyOptions
    hardware: HardwareOptions
    history: bool
    introduce: bool = False
    upstream: UpstreamOptions | None = None
    prompt_cache: int = 0

    def open(self, draft: str, verifier: str, peers: Sequence[str] = (), profile: Path | None = None) -> LLM:
        """Open a pair; one of the `peers` verifies if there are any."""
        from edgellm.llm import AUTO, LLM
        from edgellm.storage.default_pair import HOME, SMOLLM2, resolve_pair

        with Loading() as loading:
            pair = LLM.open(
                draft, AUTO if peers else verifier, profile=profile, progress=loading, peers=peers,
                history=self.history, hardware=self.hardware.of(VERIFIER), draft_hardware=self.hardware.of(DRAFT),
                upstream=self.upstream, prompt_cache=self.prompt_cache,
            )  # fmt: skip
        names = set(resolve_pair(draft, verifier)[:2])
        for known, about in ((HOME, TOY), (SMOLLM2, SMALL)):
            if self.introduce and not peers and names <= {*known, "none"}:
                say(about, style="dim")
        return self.prepare(pair)

    def prepare(self, pair: LLM) -> LLM:
        """Return an opened pair after checking that it can make the replies, and printing its notice. Raise
        InvalidOption where it cannot; it is closed."""
        from edgellm.spec.gates.factory import needs_profile

        announce(pair.verifier_reason, pair.notices)
        with ExitStack() as failed:
            failed.push(pair)
            pair.prompts.check(self.options)
            if needs_profile(self.options):
                with Loading("hashing") as hashing:
                    pair.hash_models(hashing)
            failed.pop_all()
        return pair

    def recall(self, pair: LLM) -> Remember | None:
        """Give `pair` the past conversations to draft from, and return a function that adds a question and its reply to
        the history; None where the history is off, or unusable, which is printed."""
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
