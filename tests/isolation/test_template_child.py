"""The process that renders templates cannot open or start anything, whatever runs in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from edgellm.isolation import template_child
from edgellm.isolation.child_process import ChildProcess, LimitExceeded, Limits
from edgellm.isolation.template_child import FAILED, MEMORY, MEMORY_PER_BYTE, RENDERED
from testkit.hostile.inputs import ESCAPES

LIMITS = Limits(seconds=60.0, memory=2**40, answer=2**20)
ROOT = Path(__file__).parents[2]
NOBODY = 65534
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits are read from Linux")

# Runs as what has escaped from the sandbox would: in a process that has lowered its limits. For root, the number of
# processes has no limit.
ESCAPED = f"""
import os, socket, subprocess, sys
from edgellm.isolation.template_child import prepare
answer = prepare()
if os.getuid() == 0:
    os.setuid({NOBODY})
def limited(): answer(b'{{"source": "{{{{ 1 }}}}"}}')
limited()
def fork():
    if os.fork() == 0:
        os._exit(0)
attempts = {{
    "read": lambda: open("/etc/hostname"),
    "write": lambda: open(sys.argv[1], "w"),
    "socket": lambda: socket.socket(),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "pipe": os.pipe,
    "duplicate": lambda: os.dup(1),
    "in the place of standard input": lambda: (os.close(0), open("/etc/hostname")),
    "folder": lambda: os.open("/", os.O_RDONLY),
    "fork": fork,
    "start": lambda: subprocess.run(["true"]),
    "memory": lambda: bytes({MEMORY + 2**27}),
}}
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, MemoryError) as error:
        print(name, type(error).__name__, flush=True)
    else:
        print(name, "escaped", flush=True)
try:
    os.execv(sys.executable, [sys.executable, "-c", "print('escaped by exec')"])
except OSError:
    pass
"""


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    child = ChildProcess("edgellm.isolation.template_child", environment={})
    assert child.ask(b"", LIMITS) == b""
    yield child
    child.close()


def ask(child: ChildProcess, **request: object) -> bytes:
    return child.ask(json.dumps(request).encode(), LIMITS)


def test_a_source_and_then_conversations(child: ChildProcess) -> None:
    assert ask(child, source="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}") == RENDERED
    for content in ("mug", "\ud800 ünï \ue000"):
        answer = ask(child, messages=[{"role": "user", "content": content}], bos_token="<s>", eos_token="")
        assert answer == RENDERED + f"<s>{content}".encode("utf-8", "surrogatepass")


def test_an_error_is_told_in_short_and_the_child_goes_on(child: ChildProcess) -> None:
    assert ask(child, source="{% if").startswith(FAILED + b"TemplateSyntaxError: ")
    assert ask(child, source="{{ raise_exception('a' * 1000000) if messages else 'ok' }}") == RENDERED
    answer = ask(child, messages=[1])
    assert answer.startswith(FAILED + b"ValueError: aaa")
    assert len(answer) < 1_000
    assert ask(child, messages=[]) == RENDERED + b"ok"


@linux
def test_what_has_escaped_opens_nothing_and_starts_nothing(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", ESCAPED, str(tmp_path / "written")], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 11, done
    assert "escaped" not in done.stdout
    assert not [*tmp_path.iterdir()]


@linux
def test_each_request_has_its_limits(child: ChildProcess) -> None:
    ask(child, source="{{ 1 }}")
    process = psutil.Process(child._process.pid)
    for name in (psutil.RLIMIT_FSIZE, psutil.RLIMIT_NOFILE, psutil.RLIMIT_NPROC, psutil.RLIMIT_CORE):
        assert process.rlimit(name) == (0, 0)
    small = process.rlimit(psutil.RLIMIT_AS)[0]
    assert MEMORY < small < process.memory_info().vms + MEMORY + 2**20
    assert 0 < process.rlimit(psutil.RLIMIT_CPU)[0] < template_child.SECONDS + process.cpu_times().user + 10
    ask(child, messages=["a" * 2**20])
    assert process.rlimit(psutil.RLIMIT_AS)[0] > small + MEMORY_PER_BYTE * 2**20 - 2**16
    ask(child, messages=[])
    assert process.rlimit(psutil.RLIMIT_AS)[0] < small + 2**16


@linux
def test_it_ends_by_itself_where_nobody_looks_after_it() -> None:
    """The parent may have been killed."""
    child = ChildProcess("tests.isolation.hasty", environment={})
    ask(child, source="{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(Exception, match="SIGXCPU"):
        ask(child, messages=[])
    child.close()


@linux
def test_memory_is_limited_before_it_is_taken(child: ChildProcess) -> None:
    ask(child, source="{{ ('a' * 2**27)|length }}")
    with pytest.raises(LimitExceeded, match="exceeds its memory limit"):
        ask(child, messages=[])


@pytest.mark.parametrize("name", ESCAPES)
def test_no_known_way_leads_out_of_the_sandbox(child: ChildProcess, name: str, tmp_path: Path) -> None:
    compiled = ask(child, source=ESCAPES[name].replace("MARK", str(tmp_path / "written")))
    answer = ask(child, messages=[{"role": "user", "content": "a"}]) if compiled == RENDERED else compiled
    assert not any(word in answer.partition(b"Error: ")[0] for word in (b"<class", b"<module", b"root:", b"builtin"))
    assert not [*tmp_path.iterdir()]
    assert child.alive
