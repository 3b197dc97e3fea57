"""`edgellm history`: show, limit and clear what is kept of past conversations."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from edgellm.cli.options.models import AsJson
from edgellm.cli.views.console import emit, facts, make_sure, one_line, out, say, size
from edgellm.errors import HistoryUnusable, InvalidOption

if TYPE_CHECKING:
    from datetime import datetime

    from edgellm.storage import History, HistoryFacts


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
    if yes and action != "clear":
        raise InvalidOption(
            f"--yes has no meaning for `history {action}`.", "Leave it out; it belongs to `history clear`."
        )
    if age is not None and action != "keep":
        raise InvalidOption(
            f"{age[:40]!r} has no meaning for `history {action}`.", "Leave it out; an age belongs to `history keep`."
        )
    if action in ("show", "clear"):
        tidy()
    if action == "keep":
        _keep(age, as_json)
    elif action == "path":
        emit(json.dumps({"path": str(store.path)}) if as_json else str(store.path))
    elif action == "clear":
        _clear(store, yes, as_json)
    elif action == "show":
        _show(store.facts(), as_json)
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
            raise HistoryUnusable(
                f"The maximum age cannot be set: {error}.", "Check the permissions of the folder."
            ) from None
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
        say(
            "The history is off: conversations, and what is derived from them, are neither kept nor read. What was "
            "kept stays."
        )
        say("Delete it with: edgellm history clear", style="dim")
    else:
        store.turn_on()
        say(f"The history is on: conversations are kept in {store.path}, and replies are drafted from them.")
    if as_json:
        emit(json.dumps({"on": store.on}))


def _show(found: HistoryFacts, as_json: bool) -> None:
    from edgellm.llm.pair_stats import kept
    from edgellm.storage.chat_log import describe_age, max_age

    there, age = kept(), describe_age(max_age())
    if as_json:
        emit(json.dumps({"path": str(found.path), "on": found.on, "conversations": found.conversations,
                         "size": found.size, "first": found.first and found.first.isoformat(),
                         "last": found.last and found.last.isoformat(), "keep": age, "all": asdict(there)},
                        indent=2))  # fmt: skip
        return
    state = "on" if found.on else "off: nothing is kept or read"
    out().print(
        facts(
            [("history", state), ("holds", str(there)), ("kept for", age), ("size", size(found.size)),
             ("from", _time(found.first)), ("to", _time(found.last)), ("path", one_line(str(found.path)))]
        )
    )  # fmt: skip


def _time(when: datetime | None) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC" if when else "-"
