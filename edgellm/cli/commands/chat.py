"""`edgellm chat`: one question, piped text, or a conversation."""

from __future__ import annotations

import enum
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from edgellm.cli.chat_session import ChatSession, StoredConversation, read_text
from edgellm.cli.commands.conversations import conversation_ids
from edgellm.cli.commands.mesh.run import INTERRUPTED, Engine, EngineName, OverDevices, over_devices
from edgellm.cli.commands.peers import peer_names
from edgellm.cli.help_examples import GATES, SOURCES, gate_names, model_names, source_names
from edgellm.cli.model_options import (
    AS_MODEL,
    DEFAULT,
    DEFAULT_DRAFT,
    DEFAULT_VERIFIER,
    HardwareOptions,
    ReasoningEffort,
    Seed,
    Temperature,
    TemplateArgs,
    Think,
    VerifierKeyFile,
    VerifierTier,
    thinking,
    upstream_options,
    with_hardware,
)
from edgellm.cli.pair_opener import ChatPairOpener, with_default_pair
from edgellm.cli.views.console import decode, is_terminal
from edgellm.cli.views.reply_printer import Display, print_reply
from edgellm.errors import InvalidOption


class GateName(enum.StrEnum):
    """The rules by which drafted chunks are sent to the verifier."""

    AUTO = "auto"
    SYNERA = "synera"
    CONFIDENCE = "confidence"
    IMPORTANCE = "importance"
    RANDOM = "random"
    ALWAYS = "always"
    NEVER = "never"


