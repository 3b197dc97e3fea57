"""`edgellm history` and `conversations`: what is kept of past conversations, in sum and one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from edgellm.cli.options import AsJson, Yes
from edgellm.cli.views.console import counted, emit, emit_json, facts, harmless, make_sure, one_line, out, say, size
from edgellm.cli.views.console import show as show_rows
from edgellm.errors import HistoryUnusable, InvalidOption

if TYPE_CHECKING:
    from edgellm.storage import History
    from edgellm.storage.chat_log import Conversation

Action: TypeAlias = Literal["show", "path", "clear", "off", "on", "keep"]


def history(
    action: Annotated[
        Action,
        typer.Argument(metavar="ACTION",
                       help="show: how much is kept. path: where. clear: delete it, with everything derived from "
                       "it. off: stop keeping and reading it. on: keep and read it again. keep: set or print for how "
                       "long."),
    ] = "show",
    age: Annotated[
        str | None,
        typer.Argument(metavar="AGE", show_default=False, help="With keep: maximum age, such as 90d, 12w, 6m or 2y; or "
                       "forever. EDGELLM_HISTORY_KEEP takes precedence."),
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Clear without asking.")] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    from edgellm.llm.pair_stats import tidy
    from edgellm.storage import History

    store = History()
    for given, owner, what in (
        ("--yes" if yes else "", "clear", "it"),
        (repr(age[:40]) if age else "", "keep", "an age"),
    ):
        if given and action != owner:
            next_step = f"Leave it out; {what} belongs to `history {owner}`."
            raise InvalidOption(f"{given} has no meaning for `history {action}`.", next_step)
    if action in ("show", "clear"):
        tidy()
    if action == "keep":
        _keep(age, as_json)
    elif action == "path":
        emit(json.dumps({"path": str(store.path)}) if as_json else str(store.path))
    elif action == "clear":
        _clear(store, yes, as_json)
    elif action == "show":
        _show(store, as_json)
    else:
        _turn(store, action, as_json)


def _keep(age: str | None, as_json: bool) -> None:
    from edgellm.llm.pair_stats import expire
    from edgellm.storage.chat_log import VARIABLE, describe_age, max_age, parse_age, set_max_age

    if age is not None:
        wanted = parse_age(age)
        try:
            set_max_age(wanted)
        except OSError as error:
            what = f"The maximum age cannot be set: {error}."
            raise HistoryUnusable(what, "Check the permissions of the folder.") from None
        if max_age() != wanted:
            say(f"{VARIABLE} sets another age, and takes precedence.", style="yellow")
        expire()
    if as_json:
        emit(json.dumps({"keep": describe_age(max_age())}))
    elif (found := max_age()) is None:
        say("Conversations are kept until you clear them.")
    else:
        say(f"Conversations, and what is derived from them, are kept for at most {found.days} days.")


def _clear(store: History, yes: bool, as_json: bool) -> None:
    from edgellm.llm.pair_stats import forget, kept

    if not yes and ((there := kept()).total or store.facts().size):
        make_sure("delete", str(there), yes=False)
    gone = forget()
    if as_json:
        emit(json.dumps({"forgotten": gone.total, **asdict(gone)}))
    else:
        say(f"deleted {gone}")


def _turn(store: History, action: Action, as_json: bool) -> None:
    if action == "off":
        store.turn_off()
        off = "The history is off: conversations, and what is derived from them, are neither kept nor read."
        say(f"{off} What was kept stays.")
        say("Delete it with: edgellm history clear", style="dim")
    else:
        store.turn_on()
        say(f"The history is on: conversations are kept in {store.path}, and replies are drafted from them.")
    if as_json:
        emit(json.dumps({"on": store.on}))


def _show(store: History, as_json: bool) -> None:
    from edgellm.llm.pair_stats import kept
    from edgellm.storage.chat_log import describe_age, max_age

    found, there, age = store.facts(), kept(), describe_age(max_age())
    if as_json:
        emit_json({"path": str(found.path), "on": found.on, "conversations": found.conversations, "size": found.size,
                   "first": found.first and found.first.isoformat(), "last": found.last and found.last.isoformat(),
                   "keep": age, "all": asdict(there)})  # fmt: skip
        return
    state = "on" if found.on else "off: nothing is kept or read"
    begin, end = (f"{when:%Y-%m-%d %H:%M} UTC" if when else "-" for when in (found.first, found.last))
    path = one_line(str(found.path))
    rows = [("history", state), ("holds", str(there)), ("kept for", age), ("size", size(found.size))]
    out().print(facts([*rows, ("from", begin), ("to", end), ("path", path)]))


def conversations(
    action: Annotated[
        Literal["list", "show", "rm"],
        typer.Argument(metavar="ACTION", help="list: all, newest first. show: print one. rm: remove some, or --all."),
    ] = "list",
    which: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="IDs from the list; their beginnings are enough.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="With rm: remove all conversations.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    from edgellm.storage.chat_log import Conversations

    store = Conversations()
    if action == "list":
        if which:
            what = f"`conversations list` takes no IDs, but {which[0]!r} is given."
            raise InvalidOption(what, "See: edgellm conversations --help")
        _list(store.all(), as_json)
        return
    if everything == bool(which) or (everything and action != "rm"):
        what = f"`conversations {action}` needs IDs (or rm --all)."
        raise InvalidOption(what, "List them with: edgellm conversations")
    chosen = store.all() if everything else [store.find(one) for one in which or ()]
    if action == "show":
        for one in chosen:
            turns = [{"role": role, "content": text} for role, text in one.turns]
            text = "\n\n".join(f"{role}: {harmless(text)}" for role, text in one.turns)
            emit(json.dumps({"id": one.id, "turns": turns}) if as_json else text)
        return
    if chosen:
        make_sure("remove", counted(len(chosen), "conversation"), yes=yes)
    for one in chosen:
        store.remove(one)
    if as_json:
        emit(json.dumps({"removed": [one.id for one in chosen]}))
    else:
        say(f"removed {counted(len(chosen), 'conversation')}")


def _list(found: Sequence[Conversation], as_json: bool) -> None:
    show_rows(
        [{"id": one.id, "when": one.when.isoformat(), "turns": len(one.turns), "title": one.title} for one in found],
        {
            "ID": lambda row: row["id"],
            "WHEN": lambda row: f"{datetime.fromisoformat(row['when']).astimezone():%Y-%m-%d %H:%M}",
            " TURNS": lambda row: str(row["turns"]),
            "FIRST QUESTION": lambda row: row["title"],
        },
        as_json,
        empty="There are no conversations. Those of `edgellm chat` are kept while the history is on.",
        hint="Continue one with: edgellm chat -c, or edgellm chat --conversation ID",
    )
