"""`edgellm history` and `conversations`: what is kept of past conversations, in sum and one by one."""

from dataclasses import asdict
from datetime import datetime
from typing import Literal, TypeAlias

import typer

from edgellm.cli.options import AsJson, Yes
from edgellm.cli.views import console as ui
from edgellm.errors import InvalidOption, size
from edgellm.storage.chat_log import History, describe_age, max_age, parse_age, set_max_age

Action: TypeAlias = Literal["show", "clear", "off", "on", "keep"]


def history(
    action: Action = typer.Argument("show", metavar="ACTION"),
    age: str | None = typer.Argument(None, metavar="AGE", show_default=False),
    yes: bool = typer.Option(False, "-y", "--yes"),
    as_json: AsJson = False,
) -> None:
    from edgellm.llm.pair_stats import forget, kept, tidy

    store = History()
    for given, owner, what in (("--yes" * yes, "clear", "it"), (repr(age[:40]) if age else "", "keep", "an age")):
        if given and action != owner:
            next_step = f"Leave it out; {what} belongs to `history {owner}`."
            raise InvalidOption(f"{given} has no meaning for `history {action}`.", next_step)
    if action in ("show", "clear"):
        tidy()
    if action == "keep":
        _keep(age, as_json)
    elif action == "clear":
        if not yes and (there := kept()).total:
            ui.make_sure("delete", str(there), yes=False)
        gone = forget()
        ui.tell({"forgotten": gone.total, **asdict(gone)}, as_json, f"deleted {gone}")
    elif action == "show":
        _show(store, as_json)
    else:
        _turn(store, action, as_json)


def _keep(age: str | None, as_json: bool) -> None:
    from edgellm.llm.pair_stats import expire

    if age is not None:
        set_max_age(parse_age(age))
        expire()
    kept = "Conversations are kept until you clear them."
    if (found := max_age()) is not None:
        kept = f"Conversations, and what is derived from them, are kept for at most {found.days} days."
    ui.tell({"keep": describe_age(found)}, as_json, kept)


def _turn(store: History, action: Action, as_json: bool) -> None:
    if action == "off":
        store.turn_off()
        off = "The history is off: conversations, and what is derived from them, are neither kept nor read."
        ui.say(f"{off} What was kept stays.")
        ui.say("Delete it with: edgellm history clear", style="dim")
    else:
        store.turn_on()
        ui.say(f"The history is on: conversations are kept in {store.path}, and replies are drafted from them.")
    if as_json:
        ui.emit_json({"on": store.on})


def _show(store: History, as_json: bool) -> None:
    from edgellm.llm.pair_stats import kept, kept_bytes

    found, there, taken, age = store.all(), kept(), kept_bytes(), describe_age(max_age())
    first, last = (found[-1].when, found[0].when) if found else (None, None)
    if as_json:
        ui.emit_json({"path": str(store.path), "on": store.on, "conversations": len(found), "size": taken,
                   "first": first and first.isoformat(), "last": last and last.isoformat(),
                   "keep": age, "all": asdict(there)})  # fmt: skip
        return
    state = "on" if store.on else "off: nothing is kept or read"
    begin, end = (f"{when:%Y-%m-%d %H:%M} UTC" if when else "-" for when in (first, last))
    rows = [("history", state), ("holds", str(there)), ("kept for", age), ("size", size(taken))]
    ui.out().print(ui.facts([*rows, ("from", begin), ("to", end), ("path", ui.one_line(str(store.path)))]))
    for path in store.damaged:
        ui.say(f"{ui.one_line(str(path))} holds no conversation, and is not read.")


def conversations(
    action: Literal["list", "show", "rm"] = typer.Argument("list", metavar="ACTION"),
    which: list[str] | None = typer.Argument(None, metavar="[ID]"),
    everything: bool = typer.Option(False, "--all"),
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    store = History()
    if action == "list":
        if which:
            what = f"`conversations list` takes no IDs, but {which[0]!r} is given."
            raise InvalidOption(what, "See: edgellm conversations --help")
        rows = [
            {"id": one.id, "when": one.when.isoformat(), "turns": len(one.turns), "title": one.title}
            for one in store.all()
        ]
        empty = "There are no conversations. Those of `edgellm chat` are kept while the history is on."
        hint = "Continue one with: edgellm chat -c, or edgellm chat --conversation ID"
        ui.show(rows, _COLUMNS, as_json, empty=empty, hint=hint)
        return
    if everything == bool(which) or (everything and action != "rm"):
        what = f"`conversations {action}` needs IDs (or rm --all)."
        raise InvalidOption(what, "List them with: edgellm conversations")
    chosen = store.all() if everything else [store.find(one) for one in which or ()]
    if action == "show":
        for one in chosen:
            if as_json:
                turns = [{"role": role, "content": text} for role, text in one.turns]
                ui.emit_json({"id": one.id, "turns": turns}, indent=None)
            else:
                ui.emit("\n\n".join(f"{role}: {ui.harmless(text)}" for role, text in one.turns))
        return
    if chosen:
        ui.make_sure("remove", ui.counted(len(chosen), "conversation"), yes=yes)
    for one in chosen:
        store.remove(one)
    removed = {"removed": [one.id for one in chosen]}
    ui.tell(removed, as_json, f"removed {ui.counted(len(chosen), 'conversation')}")


_COLUMNS: ui.Columns = {
    "ID": "id",
    "WHEN": lambda row: f"{datetime.fromisoformat(row['when']).astimezone():%Y-%m-%d %H:%M}",
    " TURNS": "turns",
    "FIRST QUESTION": "title",
}
