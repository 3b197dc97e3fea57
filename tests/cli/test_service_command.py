"""`edgellm service`, with a stand-in for the system's manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edgellm.cli.commands import service
from edgellm.cli.user_service import ServiceStatus
from tests.cli.conftest import Done

Edge = Callable[..., Done]


class Manager:
    """Keeps what it is asked in a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "unit"
        self.found = ServiceStatus(installed=True, at_login=True, running=True, pid=42, since="Tue 10:00")

    def install(self, command: Sequence[str]) -> None:
        self.file.write_text("\n".join(command), encoding="utf-8")

    def uninstall(self) -> None:
        self.file.unlink()

    def status(self) -> ServiceStatus:
        return self.found if self.file.exists() else ServiceStatus(installed=False)

    def log_command(self, lines: int, *, follow: bool) -> list[str]:
        return ["sh", "-c", f"exit {lines + follow}"]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    stand_in = Manager(tmp_path)
    monkeypatch.setattr(service, "service_manager", lambda: stand_in)
    return stand_in


def test_the_service_is_installed_described_and_removed(edge: Edge, manager: Manager) -> None:
    done = edge("service", "status")
    assert (done.code, done.out) == (1, "not installed\n")
    done = edge("service", "install", "--role", "worker", "--memory", "4", "--json")
    assert done.code == 0
    assert done.answer["command"][3:] == ["serve", "--role", "worker", "--memory", "4"]
    assert manager.file.read_text(encoding="utf-8").splitlines() == done.answer["command"]
    done = edge("service", "status")
    assert (done.code, done.out) == (0, "running since Tue 10:00, process 42; starts at login\n")
    assert edge("service", "status", "--json").answer["pid"] == 42
    manager.found = ServiceStatus(installed=True)
    done = edge("service", "status")
    assert done.code == 1
    assert "not running; see: edgellm service logs; does not start at login" in done.out
    assert edge("service", "uninstall").code == 0
    assert edge("service", "uninstall").code == 2


@pytest.mark.parametrize("words", [("--rle", "worker"), ("--role", "wrker"), ("--http-port", "x")])
def test_options_that_serve_does_not_have_are_refused_before_anything_changes(
    edge: Edge, manager: Manager, words: tuple[str, ...]
) -> None:
    done = edge("service", "install", *words)
    assert done.code == 2
    assert "See: edgellm serve --help" in done.err
    assert not manager.file.exists()


def test_a_dry_run_changes_nothing(edge: Edge, manager: Manager) -> None:
    done = edge("service", "install", "--dry-run", "--http-port", "8081")
    assert "would start: " in done.err
    assert "serve --http-port 8081" in done.err
    assert not manager.file.exists()


def test_logs_are_those_of_the_system(edge: Edge, manager: Manager) -> None:
    assert edge("service", "logs", "-n", "6", "--follow").code == 7
