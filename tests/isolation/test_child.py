"""A child process answers, or an error says why it does not; and it is gone when it should be."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.errors import EngineFailed, InvalidOption, Stopped
from edgellm.isolation import child as children
from edgellm.isolation.child import Child, ChildFailed, ChildKind, ChildSilent, LimitExceeded, Limits
from tests.programs import ROOT
from tests.waiting import until

KIND = ChildKind("tests.isolation.unruly", "does what it is told", keeps_words=True)
LIMITS = Limits(answer=2**10)
GONE = 60.0  # seconds until a process that ends has ended, at most


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child(KIND)
    yield child
    child.close()
    assert not child.alive


def told(child: Child, what: str, limits: Limits = LIMITS, stopped: Callable[[], bool] | None = None) -> bytes:
    return bytes(child.call("act", limits, what.encode(), stopped).data)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_characters="#", codec="utf-8"), max_size=200))
def test_what_is_asked_is_answered(child: Child, text: str) -> None:
    assert told(child, f"-{text}").decode() == f"-{text}"[::-1]


def test_nothing_much_and_values_are_answered_too(child: Child) -> None:
    assert told(child, "") == told(child, "nothing") == b""
    assert told(child, "ab" * 2**20, Limits(2**21)) == b"ba" * 2**20
    assert child.call("act", LIMITS, b"a value").value == [1, "two"]


def test_what_a_library_prints_is_no_answer(child: Child) -> None:
    assert told(child, "print") == b"done"
    assert told(child, "abc") == b"cba"
    assert child.last_words() == "no answer"


def test_its_own_errors_are_raised_here_and_it_goes_on(child: Child) -> None:
    for _ in range(2):
        with pytest.raises(InvalidOption, match=r"It is 7\. Give 8\."):
            told(child, "refuse")
    assert child.alive


@pytest.mark.parametrize(
    ("what", "limits", "why"),
    [
        ("compute", Limits(2**10, seconds=0.2), "more than 0.2 s of the processor"),
        ("take memory", Limits(2**10, memory=2**26), "more than 64 MiB of memory"),
        ("run out of memory", LIMITS, "exceeds its memory limit"),
        ("much", LIMITS, r"its answer has 167772\d\d bytes; 66560 are allowed"),
        ("announce too much", LIMITS, "its answer has 9223372036854775808 bytes"),
    ],
)
def test_limits_hold(child: Child, what: str, limits: Limits, why: str) -> None:
    assert told(child, "abc") == b"cba"
    with pytest.raises(LimitExceeded, match=why):
        told(child, what, limits)
    assert not child.alive
    assert told(child, "abc") == b"cba"  # it is started once more


def test_a_child_that_only_waits_is_ended(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(child, "abc") == b"cba"
    monkeypatch.setattr(children, "GRACE_SECONDS", 0.0)
    with pytest.raises(LimitExceeded, match="it takes more than 1 s"):
        told(child, "sleep", Limits(2**10, seconds=0.1))
    assert not child.alive


def test_silence_ends_a_child_but_not_where_there_are_signs_of_life(child: Child) -> None:
    assert told(child, "abc") == b"cba"
    quiet, shares, moved = Limits(2**10, silence=1.0), list[float](), iter(range(10**6))
    assert bytes(child.submit("act", quiet, b"report").result(progress=shares.append).data) == b"done"
    assert shares == sorted(shares)
    assert len(shares) > 20
    looks = 0

    def stopped() -> bool:
        nonlocal looks
        looks += 1
        return looks > 80  # of 20 ms

    with pytest.raises(Stopped):
        child.submit("act", quiet, b"sleep").result(stopped, signs=lambda: next(moved))
    child.start()
    with pytest.raises(ChildSilent, match="no sign of life") as caught:
        child.submit("act", quiet, b"sleep").result(signs=lambda: 7)
    assert caught.value.seconds > 1.0
    assert not child.alive


@pytest.mark.parametrize(
    ("what", "why"),
    [("raise", "its process ended with exit code 1"), ("abort", "SIGABRT"), ("no head", "its answer cannot be read")],
)
def test_what_ends_the_child_is_told(child: Child, what: str, why: str) -> None:
    with pytest.raises(ChildFailed, match=why):
        told(child, what)
    assert not child.alive


def test_an_error_that_is_none_of_ours_is_an_error_in_few_words(child: Child) -> None:
    with pytest.raises(EngineFailed) as caught:
        told(child, "an unknown error")
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize("what", ["end", "half"])
def test_a_child_that_has_nothing_more_to_do_is_no_crash(child: Child, what: str) -> None:
    child.start()
    with pytest.raises(BrokenPipeError):
        child.submit("act", LIMITS, what.encode()).result()
    with pytest.raises(EngineFailed, match="that does what it is told exits at once"):
        told(child, what)


def test_an_idle_child_ends_and_is_started_again() -> None:
    idle = Child(replace(KIND, idle=0.2))
    assert told(idle, "abc") == b"cba"
    psutil.wait_procs([psutil.Process(idle.pid)] if idle.alive else [], GONE)
    before = idle.pid
    assert told(idle, "abc") == b"cba"
    assert idle.pid != before
    idle.close()


def test_who_has_given_up_is_heard(child: Child) -> None:
    looks = iter([False, False, True])
    told(child, "abc")
    with pytest.raises(Stopped):
        told(child, "sleep", stopped=lambda: next(looks))
    assert not child.alive


def test_a_child_that_is_killed_while_it_works_is_no_fault_of_the_call(child: Child) -> None:
    told(child, "abc")
    process = psutil.Process(child.pid)
    used = process.cpu_times().user
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(told, child, "compute")
        while process.cpu_times().user < used + 0.05:
            pass
        process.kill()
        with pytest.raises(EngineFailed, match="was ended by SIGKILL"):
            asked.result()
    assert not child.alive


def test_a_child_that_is_forgotten_ends() -> None:
    child = Child(KIND)
    child.start()
    process = psutil.Process(child.pid)
    assert process.is_running()
    del child
    assert not process.is_running()


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    program = (
        "from tests.isolation.test_child import *\nchild = Child(KIND)\nchild.start()\n"
        "print(child.pid, flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, GONE)


def test_a_child_has_the_variables_it_is_given_and_no_file_of_ours(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        child = Child(KIND, environment={"GIVEN": "1"})
        variables = told(child, "variables", Limits(2**16)).decode().split()
        assert "secret" not in str(psutil.Process(child.pid).open_files())
    child.close()
    assert {*variables} - {"LC_CTYPE"} == {"GIVEN", "PYTHONPATH"}


def test_a_child_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineFailed, match="that is nowhere does not start: its process ended with exit code 1"):
        told(Child(ChildKind("tests.isolation.nowhere", "is nowhere")), "abc")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EngineFailed, match="No child process can be started"):
        Child(KIND).start()
