"""A conversation (messages, context, stored copy, next reply), and the opening of its models; it prints no reply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edgellm.cli.options import DEFAULT, DRAFT, VERIFIER, HardwareOptions, PairOptions
from edgellm.cli.views.console import announce, counted, say
from edgellm.cli.views.progress import ProgressBar, download
from edgellm.engine import Message
from edgellm.errors import EdgeError, HistoryUnusable, InvalidOption, PromptTooLong, size
from edgellm.llm import AUTO, LLM
from edgellm.llm.messages import room_for_reply
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stats import Summary
from edgellm.spec.stream import Reply
from edgellm.storage.chat_log import Conversation, History
from edgellm.storage.model_files import HOME, SMOLLM2, resolve_pair
from edgellm.system import cache_dir

if TYPE_CHECKING:
    from edgellm.cli.views.mesh_view import Reports
    from edgellm.upstream.verifier import UpstreamOptions

_COUNTED = 2**20  # the most tokens that are counted of a text that is too long


def chosen_conversation(again: bool, which: str | None) -> Conversation:
    """Return the last conversation (`again`), the one named `which`, or a new one."""
    if again and which is not None:
        raise InvalidOption("--continue and --conversation exclude each other.", "Leave one of them out.")
    if which is not None:
        return History().find(which)
    return History().latest() if again else Conversation.new()


class Chat:
    """The messages so far. Each of the `context` texts, by name, comes with the next question, once; after `clear`, or
    `undo` of that question, again. The oldest that do not fit the model's context stay in the stored copy alone."""

    def __init__(
        self, pair: LLM, options: ReplyOptions, *, system: str | None = None, past: Conversation | None = None,
        stores: bool = False, reports: Reports | None = None,
    ) -> None:  # fmt: skip
        """Continue the conversation `past`, or begin one; it `stores` all messages after each change. `system` takes
        the place of the past one. `reports` are printed after each reply, if several devices hold the model."""
        self.pair, self.system, self.context = pair, system, dict[str, str]()
        self.summary: Summary | None = None  # the last reply's; None before the first one of a conversation
        self._options, self._stores, self._reports = options, stores, reports
        self._conversation = past or Conversation.new()
        self._said = [Message(*turn) for turn in self._conversation.turns]
        self._asked: Message | None = None
        if self._said and self._said[0].role == "system":
            self.system = system or self._said[0].content
            del self._said[0]

    @property
    def turns(self) -> list[tuple[str, str]]:
        """Return roles and texts of all messages but the system prompt; questions without the context texts."""
        return [(one.role, one.content) for one in self._said]

    def use(self, pair: LLM) -> None:
        """Have other models answer from now on."""
        self.pair = pair

    def set_system(self, text: str | None) -> None:
        """Set the system prompt, from the beginning of the conversation on."""
        self.system = text
        self._save()

    def add_context(self, name: str, text: str) -> None:
        """Add or replace a text; the next question is asked with it."""
        self.drop_context(name)
        self.context[name] = text

    def drop_context(self, name: str) -> bool:
        """Remove a text, also from the question with which it was sent; return False if there is none of that name."""
        if (text := self.context.pop(name, None)) is None:
            return False
        for place, message in enumerate(self._said):
            if text in message.context:
                left = tuple(one for one in message.context if one != text)
                self._said[place] = replace(message, context=left)
                self.pair.forget_prompts()
                self._save()
        return True

    def ask(self, prompt: str, **changes: Any) -> Reply:
        """Return the reply to `prompt`, which is not kept after an error, by the options but for some `changes`."""
        if self._reports is not None:
            self._reports.reply_started()
        sent = {text for message in self._said for text in message.context}
        context = tuple(one for one in self.context.values() if one not in sent)
        self._asked = Message("user", prompt, context=context)
        options = replace(self._options, truncation="auto", **changes)
        try:
            return self.pair.reply([*self._messages(), self._asked], options)
        except PromptTooLong as error:
            raise self._too_long(prompt, error.tokens) from None

    def _too_long(self, prompt: str, whole: int) -> PromptTooLong:
        """Return the error for texts and a question that are longer than the context: with their chat template, they
        have at least `whole` tokens."""
        counts: list[tuple[int, str]] = []
        for name, text in (("The system prompt", self.system or ""), *self.context.items(), ("The question", prompt)):
            try:
                counts.append((self.pair.count_tokens(text, _COUNTED), name))
            except PromptTooLong:
                counts.append((_COUNTED, name))
        longest, name = max(counts)
        length, total = self.pair.context_length, max(whole, sum(count for count, _ in counts))
        room = room_for_reply(self._options.max_tokens, length)
        other = f", {total} with the rest of the prompt" if _COUNTED > total > longest else ""
        more = "more than " if longest == _COUNTED else ""
        return PromptTooLong(
            f"{name} has {more}{counted(longest, 'token')}{other}, and the context holds {length} with the reply.",
            self.pair.longer_context(total + room),
        )

    def _messages(self) -> list[Message]:
        """Return the system prompt and all other messages."""
        return [*([Message("system", self.system)] if self.system else []), *self._said]

    def add_reply(self, summary: Summary) -> None:
        """Add the finished reply to the conversation: a stopped one as far as it got, an empty one not at all."""
        self.summary = summary
        if self._reports is not None:
            self._reports.reply_finished(summary)
        if summary.text and self._asked is not None:
            self.put_back([self._asked, Message("assistant", summary.text)])

    def undo(self) -> list[Message]:
        """Take back the last question and what followed it, mostly a reply, and return them, if there are any."""
        if not self._said:
            return []
        self.pair.forget_prompts()
        begin = max((at for at, message in enumerate(self._said) if message.role == "user"), default=0)
        taken, self._said = self._said[begin:], self._said[:begin]
        self._save()
        return taken

    def put_back(self, messages: Sequence[Message]) -> None:
        """Append a question and its reply."""
        self._said += messages
        self._save()

    def clear(self) -> None:
        """Forget all messages; the stored copy stays, and a new copy begins."""
        self._said, self.summary = [], None
        self._conversation = Conversation.new()

    def close(self) -> None:
        self.pair.close()

    def _save(self) -> None:
        """Store the messages; without any, remove the stored copy. The first error ends the storing."""
        if not self._stores or not (self._said or self._conversation.turns):
            return
        messages = [one.whole() for one in self._messages()] if self._said else []
        self._conversation = self._conversation.with_turns([(one.role, one.content) for one in messages])
        try:
            (History().save if messages else History().remove)(self._conversation)
        except EdgeError as error:
            say(f"This conversation cannot be continued later: {error}", style="yellow")
            self._stores = False


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


