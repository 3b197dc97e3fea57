"""`edgellm ps` and `stop`: the servers that this user runs, and the models in their memory; `edgellm service`: the one
that starts at login; `edgellm doctor`: the state of this device and its network.

The service is a systemd unit; other systems are told what to do instead.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from edgellm.cli.options import DEFAULT, DEFAULT_DRAFT, AsJson
from edgellm.cli.views import console as ui
from edgellm.errors import EdgeError, InvalidOption, ModelNotFound, ServerUnreachable, ServiceFailed, size
from edgellm.state import write_state

if TYPE_CHECKING:
    from edgellm.diagnostics import Finding
    from edgellm.http.running_servers import RunningServer

_SECONDS = 30.0  # limit for the end of a server with its replies in flight, and for a call of systemctl
_START = "Start one with: edgellm serve"


def ps(as_json: AsJson = False) -> None:
    from edgellm.http.running_servers import running_servers

    found = [asdict(server) | {"url": server.url, **_status(server)} for server in running_servers()]
    if as_json:
        ui.emit_json(found)
        return
    rows = []
    for server in found:
        models = [
            server | {"model": model["name"], "draft": model["draft"], "memory": size(sum(model["memory"].values())),
                      "used": f"by {model['users']}" if model["users"] else f"{_time(model['idle_s'])} ago",
                      "stays": "until it is stopped" if (left := model["expires_s"]) is None else _time(left)}
            for model in server["models"]
        ]  # fmt: skip
        models += [server | {"model": name, "used": "being loaded"} for name in server["loading"]]
        rows += models or [{"state": "no model in memory"} | server]
    ui.show(rows, _COLUMNS, False, empty=f"No HTTP server of yours is running. {_START}", fold="MODEL")


_COLUMNS: ui.Columns = {
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
        raise InvalidOption(f"No HTTP server of yours is running{where}.", f"edgellm ps lists them. {_START}")
    if len(named) > 1 and what is None:
        ports = ", ".join(str(server.port) for server in named)
        raise InvalidOption(f"{len(named)} servers are running, at the ports {ports}.", "Name one of them.")
    for server in named:
        if not server.stop(_SECONDS):
            what = f"Process {server.process} has been asked to end, and still runs."
            raise ServerUnreachable(what, "Its replies may take long; wait.")
        ui.say(f"The server at port {server.port} has ended.")


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
            ui.say(f"{model} is removed from the memory of the server at port {server.port}{after}.")
            return
        reasons.append(answer.get("error", {}).get("message", f"The server answered with the status {status}."))
    what = reasons[0] if reasons else f"No HTTP server of yours is running, so {model} is not in memory."
    raise ModelNotFound(ui.harmless(what), "edgellm ps lists what is.")


def _status(server: RunningServer) -> dict[str, Any]:
    """Return the models of a server, or its state where it has none to tell."""
    try:
        status, answer = server.ask("GET", "/status")
    except EdgeError as error:
        return {"state": "does not answer", "reason": str(error), "models": [], "loading": []}
    if status != 200:
        return {"state": "its first model is being loaded", "models": [], "loading": []}
    return {"models": answer.get("models", []), "loading": answer.get("loading", [])}


def _time(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.0f} h"


UNIT = "edgellm.service"
_KEPT = ("EDGELLM_HOME", "EDGELLM_INTERFACE", "EDGELLM_MODELS", "EDGELLM_PAIR", "HF_HOME", "HF_HUB_CACHE",
         "HF_ENDPOINT", "HF_HUB_OFFLINE")  # fmt: skip
"""The variables that a service needs to find the same files and networks; no token is written into a unit."""


def unit_file() -> Path:
    """Return the path of the unit. Raise InvalidOption, with what to do instead, on a system that needs no unit."""
    if sys.platform == "linux":
        config = os.environ.get("XDG_CONFIG_HOME")
        return (Path(config) if config else Path.home() / ".config") / "systemd" / "user" / UNIT
    if sys.platform == "darwin":
        raise InvalidOption(
            "edgellm installs no services on macOS.", f"Add as a login item: {shlex.join(serve_command([]))}"
        )
    task = subprocess.list2cmdline([subprocess.list2cmdline(serve_command([]))])
    instead = f"On Windows: schtasks /Create /SC ONLOGON /TN edgellm /TR {task}"
    raise InvalidOption("edgellm installs no services on this system.", instead)


def systemctl(*words: str) -> None:
    """Have systemd's manager of the user do something. Raise ServiceFailed where it is missing, fails or hangs."""
    command, instead = ["systemctl", "--user", *words], "Start it yourself: edgellm serve"
    if shutil.which(command[0]) is None:
        raise ServiceFailed(f"{command[0]} is not on this system, so nothing can be started at login.", instead)
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceFailed(f"{shlex.join(command)} failed: {error}.", instead) from error
    if done.returncode:
        said = " ".join(done.stderr.split()).rstrip(".") or f"exit code {done.returncode}"
        reason = f"there is no systemd for this user: {said}" if "bus" in said.lower() else said
        raise ServiceFailed(f"{shlex.join(command)} failed: {reason}.", instead)


