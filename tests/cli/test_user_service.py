"""What starts at login, and the files that say so. The managers themselves are stand-ins that record what is asked."""

from __future__ import annotations

import os
import plistlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.cli.commands.service import (
    LABEL,
    UNIT,
    LaunchdManager,
    ServiceStatus,
    SystemdManager,
    serve_command,
    service_manager,
    unit_text,
)
from edgellm.errors import ServiceFailed
from tests.cli.conftest import Done

Edge = Callable[..., Done]
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a systemctl and a launchctl that write their arguments to `asked`, print the file `answer` and
    fail where there is a file `fails`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("systemctl", "launchctl"):
        script = folder / name
        script.write_text(
            f'#!/bin/sh\nhere={folder}\necho "$*" >> $here/asked\ncat $here/answer 2>/dev/null\n'
            "[ ! -e $here/fails ] || { cat $here/fails >&2; exit 1; }\n",
            encoding="utf-8",
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "a home"))
    return folder


def asked(tools: Path) -> list[str]:
    return (tools / "asked").read_text(encoding="utf-8").splitlines()


RUNNING = "ActiveState=active\nUnitFileState=enabled\nMainPID=42\nExecMainStartTimestamp=Tue 10:00\n"


def test_a_unit_is_written_enabled_started_described_and_removed_again(edge: Edge, tools: Path, tmp_path: Path) -> None:
    unit = tmp_path / "config" / "systemd" / "user" / UNIT
    assert edge("service", "status") == Done(1, "not installed\n", "To install it: edgellm service install\n")
    assert edge("service", "uninstall").code == 2
    assert "would start: " in edge("service", "install", "--dry-run", "--http-port", "8081").err
    assert not unit.exists()
    done = edge("service", "install", "--http-port", "8081", "--json")
    assert done.answer["command"] == [sys.executable, "-m", "edgellm", "serve", "--http-port", "8081"]
    text = unit.read_text(encoding="utf-8")
    assert f'ExecStart="{sys.executable}" "-m" "edgellm" "serve" "--http-port" "8081"\n' in text
    assert f'Environment="EDGELLM_HOME={tmp_path}/a home"\n' in text
    start = ["show-environment", "daemon-reload", f"enable {UNIT}", f"restart {UNIT}"]
    assert asked(tools) == [f"--user {words}" for words in start]
    (tools / "answer").write_text(RUNNING, encoding="utf-8")
    done = edge("service", "status")
    assert (done.code, done.out) == (0, "running since Tue 10:00, process 42; starts at login\n")
    assert edge("service", "status", "--json").answer["pid"] == 42
    (tools / "answer").write_text("ActiveState=failed\nUnitFileState=\nMainPID=0\n", encoding="utf-8")
    done = edge("service", "status")
    assert (done.code, done.out) == (1, "not running; see: edgellm service logs; does not start at login\n")
    assert edge("service", "uninstall").code == 0
    assert asked(tools)[-2:] == [f"--user disable --now {UNIT}", "--user daemon-reload"]
    assert not unit.exists()


@pytest.mark.parametrize("words", [("--rle", "worker"), ("--role", "wrker"), ("--http-port", "x")])
def test_options_that_serve_does_not_have_are_refused_before_anything_changes(
    edge: Edge, tools: Path, words: tuple[str, ...]
) -> None:
    done = edge("service", "install", *words)
    assert done.code == 2
    assert "See: edgellm serve --help" in done.err
    assert not (tools / "asked").exists()


def test_nothing_is_written_where_there_is_no_manager(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools / "fails").write_text("Failed to connect to bus: No medium found\n", encoding="utf-8")
    with pytest.raises(ServiceFailed, match="there is no systemd for this user: Failed to connect") as raised:
        SystemdManager().install(serve_command([]))
    assert "edgellm serve" in raised.value.next_step
    assert not SystemdManager().file.exists()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServiceFailed, match="systemctl is not on this system"):
        SystemdManager().install(serve_command([]))


@given(st.lists(st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"])), min_size=1))
def test_words_come_through_a_units_quoting(words: list[str]) -> None:
    (line,) = [one for one in unit_text(words, {}).split("\n") if one.startswith("ExecStart=")]
    escapes = {"\\n": "\n", "\\t": "\t", '\\"': '"', "\\\\": "\\"}
    read = [
        re.sub(r"\\.", lambda found: escapes[found[0]], word).replace("%%", "%").replace("$$", "$")
        for word in _WORD.findall(line.removeprefix("ExecStart="))
    ]
    assert read == words


def test_an_agent_is_written_and_loaded_and_removed_again(tools: Path, tmp_path: Path) -> None:
    manager = LaunchdManager()
    manager.install(serve_command(["--role", "worker"]))
    agent = plistlib.loads(manager.file.read_bytes())
    assert manager.file == tmp_path / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    assert agent["ProgramArguments"][1:] == ["-m", "edgellm", "serve", "--role", "worker"]
    assert agent["EnvironmentVariables"]["EDGELLM_HOME"] == str(tmp_path / "a home")
    assert agent["RunAtLoad"]
    assert [words.split()[0] for words in asked(tools)] == ["bootout", "bootstrap"]
    (tools / "answer").write_text(f"gui/501/{LABEL} = {{\n\tstate = running\n\tpid = 7\n", encoding="utf-8")
    assert manager.status() == ServiceStatus(True, True, True, 7)
    manager.uninstall()
    assert manager.status() == ServiceStatus(installed=False)


@pytest.mark.parametrize(("platform", "kind"), [("linux", SystemdManager), ("darwin", LaunchdManager)])
def test_each_system_has_its_manager(platform: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert type(service_manager()) is kind
