"""`edgellm chat`: one question, piped text, or a conversation."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from edgellm.cli.chat_session import Chat, ChatPairOpener, StoredConversation, with_default_pair
from edgellm.cli.options import (
    DRAFTS,
    INTERRUPTED,
    HardwareOptions,
    PairOptions,
    ThinkOptions,
    conversation_ids,
    with_records,
)
from edgellm.cli.views.console import decode, is_terminal, read_text
from edgellm.cli.views.reply_printer import Display, print_reply
from edgellm.errors import InvalidOption
from edgellm.flags import flag
from edgellm.spec.params import ReplyOptions
from edgellm.storage.default_pair import resolve_pair

_CONVERSATION = "Conversation"


@dataclass(frozen=True, slots=True)
class TalkOptions:
    """The beginning of a conversation, and its storage."""

    again: bool = flag(False, "Continue the last conversation.", names=("-c", "--continue"))
    context: tuple[str, ...] = flag((), "Text file to answer from; can be given several times.", "FILE")
    system: str | None = flag(None, "System prompt.", "TEXT", names=("-s", "--system"))
    history: bool = flag(
        True, "Draft from past conversations; keep this one and what is derived from it.", panel=_CONVERSATION
    )
    prompt_cache: float = flag(
        1.0, "Disk space for what the models have read, so that a conversation goes on at once in another process.",
        "GB", least=0.0, panel=_CONVERSATION,
    )  # fmt: skip
    conversation: str | None = flag(
        None, "Conversation to continue; see edgellm conversations.", "ID", panel=_CONVERSATION,
        complete=conversation_ids, shown="a new one",
    )  # fmt: skip
    profile: Path | None = flag(
        None, "Profile of the pair; see edgellm profile.", "FILE", panel=DRAFTS, shown="the kept one"
    )


@with_records
def chat(
    models: PairOptions,
    talk: TalkOptions,
    reply: ReplyOptions,
    think: ThinkOptions,
    display: Display,
    hardware: HardwareOptions,
    prompt: list[str] | None = typer.Argument(
        None, help="Question. Default: piped input, or an interactive conversation."
    ),
) -> int:
    from edgellm.llm.pair_stats import tidy

    options = replace(reply, **think.fields())
    texts = [(name, read_text(Path(name))) for name in talk.context]
    question = " ".join(prompt) if prompt else None
    if not is_terminal(sys.stdin):
        piped = decode(sys.stdin.buffer.read(), "The piped input") if sys.stdin is not None else ""
        if question is None:
            question = piped
        elif piped.strip():
            texts.append(("The piped input", piped))
    if question is None and display.as_json:
        raise InvalidOption("--json needs a question.", 'Add one: edgellm chat --json "Hello"')
    if question is not None and not question.strip():
        raise InvalidOption("The question is empty.", 'Ask something: edgellm chat "Hello"')
    tidy()

    stored = StoredConversation.open(talk.again, talk.conversation, talk.history)
    watched = is_terminal(sys.stdout) and is_terminal(sys.stderr)
    introduce = watched and not (display.as_json or display.quiet or stored.conversation.turns)
    opener = ChatPairOpener(
        options, hardware, talk.history, introduce, models.upstream(), prompt_cache=int(1e9 * talk.prompt_cache)
    )
    reports = None
    draft, verifier = with_default_pair(
        models.draft, "auto" if models.peer and models.mesh is None else models.verifier
    )
    named = resolve_pair(draft, verifier)
    if models.mesh is None:
        pair = opener.open(draft, verifier, models.peer, talk.profile)
    else:
        from edgellm.cli.commands.mesh import over_devices, reports_on

        over = over_devices(models, named, options.max_tokens, hardware, explain=display.explain, history=talk.history)
        pair, reports = opener.prepare(over.pair), reports_on(over, display)
    session = Chat(
        pair, options, context=texts, system=talk.system, remember=opener.recall(pair), stored=stored, reports=reports
    )
    with closing(session):
        if question is None:
            from edgellm.cli.interactive import Conversing, converse

            names = None if models.mesh is not None or models.peer else (str(named.draft), str(named.verifier))
            return converse(Conversing(session, display, opener, names), history=talk.history)
        summary = print_reply(session.ask(question), display)
        session.add_reply(summary)
        return INTERRUPTED if summary.finish_reason == "cancelled" else 0
