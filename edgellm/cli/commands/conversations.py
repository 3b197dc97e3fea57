"""`edgellm conversations`: list, show and remove conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from edgellm.cli.options.models import AsJson
from edgellm.cli.views.console import emit, harmless, make_sure, one_line, out, say, table
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.storage.chat_log import Conversation


Action: TypeAlias = Literal["list", "show", "rm"]


def conversations(
    action: Annotated[
        Action,
        typer.Argument(metavar="ACTION", help="list: all, newest first. show: print one. rm: remove some, or --all."),
    ] = "list",
    which: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="IDs from the list; their beginnings are enough.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="With rm: remove all conversations.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Remove without asking.")] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    from edgellm.storage.chat_log import Conversations

    store = Conversations()
    if action == "list":
        if which:
            raise InvalidOption(
                f"`conversations list` takes no IDs, but {which[0]!r} is given.", "See: edgellm conversations --help"
            )
        _list(store.all(), as_json)
        return
    if everything == bool(which) or (everything and action != "rm"):
        raise InvalidOption(
            f"`conversations {action}` needs IDs (or rm --all).", "List them with: edgellm conversations"
        )
    chosen = store.all() if everything else [store.find(one) for one in which or ()]
    if action == "show":
        for one in chosen:
            if as_json:
                emit(json.dumps({"id": one.id, "turns": [{"role": role, "content": text} for role, text in one.turns]}))
            else:
                emit("\n\n".join(f"{role}: {harmless(text)}" for role, text in one.turns))
        return
    if chosen:
        make_sure("remove", _count(len(chosen)), yes=yes)
    for one in chosen:
        store.remove(one)
    if as_json:
        emit(json.dumps({"removed": [one.id for one in chosen]}))
    else:
        say(f"removed {_count(len(chosen))}")


def _list(found: Sequence[Conversation], as_json: bool) -> None:
    if as_json:
        rows = [
            {"id": one.id, "when": one.when.isoformat(), "turns": len(one.turns), "title": one.title} for one in found
        ]
        emit(json.dumps(rows, indent=2))
        return
    if not found:
        say("There are no conversations. Those of `edgellm chat` are kept while the history is on.")
        return
    shown = table("ID", "WHEN", "TURNS", "FIRST QUESTION", right=("TURNS",))
    for one in found:
        shown.add_row(one.id, _time(one.when), str(len(one.turns)), one_line(one.title))
    out().print(shown)
    say("Continue one with: edgellm chat -c, or edgellm chat --conversation ID", style="dim")


def _time(when: datetime) -> str:
    return f"{when.astimezone():%Y-%m-%d %H:%M}"


def _count(count: int) -> str:
    return f"{count:,} conversation{'' if count == 1 else 's'}"
