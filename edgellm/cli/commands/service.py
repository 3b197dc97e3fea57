"""`edgellm service`: have `edgellm serve` start at login."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import asdict
from typing import Annotated

import typer

from edgellm.cli.options.models import AsJson
from edgellm.cli.user_service import ServiceStatus, serve_command, service_manager
from edgellm.cli.views.console import emit, say
from edgellm.errors import InvalidOption


def install(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTION]", help="Options of edgellm serve. Default: the settings'.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be installed, and change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    given = words or []
    check_options(context, given)
    manager, command = service_manager(), serve_command(given)
    if not dry_run:
        manager.install(command)
    if as_json:
        emit(json.dumps({"file": str(manager.file), "command": command, "installed": not dry_run}))
        return
    say(f"{'would start' if dry_run else 'started, now and at every login'}: {shlex.join(command)}")
    say(f"{'would be ' if dry_run else ''}described in {manager.file}", style="dim")
    if not dry_run:
        say("See: edgellm service status; edgellm service logs", style="dim")


def check_options(context: typer.Context, words: list[str]) -> None:
    """Raise what the command line of `edgellm serve` raises for these options."""
    root = context.find_root()
    command = root.command.get_command(root, "serve")  # type: ignore[attr-defined]
    with command.make_context("serve", list(words), parent=root):
        """Its options are parsed, and nothing is served."""


def uninstall(as_json: AsJson = False) -> None:
    manager = service_manager()
    if not manager.file.exists():
        raise InvalidOption("The service is not installed.", "To install it: edgellm service install")
    manager.uninstall()
    if as_json:
        emit(json.dumps({"file": str(manager.file), "installed": False}))
    else:
        say(f"stopped, and removed {manager.file}")


def status(as_json: AsJson = False) -> int:
    manager = service_manager()
    found = manager.status()
    if as_json:
        emit(json.dumps({**asdict(found), "file": str(manager.file)}))
    else:
        emit(_described(found))
        say(str(manager.file) if found.installed else "To install it: edgellm service install", style="dim")
    return 0 if found.running else 1


def _described(found: ServiceStatus) -> str:
    if not found.installed:
        return "not installed"
    since = f" since {found.since}" if found.since else ""
    running = f"running{since}, process {found.pid}" if found.running else "not running; see: edgellm service logs"
    return f"{running}; {'starts' if found.at_login else 'does not start'} at login"


def logs(
    lines: Annotated[int, typer.Option("-n", "--lines", metavar="N", min=1, help="Number of lines.")] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as lines are written.")] = False,
) -> int:
    return subprocess.call(service_manager().log_command(lines, follow=follow))
