"""A child process answers, or an error says why it does not; and it is gone when it should be."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.errors import EngineFailed, Stopped
from edgellm.isolation import child_process
from edgellm.isolation.child_process import ChildFailed, ChildProcess, LimitExceeded, Limits, cause_of, start_child

MODULE = "tests.isolation.unruly"
LIMITS = Limits(seconds=60.0, memory=2**40, answer=2**10)
GONE = 60.0  # seconds until a process that ends has ended, at most


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    child = ChildProcess(MODULE)
    yield child
    child.close()
    assert not child.alive


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_characters="#", codec="utf-8"), max_size=200))
def test_what_is_asked_is_answered(child: ChildProcess, text: str) -> None:
    assert child.ask(f"-{text}".encode(), LIMITS).decode() == f"-{text}"[::-1]


def test_nothing_and_much_are_answered_too(child: ChildProcess) -> None:
    assert child.ask(b"", LIMITS) == b""
    assert child.ask(b"nothing", LIMITS) == b""
    assert child.ask(b"ab" * 2**20, Limits(60.0, 2**40, 2**21)) == b"ba" * 2**20


def test_what_a_library_prints_is_no_answer(child: ChildProcess) -> None:
    assert child.ask(b"print", LIMITS) == b"done"
    assert child.ask(b"abc", LIMITS) == b"cba"


@pytest.mark.parametrize(
    ("request_", "limits", "why"),
    [
        (b"compute", Limits(0.2, 2**40, 2**10), "more than 0.2 s of the processor"),
        (b"take memory", Limits(60.0, 2**26, 2**10), "more than 64 MiB of memory"),
        (b"run out of memory", LIMITS, "exceeds its memory limit"),
        (b"much", LIMITS, "its answer has 16777217 bytes; 1024 are allowed"),
        (b"announce too much", LIMITS, "its answer has 9223372036854775808 bytes"),
    ],
)
def test_limits_hold(child: ChildProcess, request_: bytes, limits: Limits, why: str) -> None:
    assert child.ask(b"abc", LIMITS) == b"cba"
    with pytest.raises(LimitExceeded, match=why):
        child.ask(request_, limits)
    assert not child.alive


def test_a_child_that_only_waits_is_ended(child: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert child.ask(b"abc", LIMITS) == b"cba"
    monkeypatch.setattr(child_process, "GRACE_SECONDS", 0.0)
    with pytest.raises(LimitExceeded, match="it takes more than 1 s"):
        child.ask(b"sleep", Limits(0.1, 2**40, 2**10))
    assert not child.alive


@pytest.mark.parametrize(("request_", "why"), [(b"raise", "exit code 1"), (b"abort", "SIGABRT")])
def test_what_ends_the_child_is_told(child: ChildProcess, request_: bytes, why: str) -> None:
    with pytest.raises(ChildFailed, match=f"its process ended with {why}"):
        child.ask(request_, LIMITS)
    assert not child.alive


@pytest.mark.parametrize("request_", [b"end", b"half"])
def test_a_child_that_has_nothing_more_to_do_is_no_crash(child: ChildProcess, request_: bytes) -> None:
    with pytest.raises(BrokenPipeError):
        child.ask(request_, LIMITS)


def test_an_idle_child_ends() -> None:
    idle = ChildProcess(MODULE, "0.01")
    assert idle._process.wait(GONE) == 0
    with pytest.raises(BrokenPipeError):
        idle.ask(b"abc", LIMITS)
    idle.close()


def test_who_has_given_up_is_heard(child: ChildProcess) -> None:
    looks = iter([False, False, True])
    with pytest.raises(Stopped):
        child.ask(b"sleep", LIMITS, lambda: next(looks))
    assert not child.alive


def test_a_child_that_is_killed_while_it_works_is_no_fault_of_the_request(child: ChildProcess) -> None:
    child.ask(b"abc", LIMITS)
    process = psutil.Process(child._process.pid)
    used = process.cpu_times().user
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(child.ask, b"compute", LIMITS)
        while process.cpu_times().user < used + 0.05:
            pass
        process.kill()
        with pytest.raises(EngineFailed, match="was ended by SIGKILL"):
            asked.result()
    assert not child.alive


def test_a_child_that_is_forgotten_ends() -> None:
    child = ChildProcess(MODULE)
    process = psutil.Process(child._process.pid)
    assert process.is_running()
    del child
    assert not process.is_running()


def test_a_child_has_the_variables_it_is_given_and_no_file_of_ours(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        child = ChildProcess(MODULE, environment={"GIVEN": "1"})
        variables = child.ask(b"variables", Limits(60.0, 2**40, 2**16)).decode().split()
        assert "secret" not in str(psutil.Process(child._process.pid).open_files())
    child.close()
    assert {*variables} - {"LC_CTYPE"} == {"GIVEN", "PYTHONPATH"}


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineFailed, match="No child process can be started"):
        start_child(MODULE)


def test_causes() -> None:
    assert cause_of(-signal.SIGSEGV) == "SIGSEGV"
    assert cause_of(3) == "exit code 3"
    assert cause_of(0xC0000005) == f"exit code {0xC0000005}"  # of Windows
    with pytest.raises(EngineFailed, match="ended by SIGTERM"):
        cause_of(-signal.SIGTERM)
