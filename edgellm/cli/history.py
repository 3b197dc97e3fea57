"""`edgellm history`: what is kept of past conversations, and how to be rid of it."""

from __future__ import annotations

import enum
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from edgellm.cli.screen import emit, is_terminal, out, say
from edgellm.cli.text import one_line, size
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from datetime import datetime

    from edgellm.store import History, HistoryFacts


class Action(enum.StrEnum):
    """What to do with the history."""

    SHOW = "show"
    PATH = "path"
    CLEAR = "clear"
    OFF = "off"
    ON = "on"


def history(
    action: Annotated[
        Action,
        typer.Argument(metavar="ACTION",
                       help="show: how much is kept. path: where. clear: forget it all. "
                       "off: keep and read nothing from now on. on: keep and read again."),
    ] = Action.SHOW,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Forget without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    from edgellm.store import History

    store = History()
    if yes and action is not Action.CLEAR:
        raise InvalidOption(
            f"--yes means nothing to `history {action}`.", "Leave it out; it goes with `history clear`."
        )
    if action is Action.PATH:
        emit(json.dumps({"path": str(store.path)}) if as_json else str(store.path))
    elif action is Action.CLEAR:
        _clear(store, yes, as_json)
    elif action is Action.SHOW:
        _show(store.facts(), as_json)
    else:
        _turn(store, action, as_json)


def _clear(store: History, yes: bool, as_json: bool) -> None:
    from edgellm.store.conversations import Conversations

    if not yes and (facts := store.facts()).size:
        what = f"{_count(facts.conversations)} ({size(facts.size)})"
        if not is_terminal(sys.stdin):
            raise InvalidOption(f"This would forget {what}.", "Add --yes to do it without being asked.")
        if not typer.confirm(f"Forget {what}?", err=True):
            raise typer.Exit(1)
    gone = store.clear()
    Conversations().clear()  # what was said is said there, too
    if as_json:
        emit(json.dumps({"forgotten": gone}))
    else:
        say(f"forgot {_count(gone)}")


def _turn(store: History, action: Action, as_json: bool) -> None:
    if action is Action.OFF:
        store.turn_off()
        say("The history is off: conversations are neither kept nor read. What is there stays.")
        say("Forget it with: edgellm history clear", style="dim")
    else:
        store.turn_on()
        say(f"The history is on: conversations are kept in {store.path}, and later replies are drafted from them.")
    if as_json:
        emit(json.dumps({"on": store.on}))


def _show(facts: HistoryFacts, as_json: bool) -> None:
    if as_json:
        emit(json.dumps({"path": str(facts.path), "on": facts.on, "conversations": facts.conversations,
                         "size": facts.size, "first": facts.first and facts.first.isoformat(),
                         "last": facts.last and facts.last.isoformat()}, indent=2))  # fmt: skip
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("history", "on" if facts.on else "off: nothing is kept or read"),
        ("conversations", f"{facts.conversations:,}"),
        ("size", size(facts.size)),
        ("from", _time(facts.first)),
        ("to", _time(facts.last)),
        ("path", one_line(str(facts.path))),
    ):
        table.add_row(name, value)
    out().print(table)


def _count(conversations: int) -> str:
    return f"{conversations:,} conversation{'' if conversations == 1 else 's'}"


def _time(when: datetime | None) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC" if when else "-"
