"""This machine: kept awake while it works, and woken up by a magic packet."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.sleeping import KeepAwake, waking
from tests.waiting import until


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_it_is_kept_awake_until_the_last_work_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    program, log = tmp_path / ("systemd-inhibit" if system == "linux" else "caffeinate"), tmp_path / "log"
    program.write_text(f"#!/bin/sh\necho begun >> {log}\ncat\necho ended >> {log}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    awake, told = KeepAwake(system), list[str]()
    with awake.working():
        """Nothing is done before it is wanted."""
    awake.begin(0.0, told.append)
    with awake.working(), awake.working():
        awake.touch()
        until(log.exists)
        assert log.read_text() == "begun\n"
    until(lambda: log.read_text() == "begun\nended\n")
    assert not told


def test_where_it_cannot_be_kept_awake_work_goes_on_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for system in ("linux", "plan9"):
        awake, told = KeepAwake(system), list[str]()
        awake.begin(0.0, told.append)
        with awake.working():
            until(lambda told=told: bool(told))  # type: ignore[misc]
        awake.touch()
        assert len(told) == 1
        assert told[0].startswith("This machine may fall asleep while it works for others")


LINUX = "Supports Wake-on: pumbg\n\tWake-on: {}\n"
ARMED = "HID Keyboard Device\n{}\n"


@pytest.mark.parametrize(
    ("system", "printed", "state", "says"),
    [
        ("linux", LINUX.format("g"), "ok", "wakes this machine by lan0 (wired)"),
        ("linux", LINUX.format("d"), "note", "sudo ethtool -s lan0 wol g"),
        ("linux", "", "note", "unknown"),
        ("darwin", " womp                 1\n", "ok", "wakes"),
        ("darwin", " womp                 0\n", "note", "sudo pmset -a womp 1"),
        ("win32", ARMED.format("Intel(R) Ethernet Connection I219-V"), "ok", "wakes"),
        ("win32", ARMED.format(""), "note", "powercfg /deviceenablewake"),
        ("plan9", "", "note", "unknown"),
    ],
)
def test_doctor_says_by_what_it_can_be_woken(tmp_path: Path, system: str, printed: str, state: str, says: str) -> None:
    power = tmp_path / "lan0" / "device" / "power"
    power.mkdir(parents=True)
    (power / "wakeup").write_text("enabled\n")
    found = waking("lan0", system, lambda _words: printed, tmp_path)
    assert found[0] == state
    assert says in " ".join(found)
    if system == "linux":  # the card would, but the system does not let it
        (power / "wakeup").write_text("disabled\n")
        (tmp_path / "lan0" / "wireless").mkdir()
        assert waking("lan0", system, lambda _words: printed, tmp_path)[2].endswith("wowlan enable magic-packet")
        assert waking("lo", system, lambda _words: printed, tmp_path)[0] == "note"
