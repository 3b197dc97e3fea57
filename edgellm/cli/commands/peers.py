"""`edgellm peers`: the paired devices and their rights here."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from edgellm.cli.commands.pair import read_grant
from edgellm.cli.options.models import AsJson, Interfaces, peer_names
from edgellm.cli.views.console import emit, format_age, one_line, out, say, size, table
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from rich.table import Table

    from edgellm.rpc.discovery.peer_probe import ProbeResult
    from edgellm.rpc.trust.peer_store import Peers


Action: TypeAlias = Literal["list", "rm", "rename", "grant", "revoke", "path"]


def peers(
    action: Annotated[
        Action,
        typer.Argument(metavar="ACTION",
                       help="list; rm: unpair; rename; grant or revoke rights; path: print the path of the list."),
    ] = "list",
    device: Annotated[
        str | None, typer.Argument(metavar="DEVICE", help="Name or ID of a device.", autocompletion=peer_names)
    ] = None,
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="New name; or rights: verify, compute, files, all.")
    ] = None,
    ask: Annotated[bool, typer.Option("--ask/--no-ask", help="Ask each device whether it is there.")] = True,
    interface: Interfaces = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    from edgellm.rpc.trust.peer_store import Peers

    store = Peers()
    if action in ("list", "path") and device is not None:
        raise InvalidOption(f"`peers {action}` takes no device.", "Leave it out: edgellm peers")
    if action == "path":
        emit(json.dumps({"path": str(store.path)}) if as_json else str(store.path))
    elif action == "list":
        _list(store, interface, ask, as_json)
    else:
        _change(store, action, device, value, as_json)


def _change(store: Peers, action: Action, device: str | None, value: str | None, as_json: bool) -> None:
    if device is None:
        raise InvalidOption(f"`peers {action}` needs a device.", f"For example: edgellm peers {_EXAMPLES[action]}")
    if (value is None) is not (action == "rm"):
        what = "takes no value" if action == "rm" else "needs a value"
        raise InvalidOption(f"`peers {action} {device}` {what}.", f"For example: edgellm peers {_EXAMPLES[action]}")
    peer = store.find(device)
    if action == "rm":
        store.remove(peer.id)
        say(f"{peer.name} ({peer.id.short}) is unpaired; its requests here end.")
        say("Unpair this device there too, with edgellm peers rm, so that it is not asked any more.", style="dim")
    elif action == "rename":
        new = store.rename(peer.id, value or "")
        say(f"{peer.name} ({peer.id.short}) is now called {new.name} here.")
    else:
        change = store.grant if action == "grant" else store.revoke
        new = change(peer.id, read_grant(value or ""))
        say(f"The rights of {peer.name} ({peer.id.short}) here: {', '.join(sorted(new.rights)) or 'none'}.")
    if as_json:
        now = store.get(peer.id)
        emit(json.dumps({"id": str(peer.id), "name": now.name if now else peer.name, "paired": now is not None,
                         "may_here": sorted(now.rights) if now else []}))  # fmt: skip


def _list(store: Peers, interface: list[str] | None, ask: bool, as_json: bool) -> None:
    from edgellm.rpc.discovery.interfaces import chosen_hosts
    from edgellm.rpc.discovery.peer_probe import ProbeResult, probe_peers
    from edgellm.rpc.trust.trust import Trust

    known = store.all()
    if ask and known:
        answers = probe_peers(Trust.load(), known, chosen_hosts(interface or ()))
    else:
        answers = [ProbeResult(peer, None, None, False) for peer in known]
    if as_json:
        emit(json.dumps([_row(answer) for answer in answers], indent=2))
    elif not answers:
        say("No device is paired with this one. Pair one with: edgellm pair")
    else:
        out().print(_table(answers, ask))
        for answer in answers:
            if answer.error is not None:
                say(f"{answer.peer.name}: {answer.error}", style="dim")


def _table(answers: list[ProbeResult], asked: bool) -> Table:
    rows = table("name", "id", "may here", "may there", "address", "last seen", "round trip", "offers", "version",
                 right=("round trip",), fold="offers")  # fmt: skip
    for answer in answers:
        peer, welcomed = answer.peer, answer.info
        address = welcomed.address if welcomed is not None else next(iter(peer.addresses), None)
        last_seen = "now" if welcomed is not None else format_age((datetime.now(UTC) - peer.seen).total_seconds())
        rows.add_row(
            one_line(peer.name),
            peer.id.short,
            ", ".join(sorted(peer.rights)) or "nothing",
            ", ".join(sorted(peer.granted if welcomed is None else welcomed.rights)) or "nothing",
            str(address or "-"),
            last_seen,
            f"{welcomed.seconds * 1e3:.1f} ms" if welcomed is not None else "-" if asked else "not asked",
            one_line(", ".join(f"{one.model} ({size(one.size)})" for one in welcomed.offers) or "-")
            if welcomed
            else "-",
            one_line(welcomed.version) if welcomed is not None else "-",
        )
    return rows


def _row(answer: ProbeResult) -> dict[str, Any]:
    peer, welcomed = answer.peer, answer.info
    return {
        "name": peer.name,
        "id": str(peer.id),
        "short": peer.id.short,
        "may_here": sorted(peer.rights),
        "may_there": sorted(peer.granted if welcomed is None else welcomed.rights),
        "addresses": [str(address) for address in peer.addresses],
        "paired": peer.paired.isoformat(),
        "last_seen": peer.seen.isoformat(),
        "there": welcomed is not None,
        "address": str(welcomed.address) if welcomed is not None else None,
        "round_trip_ms": round(welcomed.seconds * 1e3, 3) if welcomed is not None else None,
        "version": welcomed.version if welcomed is not None else None,
        "offers": [
            {"role": one.role, "model": one.model, "size": one.size, "vocabulary": one.vocabulary}
            for one in (welcomed.offers if welcomed is not None else ())
        ],
        "trouble": str(answer.error) if answer.error is not None else None,
    }


_EXAMPLES = {
    "rm": "rm phone",
    "rename": "rename phone old-phone",
    "grant": "grant phone files",
    "revoke": "revoke phone verify",
}