_Models = TypeVar("_Models", bound=PairOptions)


def with_default_pair(models: _Models) -> _Models:
    """Return `models` with the names of those that DEFAULT means, after a download of the default verifier; without it
    the home pair stands in. One of the peers verifies if there are any."""
    asked = models.draft, AUTO if models.peer and models.mesh is None else models.verifier
    pair, reason = resolve_pair(*asked), ""
    if pair.missing == SMOLLM2.verifier and {*asked} <= {DEFAULT, "none", *SMOLLM2}:
        reason = _not_fetched(pair.missing)
        pair = resolve_pair(*asked)
    if pair.missing:
        say(f"{reason} {pair.notice}".strip(), style="yellow")
    return replace(models, draft=str(pair.draft), verifier=str(pair.verifier))


def _not_fetched(name: str) -> str:
    """Download a model; return why that failed, "" if it is here now."""
    from edgellm.storage.hub.pull import plan

    failed = cache_dir() / "models" / f"{name.replace(':', '-')}.failed"
    if failed.exists() and time.time() - failed.stat().st_mtime < _PAUSE:
        return f"{name} could not be fetched a short while ago."
    planned = plan(name)
    say(f"downloading {name} ({size(planned.size)}; {planned.reason}), once", style="dim")
    try:
        download([planned])
    except EdgeError as error:
        with suppress(OSError):
            failed.touch()
        return error.what
    return ""


@dataclass(frozen=True, slots=True)
class ChatPairOpener:
    """Opens pairs that can make replies with these options. `introduce` prints a notice where the home pair or SmolLM2
    answers; prompts that were read are kept in `prompt_cache` bytes on disk."""

    options: ReplyOptions
    hardware: HardwareOptions
    history: bool
    introduce: bool = False
    upstream: UpstreamOptions | None = None
    prompt_cache: int = 0

    def open(self, draft: str, verifier: str, peers: Sequence[str] = (), profile: Path | None = None) -> LLM:
        """Open a pair, whose names stand for themselves."""
        with ProgressBar() as loading:
            pair = LLM.open(
                draft, verifier, profile=profile, progress=loading, peers=peers,
                history=self.history, hardware=self.hardware.of(VERIFIER), draft_hardware=self.hardware.of(DRAFT),
                upstream=self.upstream, prompt_cache=self.prompt_cache,
            )  # fmt: skip
        for known, about in ((HOME, TOY), (SMOLLM2, SMALL)):
            if self.introduce and {draft, verifier} <= {*known, "none"}:
                say(about, style="dim")
        return self.prepare(pair)

    def prepare(self, pair: LLM) -> LLM:
        """Return an opened pair that drafts from past conversations, with its notices printed. It is closed where it
        cannot make the replies."""
        announce(pair.verifier_reason, pair.notices)
        with ExitStack() as failed:
            failed.push(pair)
            pair.prompt_writer.check(self.options)
            if self.options.needs_profile:
                with ProgressBar("hashing") as hashing:
                    pair.hash_models(hashing)
            failed.pop_all()
        try:
            if self.history and self.options.sources():
                pair.remember(History().recent(RECALLED))
        except HistoryUnusable as error:
            say(f"Past conversations are not used: {error}", style="yellow")
        return pair