class Exit(enum.StrEnum):
    """The choices for an early exit from the draft model, before its last layers."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@with_hardware
def chat(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Question. Default: piped input, or an interactive conversation.")
    ] = None,
    draft: Annotated[
        str,
        typer.Option(
            "-m", "--draft", metavar="MODEL", envvar="EDGELLM_DRAFT", autocompletion=model_names,
            show_default=DEFAULT_DRAFT,
            help="Small model that drafts, or an EAGLE-3 head of the verifier; 'none': the verifier writes alone.",
        ),
    ] = DEFAULT,
    verifier: Annotated[
        str,
        typer.Option(
            metavar="MODEL|HOST:PORT|URL|auto", envvar="EDGELLM_VERIFIER", autocompletion=model_names,
            show_default=DEFAULT_VERIFIER,
            help="Bigger model that verifies, or the address of a served one (http://... for vLLM, llama-server and "
            "others); 'auto': the best paired device; 'none': the draft model writes alone.",
        ),
    ] = DEFAULT,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE|HOST:PORT", autocompletion=peer_names,
            help="Paired device to use as verifier (name or address); the best one if given several times.",
        ),
    ] = None,
    verifier_tier: VerifierTier = None,
    verifier_key_file: VerifierKeyFile = None,
    mesh: OverDevices = None,
    engine: EngineName = Engine.AUTO,
    budget: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of chunks to verify, 0 to 1.", show_default="all")
    ] = None,
    gate: Annotated[
        GateName,
        typer.Option(
            metavar="GATE", autocompletion=gate_names,
            help=f"Rule that chooses the chunks to verify: {', '.join(GATES)}; auto: the one with the best evidence.",
        ),
    ] = GateName.AUTO,
    parallel: Annotated[
        bool, typer.Option("--parallel/--no-parallel", help="Keep drafting while a served verifier checks.")
    ] = True,
    early_exit: Annotated[
        Exit, typer.Option(metavar="auto|on|off", help="Skip the draft model's last layers for tokens it is sure of.")
    ] = Exit.AUTO,
    exit_threshold: Annotated[
        float, typer.Option(metavar="P", help="How sure: the likeliest token's probability minus the second's.")
    ] = 0.7,
    learn_profile: Annotated[
        bool,
        typer.Option("--learn-profile/--no-learn-profile",
                     help="Let replies without a budget make and improve the pair's profile; they take longer."),
    ] = False,
    context_lookup: Annotated[
        bool,
        typer.Option("--context-lookup/--no-context-lookup", help="With a budget: where the draft model is unsure, "
                     "draft the token that followed the same words in the context.")
    ] = True,
    retrieval: Annotated[
        str,
        typer.Option(
            metavar="auto|off|SOURCES", autocompletion=source_names,
            help=f"Sources to copy drafts from, separated by commas: {', '.join(SOURCES)}.",
        ),
    ] = "auto",
    history: Annotated[
        bool,
        typer.Option("--history/--no-history", help="Draft from past conversations; keep this one and what is derived "
                     "from it.")
    ] = True,
    prompt_cache: Annotated[
        float,
        typer.Option(metavar="GB", min=0.0, help="Disk space for what the models have read, so that a "
                     "conversation goes on at once in another process.")
    ] = 1.0,
    again: Annotated[bool, typer.Option("-c", "--continue", help="Continue the last conversation.")] = False,
    conversation: Annotated[
        str | None,
        typer.Option(metavar="ID", autocompletion=conversation_ids, show_default="a new one",
                     help="Conversation to continue; see edgellm conversations."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Profile of the pair; see edgellm profile.", show_default="the kept one"),
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Text file to answer from; can be given several times.")
    ] = None,
    system: Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens in the answer.")] = 512,
    think: Think = "auto",
    reasoning_effort: ReasoningEffort = None,
    template_arg: TemplateArgs = None,
    temperature: Temperature = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Sample from the K likeliest tokens; 0: from all.",
                                 show_default=AS_MODEL)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Sample from the likeliest tokens that together have probability "
                                   "P.", show_default=AS_MODEL)
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(metavar="P", help="Sample from tokens with at least this share of the likeliest "
                                   "one's probability.", show_default=AS_MODEL)
    ] = None,
    repeat_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="Above 1: repeat the last 64 tokens less.",
                                   show_default=AS_MODEL)
    ] = None,
    frequency_penalty: Annotated[
        float, typer.Option(metavar="X", help="Above 0: write a token less, the more often the reply has it.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(metavar="X", help="Above 0: write tokens less that the reply has already.")
    ] = 0.0,
    seed: Seed = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per token, then a summary.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why each chunk was verified or not.")] = False,
    colors: Annotated[
        bool,
        typer.Option("--colors/--no-colors", help="On a terminal, show by colours which model wrote what, in place of "
                     "rendered Markdown."),
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the reply without a line of figures.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print all figures of each reply.")] = False,
    *,
    hardware: HardwareOptions,
) -> int:  # fmt: skip
    from edgellm.llm.pair_stats import tidy
    from edgellm.spec.params import ReplyOptions
    from edgellm.storage.default_pair import resolve_pair

    options = ReplyOptions(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repeat_penalty=repeat_penalty, frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
        seed=seed, gate=gate.value,
        budget=budget, parallel=parallel, early_exit=early_exit.value, exit_threshold=exit_threshold,
        context_lookup=context_lookup, retrieval=retrieval,
        learn_profile=learn_profile, **thinking(think, reasoning_effort, template_arg),
    )  # fmt: skip
    display = Display(as_json=as_json, explain=explain, stats=stats, quiet=quiet, colours=colors)
    texts = [(name, read_text(Path(name))) for name in context or ()]
    question = " ".join(prompt) if prompt else None
    if not is_terminal(sys.stdin):
        piped = decode(sys.stdin.buffer.read(), "The piped input") if sys.stdin is not None else ""
        if question is None:
            question = piped
        elif piped.strip():
            texts.append(("The piped input", piped))
    if question is None and as_json:
        raise InvalidOption("--json needs a question.", 'Add one: edgellm chat --json "Hello"')
    if question is not None and not question.strip():
        raise InvalidOption("The question is empty.", 'Ask something: edgellm chat "Hello"')
    tidy()

    stored = StoredConversation.open(again, conversation, history)
    watched = is_terminal(sys.stdout) and is_terminal(sys.stderr)
    introduce = watched and not (as_json or quiet or stored.conversation.turns)
    upstream = upstream_options(verifier_tier, verifier_key_file)
    opener = ChatPairOpener(options, hardware, history, introduce, upstream, prompt_cache=int(1e9 * prompt_cache))
    reports = None
    draft, verifier = with_default_pair(draft, "auto" if peer and mesh is None else verifier)
    named_draft, named_verifier, _ = resolve_pair(draft, verifier)
    if mesh is None:
        pair = opener.open(draft, verifier, peer or (), profile)
    else:
        over = over_devices(
            mesh, str(named_verifier), peer or (), str(named_draft), max_tokens, as_json=as_json, explain=explain,
            history=history, hardware=hardware, engine=engine,
        )  # fmt: skip
        pair, reports = opener.prepare(over.pair), over.reports
    session = ChatSession(
        pair, options, context=texts, system=system, remember=opener.recall(pair), history=stored.messages(),
        stored=stored, reports=reports,
    )  # fmt: skip
    with closing(session):
        if question is None:
            from edgellm.cli.interactive import converse

            names = None if mesh is not None or peer else (str(named_draft), str(named_verifier))
            return converse(session, display, opener, names, history=history)
        summary = print_reply(session.ask(question), display)
        session.add_reply(summary)
        return INTERRUPTED if summary.finish_reason == "cancelled" else 0
