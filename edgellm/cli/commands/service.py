"""`edgellm service`: a service of the user's own, which starts `edgellm serve` at login.

On Linux it is a systemd unit, on macOS a launchd agent, which has not been tried on a Mac.
"""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import typer

from edgellm.cli.options import AsJson
from edgellm.cli.views.console import emit, emit_json, say, tell
from edgellm.errors import InvalidOption, ServiceFailed
from edgellm.state import write_state
from edgellm.system import state_dir, user

UNIT, LABEL = "edgellm.service", "local.edgellm.serve"
_SECONDS = 30.0  # limit for a call of systemctl or launchctl
_KEPT = ("EDGELLM_HOME", "EDGELLM_PAIR", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE")
"""The variables that a service needs to find the same files; no token is written into a unit."""
_SHOWN = ("ActiveState", "UnitFileState", "MainPID", "ExecMainStartTimestamp")


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The state of the service, its process, and since when it runs, as the system says."""

    installed: bool
    at_login: bool = False
    running: bool = False
    pid: int | None = None
    since: str = ""

    def __str__(self) -> str:
        if not self.installed:
            return "not installed"
        since = f" since {self.since}" if self.since else ""
        running = f"running{since}, process {self.pid}" if self.running else "not running; see: edgellm service logs"
        return f"{running}; {'starts' if self.at_login else 'does not start'} at login"


class SystemdManager:
    """systemd's manager of the user."""

    def __init__(self) -> None:
        config = os.environ.get("XDG_CONFIG_HOME")
        self.file = (Path(config) if config else Path.home() / ".config") / "systemd" / "user" / UNIT

    def install(self, command: Sequence[str]) -> None:
        """Write the unit, then enable and start it. Raise ServiceFailed where there is no manager of this user."""
        self._ask("show-environment")  # fails without a manager, before a file is written
        write_state(self.file, unit_text(command, _environment()))
        self._ask("daemon-reload")
        self._ask("enable", UNIT)
        self._ask("restart", UNIT)

    def uninstall(self) -> None:
        """Stop and disable the unit, and remove its file."""
        self._ask("disable", "--now", UNIT)
        self.file.unlink(missing_ok=True)
        self._ask("daemon-reload")

    def status(self) -> ServiceStatus:
        """Return what systemd knows of the unit."""
        if not self.file.exists():
            return ServiceStatus(installed=False)
        lines = self._ask("show", UNIT, *(f"--property={name}" for name in _SHOWN)).splitlines()
        found = dict(line.partition("=")[::2] for line in lines)
        running, pid = found.get("ActiveState") in ("active", "reloading"), int(found.get("MainPID") or 0) or None
        since = found.get("ExecMainStartTimestamp", "") if running else ""
        return ServiceStatus(True, found.get("UnitFileState") == "enabled", running, pid, since)

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        """Return the call of journalctl."""
        return ["journalctl", "--user", f"--unit={UNIT}", f"--lines={lines}", "--no-pager", *["--follow"] * follow]

    @staticmethod
    def _ask(*words: str) -> str:
        return _call(["systemctl", "--user", *words], "there is no systemd for this user")


class LaunchdManager:
    """launchd's domain of the user. Not tried on a Mac."""

    def __init__(self) -> None:
        self.file = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self.log = state_dir() / "logs" / "serve.log"
        self._domain = f"gui/{user()}"

    def install(self, command: Sequence[str]) -> None:
        """Write the agent and load it, in place of an earlier one."""
        with suppress(ServiceFailed):  # there is no earlier agent
            self._ask("bootout", f"{self._domain}/{LABEL}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        write_state(self.file, agent_plist(command, _environment(), self.log))
        self._ask("bootstrap", self._domain, str(self.file))

    def uninstall(self) -> None:
        """Unload the agent and remove it."""
        self._ask("bootout", f"{self._domain}/{LABEL}")
        self.file.unlink(missing_ok=True)

    def status(self) -> ServiceStatus:
        """Return what launchd knows of the agent."""
        if not self.file.exists():
            return ServiceStatus(installed=False)
        try:
            lines = self._ask("print", f"{self._domain}/{LABEL}").splitlines()
        except ServiceFailed:
            return ServiceStatus(installed=True)
        found = dict(line.strip().partition(" = ")[::2] for line in lines)
        pid = found.get("pid", "")
        return ServiceStatus(True, True, found.get("state") == "running", int(pid) if pid.isdigit() else None)

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        """Return the call of tail."""
        return ["tail", "-n", str(lines), *["-f"] * follow, str(self.log)]

    @staticmethod
    def _ask(*words: str) -> str:
        return _call(["launchctl", *words], "launchd does not answer")


ServiceManager: TypeAlias = SystemdManager | LaunchdManager
"""A manager of programs that start at login. All methods raise ServiceFailed where the system's own tool fails."""


def serve_command(words: Sequence[str]) -> list[str]:
    """Return the command that a service runs: this Python and this edgellm."""
    return [sys.executable, "-m", "edgellm", "serve", *words]


def service_manager() -> ServiceManager:
    """Return this system's manager of user services. Raise InvalidOption, with what to do instead, without one."""
    if sys.platform == "linux":
        return SystemdManager()
    if sys.platform == "darwin":
        return LaunchdManager()
    task = subprocess.list2cmdline([subprocess.list2cmdline(serve_command([]))])
    instead = f"On Windows: schtasks /Create /SC ONLOGON /TN edgellm /TR {task}"
    raise InvalidOption("edgellm installs no services on this system.", instead)


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


def agent_plist(command: Sequence[str], environment: Mapping[str, str], log: Path) -> bytes:
    """Return a launchd agent that runs `command` at login, and again after a failure."""
    return plistlib.dumps({
        "Label": LABEL, "ProgramArguments": list(command), "EnvironmentVariables": dict(environment),
        "RunAtLoad": True, "KeepAlive": {"SuccessfulExit": False}, "StandardErrorPath": str(log),
        "StandardOutPath": str(log),
    })  # fmt: skip


def _quoted(word: str) -> str:
    """Return a word as systemd reads it; percent signs are its own."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("%", "%%")
    return f'"{text}"'


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _KEPT if os.environ.get(name)}


def _call(words: Sequence[str], no_manager: str) -> str:
    """Run a tool of the system, and return what it prints. Raise ServiceFailed where it is missing, fails or hangs."""
    instead = "Start it yourself: edgellm serve"
    if shutil.which(words[0]) is None:
        raise ServiceFailed(f"{words[0]} is not on this system, so nothing can be started at login.", instead)
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceFailed(f"{shlex.join(words)} failed: {error}.", instead) from error
    if done.returncode:
        said = " ".join(done.stderr.split()).rstrip(".") or f"exit code {done.returncode}"
        reason = f"{no_manager}: {said}" if "bus" in said.lower() else said
        raise ServiceFailed(f"{shlex.join(words)} failed: {reason}.", instead)
    return done.stdout


def install(
    context: typer.Context,
    words: list[str] | None = typer.Argument(None, metavar="[OPTION]"),
    dry_run: bool = typer.Option(False, "--dry-run"),
    as_json: AsJson = False,
) -> None:
    root = context.find_root()
    serve = root.command.get_command(root, "serve")  # type: ignore[attr-defined]
    with serve.make_context("serve", list(words or ()), parent=root):
        """Its options are checked, and nothing is served."""
    manager, command = service_manager(), serve_command(words or ())
    if not dry_run:
        manager.install(command)
    if as_json:
        emit_json({"file": str(manager.file), "command": command, "installed": not dry_run})
        return
    say(f"{'would start' if dry_run else 'started, now and at every login'}: {shlex.join(command)}")
    say(f"{'would be ' if dry_run else ''}described in {manager.file}", style="dim")
    if not dry_run:
        say("See: edgellm service status; edgellm service logs", style="dim")


def uninstall(as_json: AsJson = False) -> None:
    manager = service_manager()
    if not manager.file.exists():
        raise InvalidOption("The service is not installed.", "To install it: edgellm service install")
    manager.uninstall()
    tell({"file": str(manager.file), "installed": False}, as_json, f"stopped, and removed {manager.file}")


def status(as_json: AsJson = False) -> int:
    manager = service_manager()
    found = manager.status()
    if as_json:
        emit_json({**asdict(found), "file": str(manager.file)})
    else:
        emit(str(found))
        say(str(manager.file) if found.installed else "To install it: edgellm service install", style="dim")
    return 0 if found.running else 1


def logs(
    lines: int = typer.Option(50, "-n", "--lines", metavar="N", min=1),
    follow: bool = typer.Option(False, "-f", "--follow"),
) -> int:
    return subprocess.call(service_manager().log_command(lines, follow=follow))
