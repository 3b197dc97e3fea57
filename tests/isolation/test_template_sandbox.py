"""The process that renders templates cannot open or start anything, whatever runs in it."""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from edgellm.errors import ModelUnsupported
from edgellm.isolation import template_sandbox
from edgellm.isolation.child import Child, ChildKind, Limits
from edgellm.isolation.template_sandbox import MEMORY, MEMORY_PER_BYTE
from testkit.hostile.inputs import ESCAPES
from tests.programs import run_python

KIND = ChildKind("edgellm.isolation.template_sandbox", "renders chat templates")
LIMITS = Limits(2**20)
NOBODY = 65534
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits are read from Linux")

# Runs as what has escaped from the sandbox would: in a process that has lowered its limits. For root, the number of
# processes has no limit.
ESCAPED = f"""
import os, socket, subprocess, sys
from edgellm.isolation.template_sandbox import functions
render = functions(None)["render"]
if os.getuid() == 0:
    os.setuid({NOBODY})
render(memoryview(b'["{{{{ 1 }}}}", {{}}]'))
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
def child() -> Iterator[Child]:
    child = Child(KIND, environment={})
    yield child
    child.close()


def rendered(child: Child, source: str, **conversation: object) -> str:
    found = child.call("render", LIMITS, json.dumps((source, conversation)).encode())
    return bytes(found.data).decode("utf-8", "surrogatepass")


def test_a_template_writes_todays_date_or_that_of_the_caller(child: Child) -> None:
    dated = "{% if date_string is not defined %}26 Jul 2024{% endif %}{{ date_string }}"
    before, wrote = (f"{datetime.now(UTC).astimezone():%d %b %Y}", rendered(child, dated))
    assert wrote in (before, f"{datetime.now(UTC).astimezone():%d %b %Y}")
    assert rendered(child, dated, date_string="1 May") == "1 May"


def test_an_error_is_told_in_short_and_the_child_goes_on(child: Child) -> None:
    with pytest.raises(ModelUnsupported, match=r"^TemplateSyntaxError: "):
        rendered(child, "{% if")
    source = "{{ raise_exception('a' * 1000000) if messages else 'ok' }}"
    with pytest.raises(ModelUnsupported, match=r"^ValueError: aaa") as caught:
        rendered(child, source, messages=[1])
    assert len(str(caught.value)) < 1_000
    assert rendered(child, source, messages=[]) == "ok"


@linux
def test_what_has_escaped_opens_nothing_and_starts_nothing(tmp_path: Path) -> None:
    done = run_python(ESCAPED, tmp_path / "written")
    lines = done.stdout.splitlines()
    assert len(lines) == 11, done
    assert "escaped" not in done.stdout
    assert not [*tmp_path.iterdir()]


@linux
def test_each_request_has_its_limits(child: Child) -> None:
    rendered(child, "{{ 1 }}")
    process = psutil.Process(child.pid)
    for name in (psutil.RLIMIT_FSIZE, psutil.RLIMIT_NOFILE, psutil.RLIMIT_NPROC, psutil.RLIMIT_CORE):
        assert process.rlimit(name) == (0, 0)
    small = process.rlimit(psutil.RLIMIT_AS)[0]
    assert MEMORY < small < process.memory_info().vms + MEMORY + 2**20
    assert 0 < process.rlimit(psutil.RLIMIT_CPU)[0] < template_sandbox.SECONDS + process.cpu_times().user + 10
    rendered(child, "{{ 1 }}", messages=["a" * 2**20])
    assert process.rlimit(psutil.RLIMIT_AS)[0] > small + MEMORY_PER_BYTE * 2**20 - 2**16
    rendered(child, "{{ 1 }}", messages=[])
    assert process.rlimit(psutil.RLIMIT_AS)[0] < small + 2**16


@pytest.mark.parametrize("name", ESCAPES)
def test_no_known_way_leads_out_of_the_sandbox(child: Child, name: str, tmp_path: Path) -> None:
    try:
        source = ESCAPES[name].replace("MARK", str(tmp_path / "written"))
        answer = rendered(child, source, messages=[{"role": "user", "content": "a"}])
    except ModelUnsupported as error:
        answer = error.what
    assert not any(word in answer.partition("Error: ")[0] for word in ("<class", "<module", "root:", "builtin"))
    assert not [*tmp_path.iterdir()]
    assert child.alive
