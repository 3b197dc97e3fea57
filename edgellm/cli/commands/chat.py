"""`edgellm chat`: one question, piped text, or a conversation."""

import re
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from edgellm.cli import options
from edgellm.cli.options import HardwareOptions, PairOptions, ThinkOptions, on_command_line, option, with_records
from edgellm.cli.views.console import decode, is_terminal, read_text, say
from edgellm.cli.views.reply_printer import Display, print_reply
from edgellm.errors import InvalidOption
from edgellm.spec.params import ReplyOptions

_CONVERSATION = "Conversation"


@dataclass(frozen=True, slots=True)
class TalkOptions(Display):
    """The beginning of a conversation, its storage, and what is shown of it."""

    again: bool = option(False, names=("-c", "--continue"))
    context: tuple[str, ...] = option((), "FILE")
    system: str | None = option(None, "TEXT", names=("-s", "--system"))
    history: bool = option(True, panel=_CONVERSATION)
    prompt_cache: float = option(1.0, "GB", least=0.0, panel=_CONVERSATION)
    conversation: str | None = option(None, "ID", panel=_CONVERSATION, shown="a new one")
    profile: Path | None = option(None, "FILE", panel=options.DRAFTS, shown="the kept one")


def with_model_in_front(prompt: list[str], models: PairOptions, ctx: typer.Context) -> tuple[list[str], PairOptions]:
    """Return a prompt and the models of its reply, where the prompt's first word may name a model, as for `run`."""
    first = prompt[0] if prompt else ""
    if not re.fullmatch(r"\S*[:/.-]\S*", first) or on_command_line(ctx, "verifier") or models.peer:
        return prompt, models
    from edgellm.cli.commands.models import fitting_draft
    from edgellm.storage.catalog import catalog
    from edgellm.storage.model_files import list_models, resolve

    here = {model.name for model in list_models()}
    if not (first.endswith(".gguf") or first in here or first in catalog().models):
        return prompt, models
    path, draft = resolve(first), models.draft
    say(f"{first} is taken as the model, as with -m {first}; the question is what follows.", style="yellow")
    if not on_command_line(ctx, "draft"):
        draft = fitting_draft(first, path)
    return prompt[1:], replace(models, draft=draft, verifier=first)


@with_records
def chat(
    ctx: typer.Context,
    models: PairOptions,
    reply: ReplyOptions,
    think: ThinkOptions,
    talk: TalkOptions,
    hardware: HardwareOptions,
    prompt: list[str] | None = typer.Argument(None),
) -> int:
    from edgellm.cli.chat_session import Chat, ChatPairOpener, chosen_conversation, with_default_pair
    from edgellm.llm.pair_stats import tidy

    wanted = replace(reply, **think.fields())
    prompt, models = with_model_in_front(prompt or [], models, ctx)
    texts = [(name, read_text(Path(name))) for name in talk.context]
    question = " ".join(prompt) if prompt else None
    if not is_terminal(sys.stdin):
        piped = decode(sys.stdin.buffer.read(), "The piped input") if sys.stdin is not None else ""
        if question is None:
            question = piped
        elif piped.strip():
            texts.append(("The piped input", piped))
    if question is None and talk.as_json:
        raise InvalidOption("--json needs a question.", 'Add one: edgellm chat --json "Hello"')
    if question is not None and not question.strip():
        raise InvalidOption("The question is empty.", 'Ask something: edgellm chat "Hello"')
    tidy()

    past = chosen_conversation(talk.again, talk.conversation)
    watched = is_terminal(sys.stdout) and is_terminal(sys.stderr)
    introduce = watched and not (talk.as_json or talk.quiet or past.turns)
    opener = ChatPairOpener(
        wanted, hardware, talk.history, introduce, models.upstream(), prompt_cache=int(1e9 * talk.prompt_cache)
    )
    reports = None
    models = with_default_pair(models)
    if models.mesh is None:
        pair = opener.open(models.draft, models.verifier, models.peer, talk.profile)
    else:
        from edgellm.cli.commands.mesh import over_devices
        from edgellm.cli.views.mesh_view import Reports
        from edgellm.engine import Message
        from edgellm.llm import compose

        turns = [Message(role, text) for role, text in past.turns]
        asked = compose(question or "", context=[text for _, text in texts], history=turns, system=talk.system)
        over, mesh = over_devices(
            models, wanted.max_tokens, hardware, messages=asked, explain=talk.explain, history=talk.history
        )
        pair = opener.prepare(over)
        if mesh is not None:  # over RPC no device measures its work
            reports = Reports(mesh, asked=question is not None, as_json=talk.as_json)
    chat = Chat(pair, wanted, system=talk.system, past=past, stores=talk.history, reports=reports)
    for name, text in texts:
        chat.add_context(name, text)
    with closing(chat):
        if question is None:
            from edgellm.cli.interactive import Conversing, converse

            names = None if models.mesh is not None or models.peer else (models.draft, models.verifier)
            return converse(Conversing(chat, talk, opener, names), history=talk.history)
        summary = print_reply(chat.ask(question), talk)
        chat.add_reply(summary)
        return options.INTERRUPTED if summary.finish_reason == "cancelled" else 0