def serve_command(words: Sequence[str]) -> list[str]:
    """Return the command that a service runs: this Python and this edgellm."""
    return [sys.executable, "-m", "edgellm", "serve", *words]


def unit_text(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a systemd unit that runs `command` at login, and again after a failure, except one of wrong usage."""
    variables = "".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in environment.items())
    return f"""\
# Written by: edgellm service install
[Unit]
Description=edgellm serve
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
ExecStart={" ".join(_quoted(word).replace("$", "$$") for word in command)}
{variables}Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    """Return a word as systemd reads it; percent signs are its own."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("%", "%%")
    return f'"{text}"'


def install_service(
    context: typer.Context,
    words: list[str] | None = typer.Argument(None, metavar="[OPTION]"),
    dry_run: bool = typer.Option(False, "--dry-run"),
    as_json: AsJson = False,
) -> None:
    root = context.find_root()
    serve = root.command.get_command(root, "serve")  # type: ignore[attr-defined]
    with serve.make_context("serve", list(words or ()), parent=root):
        """Its options are checked, and nothing is served."""
    file, command = unit_file(), serve_command(words or ())
    if not dry_run:
        systemctl("show-environment")  # fails without a manager of this user, before a file is written
        write_state(file, unit_text(command, {name: os.environ[name] for name in _KEPT if os.environ.get(name)}))
        for done in (("daemon-reload",), ("enable", UNIT), ("restart", UNIT)):
            systemctl(*done)
    if as_json:
        ui.emit_json({"file": str(file), "command": command, "installed": not dry_run})
        return
    ui.say(f"{'would start' if dry_run else 'started, now and at every login'}: {shlex.join(command)}")
    ui.say(f"{'would be ' if dry_run else ''}described in {file}", style="dim")
    if not dry_run:
        ui.say(f"See: systemctl --user status {UNIT}; journalctl --user -u {UNIT}", style="dim")


def uninstall_service(as_json: AsJson = False) -> None:
    file = unit_file()
    if not file.exists():
        raise InvalidOption("The service is not installed.", "To install it: edgellm service install")
    systemctl("disable", "--now", UNIT)
    file.unlink(missing_ok=True)
    systemctl("daemon-reload")
    ui.tell({"file": str(file), "installed": False}, as_json, f"stopped, and removed {file}")


_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    draft: str = typer.Option(DEFAULT, metavar="MODEL", envvar="EDGELLM_DRAFT", show_default=DEFAULT_DRAFT),
    peer: list[str] | None = typer.Option(None, metavar="HOST:PORT|URL"),
    as_json: AsJson = False,
) -> int:
    from edgellm.diagnostics import examine

    findings: list[Finding] = []
    if not as_json:
        ui.say("checking; this takes some seconds ...", style="dim")
    for one in examine(draft=draft, peers=peer or ()):
        findings.append(one)
        if not as_json:
            made = ui.grid({"min_width": 8}, {"min_width": 11, "style": "dim"}, {"overflow": "fold"})
            made.add_row(Text(one.state, style=_STYLES[one.state]), one.topic, ui.one_line(one.what))
            if one.next_step:
                made.add_row("", "", Text(f"→ {ui.one_line(one.next_step)}", style="cyan"))
            ui.out().print(made)
    count = sum(one.state == "problem" for one in findings)
    if as_json:
        ui.emit_json([asdict(one) for one in findings])
    else:
        ui.say(f"{ui.counted(count, 'problem')}." if count else "No problems found.", style="bold")
    return int(count > 0)
