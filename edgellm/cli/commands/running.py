"""`edgellm ps` and `stop`: the servers that this user runs, and the models in their memory; `edgellm doctor`: the state
of this device and its network."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from edgellm.cli.options import DEFAULT, DEFAULT_DRAFT, AsJson, Interfaces, model_names
from edgellm.cli.views.console import Columns, counted, emit_json, grid, harmless, one_line, out, say, show, size
from edgellm.errors import EdgeError, InvalidOption, ModelNotFound, ServerUnreachable

if TYPE_CHECKING:
    from edgellm.diagnostics import Finding
    from edgellm.http.running_servers import RunningServer

_GRACE_SECONDS = 20.0  # limit for replies in flight, and for the rest of the end
_START = "Start one with: edgellm serve"


def ps(as_json: AsJson = False) -> None:
    from edgellm.http.running_servers import running_servers

    found = [asdict(server) | {"url": server.url, **_status(server)} for server in running_servers()]
    if as_json:
        emit_json(found)
        return
    rows = []
    for server in found:
        models = [
            server | {"model": model["name"], "draft": model["draft"], "memory": size(sum(model["memory"].values())),
                      "used": _used(model), "stays": _stays(model)} for model in server["models"]
        ]  # fmt: skip
        models += [server | {"model": name, "used": "being loaded"} for name in server["loading"]]
        rows += models or [{"state": "no model in memory"} | server]
    show(rows, _COLUMNS, False, empty=f"No server of yours is running. {_START}", fold="MODEL")


_COLUMNS: Columns = {
    "PORT": "port", "PROCESS": "process", "MODEL": lambda row: row.get("model") or row["state"], "DRAFT": "draft",
    "MEMORY": "memory", "USED": "used", "STAYS": "stays",
}  # fmt: skip


def stop(what: str | None = typer.Argument(None, metavar="[MODEL|PORT]", show_default=False)) -> None:
    from edgellm.http.running_servers import running_servers

    servers = running_servers()
    if what is not None and not what.isdigit():
        _unload(what, servers)
        return
    named = [server for server in servers if what is None or server.port == int(what)]
    if not named:
        where = "" if what is None else f" at port {what}"
        raise InvalidOption(f"No server of yours is running{where}.", f"edgellm ps lists them. {_START}")
    if len(named) > 1 and what is None:
        ports = ", ".join(str(server.port) for server in named)
        raise InvalidOption(f"{len(named)} servers are running, at the ports {ports}.", "Name one of them.")
    for server in named:
        if not server.stop(_GRACE_SECONDS):
            what = f"Process {server.process} has been asked to end, and still runs."
            raise ServerUnreachable(what, "Its replies may take long; wait.")
        say(f"The server at port {server.port} has ended.")


def _unload(model: str, servers: list[RunningServer]) -> None:
    """Remove a model from the memory of a server that has it. Raise ModelNotFound where none has."""
    reasons = []
    for server in servers:
        try:
            status, answer = server.ask("POST", "/models/unload", {"model": model})
        except ServerUnreachable as error:
            reasons.append(str(error))
            continue
        if status == 200:
            after = "" if answer["unloaded"] else " once its replies have ended"
            say(f"{model} is removed from the memory of the server at port {server.port}{after}.")
            return
        reasons.append(answer.get("error", {}).get("message", f"The server answered with the status {status}."))
    what = reasons[0] if reasons else f"No server of yours is running, so {model} is not in memory."
    raise ModelNotFound(harmless(what), "edgellm ps lists what is.")


def _status(server: RunningServer) -> dict[str, Any]:
    """Return the models of a server, or its state where it has none to tell."""
    try:
        status, answer = server.ask("GET", "/status")
    except EdgeError as error:
        return {"state": "does not answer", "reason": str(error), "models": [], "loading": []}
    if status != 200:
        return {"state": "its first model is being loaded", "models": [], "loading": []}
    return {"models": answer.get("models", []), "loading": answer.get("loading", [])}


def _used(model: dict[str, Any]) -> str:
    return f"by {model['users']}" if model["users"] else f"{_time(model['idle_s'])} ago"


def _stays(model: dict[str, Any]) -> str:
    return "until it is stopped" if model["expires_s"] is None else _time(max(0.0, model["expires_s"]))


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.0f} h"


_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    draft: str = typer.Option(
        DEFAULT, metavar="MODEL", envvar="EDGELLM_DRAFT", autocompletion=model_names, show_default=DEFAULT_DRAFT
    ),
    peer: list[str] | None = typer.Option(None, metavar="HOST:PORT|URL"),
    interface: Interfaces = None,
    as_json: AsJson = False,
) -> int:
    from edgellm.diagnostics import examine

    findings: list[Finding] = []
    if not as_json:
        say("checking; this takes some seconds ...", style="dim")
    for one in examine(draft=draft, peers=peer or (), interfaces=interface or ()):
        findings.append(one)
        if not as_json:
            made = grid({"min_width": 8}, {"min_width": 11, "style": "dim"}, {"overflow": "fold"})
            made.add_row(Text(one.state, style=_STYLES[one.state]), one.topic, one_line(one.what))
            if one.next_step:
                made.add_row("", "", Text(f"→ {one_line(one.next_step)}", style="cyan"))
            out().print(made)
    count = sum(one.state == "problem" for one in findings)
    if as_json:
        emit_json([asdict(one) for one in findings])
    else:
        say(f"{counted(count, 'problem')}." if count else "No problems found.", style="bold")
    return int(count > 0)
