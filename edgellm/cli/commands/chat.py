"""`edgellm chat`: one question, piped text, or a conversation."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from edgellm.cli.chat_session import ChatSession, Notes, recall
from edgellm.cli.commands.conversations import conversation_ids
from edgellm.cli.commands.mesh.run import INTERRUPTED, OverDevices, over_devices
from edgellm.cli.commands.peers import peer_names
from edgellm.cli.help_examples import GATES, SOURCES, gate_names, model_names, source_names
from edgellm.cli.settings import renamed
from edgellm.cli.views.console import Loading, decode, is_terminal, say
from edgellm.cli.views.reply_printer import speak
from edgellm.errors import InvalidOption

_WHICH = f"Which ones: {', '.join(GATES)}. auto is the one with the best evidence for this pair."


class GateName(enum.StrEnum):
    """The rules by which drafted chunks are sent to the verifier."""

    AUTO = "auto"
    SYNERA = "synera"
    CONFIDENCE = "confidence"
    IMPORTANCE = "importance"
    RANDOM = "random"
    HYBRID = "hybrid"
    EDGEFM = "edgefm"
    ALWAYS = "always"
    NEVER = "never"


class Exit(enum.StrEnum):
    """The choices for an early exit from the draft model, before its last layers."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def chat(
    given: typer.Context,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="The question. Without it: what is piped in, or a conversation.")
    ] = None,
    draft: Annotated[
        str,
        typer.Option(
            "-m", "--draft", metavar="MODEL", envvar="EDGELLM_DRAFT", autocompletion=model_names,
            help="The small model; 'none' lets the verifier write alone.",
        ),
    ] = "edgellm-draft",
    verifier: Annotated[
        str,
        typer.Option(
            metavar="MODEL|HOST:PORT|auto", envvar="EDGELLM_VERIFIER", autocompletion=model_names,
            help="The bigger model, or where one is served; 'auto': by the best paired device; 'none' leaves the draft "
            "model alone.",
        ),
    ] = "edgellm-verifier",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE|HOST:PORT", autocompletion=peer_names,
            help="A paired device that shall verify, by name or address. Of several the best is taken.",
        ),
    ] = None,
    mesh: OverDevices = None,
    budget: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="The share of drafted chunks to verify, 0 to 1.", show_default="all"),
    ] = None,
    gate: Annotated[
        GateName,
        typer.Option(
            metavar="GATE", autocompletion=gate_names, help=_WHICH,
        ),
    ] = GateName.AUTO,
    parallel: Annotated[
        bool, typer.Option("--parallel/--no-parallel", help="Draft on while a served verifier checks.")
    ] = True,
    early_exit: Annotated[
        Exit, typer.Option(metavar="auto|on|off", help="Leave the draft model's last layers out where it is sure.")
    ] = Exit.AUTO,
    exit_threshold: Annotated[
        float, typer.Option(metavar="P", help="How sure: the likeliest token's lead over the second.")
    ] = 0.7,
    economy: Annotated[bool | None, typer.Option("--economy/--no-economy", hidden=True)] = None,
    context_lookup: Annotated[
        bool,
        typer.Option("--context-lookup/--no-context-lookup", help="With a budget: where the draft model is unsure, "
                     "draft the token that followed the same words in the context.")
    ] = True,
    precedents: Annotated[bool | None, typer.Option("--precedents/--no-precedents", hidden=True)] = None,
    retrieval: Annotated[
        str,
        typer.Option(
            metavar="auto|off|SOURCES", autocompletion=source_names,
            help=f"Copy drafts from what was seen: {', '.join(SOURCES)}, with commas between them.",
        ),
    ] = "auto",
    tree: Annotated[str | None, typer.Option(hidden=True)] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Draft from past conversations, and keep this one, "
                     "with whatever is derived from it.")
    ] = True,
    again: Annotated[bool, typer.Option("-c", "--continue", help="Go on with the last conversation.")] = False,
    conversation: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Go on with this one, of `edgellm conversations`.", show_default="a new one",
                     autocompletion=conversation_ids),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The pair's profile, from edgellm profile.", show_default="its own"),
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A text file to answer from. Can be given several times.")
    ] = None,
    system: Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="The system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="The longest reply.")] = 512,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 is greedy: always the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="Sample from the K likeliest tokens; 0: from all.")] = 40,
    top_p: Annotated[float, typer.Option(metavar="P", help="Sample from the likeliest that hold P together.")] = 0.95,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Repeats a sampled reply.", show_default="new")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a token, then a summary.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why each chunk was verified or not.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="All figures behind each reply, not only a line.")] = False,
) -> int:  # fmt: skip
    from edgellm.llm import AUTO, Pair
    from edgellm.llm.pair_stats import tidy
    from edgellm.spec.params import GONE, ReplyOptions

    for name, value in (("tree", tree), ("economy", economy)):
        if value is not None:
            say(f"--{GONE[name]}", style="dim")
    options = ReplyOptions(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, gate=gate.value,
        budget=budget, parallel=parallel, early_exit=early_exit.value, exit_threshold=exit_threshold,
        context_lookup=renamed(given, "precedents", precedents, "context_lookup", context_lookup), retrieval=retrieval,
    )  # fmt: skip
    texts = [_read(Path(name)) for name in context or ()]
    question = " ".join(prompt) if prompt else None
    if not is_terminal(sys.stdin):
        piped = decode(sys.stdin.buffer.read(), "The piped input") if sys.stdin is not None else ""
        if question is None:
            question = piped
        elif piped.strip():
            texts.append(piped)
    if question is None and as_json:
        raise InvalidOption("--json needs a question.", 'Write it behind the command: edgellm chat --json "..."')
    if question is not None and not question.strip():
        raise InvalidOption("The question is empty.", 'Write one: edgellm chat "Where is my mug?"')
    tidy()
    notes = Notes.open(again, conversation, history)
    reports = None
    if mesh is not None:
        opened, reports = over_devices(
            mesh, verifier, peer or (), draft, max_tokens, as_json=as_json, explain=explain, history=history
        )
        pair = opened.pair
    else:
        with Loading() as loading:
            where = AUTO if peer else verifier
            pair = Pair.open(draft, where, profile=profile, progress=loading, peers=peer or (), history=history)
    if pair.verifier_reason:
        say(pair.verifier_reason, style="dim")
    with pair:
        remember = recall(pair) if history and options.sources() else None
        talk = ChatSession(
            pair, options, context=texts, system=system, remember=remember, history=notes.said(), keep=notes.keep,
            reports=reports,
        )  # fmt: skip
        if question is None:
            from edgellm.cli.interactive import converse

            return converse(talk, explain=explain, stats=stats, history=history)
        summary = speak(talk.ask(question), as_json=as_json, explain=explain, stats=stats)
        talk.heard(summary)
        return INTERRUPTED if summary.finish_reason == "cancelled" else 0


def _read(path: Path) -> str:
    try:
        return decode(path.expanduser().read_bytes(), str(path))
    except OSError as error:
        raise InvalidOption(
            f"{path} cannot be read: {error.strerror}.", "Check the path given to --context."
        ) from error
