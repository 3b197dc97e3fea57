"""A child process with functions that can be called, within limits, and that can be killed at any time.

It may lower its own limits, which hold even if this process has ended. This process monitors it as well, because not
every system has every limit: a child that takes too much processor time, memory or wall time, is silent for too long,
or whose answer is too long, is killed. The caller checks what an answer means.
"""

import os
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import psutil

import edgellm
from edgellm import errors
from edgellm.errors import EdgeError, EngineFailed, Stopped
from edgellm.isolation.serving import LENGTH, OUT_OF_MEMORY, READY, pack, unpack

GRACE_SECONDS = 30.0  # wall time of an answer beyond ten times its processor time
POLL_SECONDS = 0.05
"""Seconds between two checks of another process or thread."""
_LATE_SECONDS = 0.25  # most silence counted between two checks: a longer gap means a suspended process or machine
_HEAD = 2**16  # most bytes of an answer's head
_SAID = 4_096  # characters of the child's own error, and bytes of its last output
_FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"})  # signals of the system or a user


class ChildFailed(Exception):
    """The child ended over a call. The text says how, about the call as "it"; `cause` is, for example, "SIGSEGV"."""

    def __init__(self, how: str, cause: str = "") -> None:
        super().__init__(how)
        self.cause = cause or how


class LimitExceeded(ChildFailed):
    """The child was ended because an answer took more than its limits."""


class ChildSilent(LimitExceeded):
    """The child was ended after `seconds` without a sign of life."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"there is no sign of life for {seconds:.0f} s")
        self.seconds = seconds


class ChildKilled(EngineFailed):
    """A user or the system ended the child."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one answer: its bytes, seconds of the processor, bytes of memory beyond what the child had before, and
    seconds without a sign of life."""

    answer: int = 0
    seconds: float = inf
    memory: float = inf
    silence: float = inf


_STARTING = Limits(seconds=30.0)
"""Limits while Python starts, imports the module, and loads a vocabulary."""


@dataclass(frozen=True, slots=True)
class ChildKind:
    """The children that run the functions of a `module`: their purpose, such as "renders templates"; the idle seconds
    after which a child ends, 0 for never; and whether its output is kept for messages."""

    module: str
    role: str
    idle: float = 0.0
    keeps_words: bool = False


class Child:
    """A child process, which ends with this object at the latest. It is started when it is needed, also again after it
    has ended. For one call at a time; any thread may kill it."""

    def __init__(self, kind: ChildKind, *arguments: str, environment: Mapping[str, str] = os.environ) -> None:
        """Set up the child, which is given these words and variables."""
        self._kind, self._environment = kind, environment
        self._words = (kind.module, str(kind.idle), *arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._has_begun = False
        self._end: Callable[[], object] = lambda: None

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The number of the process, 0 before the first start."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process unless it runs, without waiting for it. Raise EngineFailed if that is impossible."""
        if self.alive:
            return
        self._end()
        path = [str(Path(edgellm.__file__).parent.parent), *filter(None, sys.path)]
        self._output = output = tempfile.TemporaryFile() if self._kind.keeps_words else None  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "edgellm.isolation.serving", *self._words],
                env={**self._environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output or subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the caller, who decides
            )  # fmt: skip
        except OSError as error:
            if output is not None:
                output.close()
            what = f"No child process can be started: {error.strerror}."
            raise EngineFailed(what, "Close other programs.") from error
        self._has_begun = False
        self._end = weakref.finalize(self, _end, self._process, output)

    def call(
        self, name: str, limits: Limits, data: bytes = b"", stopped: Callable[[], bool] | None = None, **fields: object
    ) -> "Answer":
        """Return the answer of the child's function `name`, where needed from a new process. Raises as `Call.result`
        does; a process that does not start, or has gone, is an EngineFailed."""
        for _ in range(2):
            with suppress(BrokenPipeError):  # the child has ended since the last call
                self.start()
                if not self._has_begun:
                    self._await_start(stopped)
                return self.submit(name, limits, data, **fields).result(stopped)
        raise EngineFailed(f"The process that {self._kind.role} exits at once.", "Try again.")

    def _await_start(self, stopped: Callable[[], bool] | None) -> None:
        try:
            self.submit(READY, _STARTING).result(stopped)
        except ChildFailed as error:
            what = f"The process that {self._kind.role} does not start: {error}."
            raise EngineFailed(what, "Install edgellm again.") from None
        self._has_begun = True

    def submit(self, name: str, limits: Limits, data: bytes = b"", **fields: object) -> "Call":
        """Send a call to the process, which was started, without waiting for the answer."""
        if self._process is None:
            raise BrokenPipeError
        return Call(self, self._process, limits, pack({"call": name, **fields}, data))

    def last_words(self) -> str:
        """Return the end of what the process has printed, in one line without control characters; "" if that is not
        kept."""
        with suppress(OSError, ValueError):
            if self._output is not None:
                self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _SAID))
                lines = self._output.read().decode("utf-8", "replace").splitlines()[-3:]
                return "; ".join("".join(filter(str.isprintable, line)).strip() for line in lines if line.strip())
        return ""

    def kill(self) -> None:
        """End the process, even if it is at work; the call that waits for it raises an error."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, and release what it needed."""
        self._end()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: a value or bytes."""

    value: Any
    data: memoryview


class Call:
    """A call to a child that has been sent."""

    def __init__(self, child: Child, process: subprocess.Popen[bytes], limits: Limits, message: bytes) -> None:
        self.began = False
        """The child has begun to answer."""
        self._child, self._process, self._limits = child, process, limits
        self._resources: psutil.Process | None = None
        if limits.seconds < inf or limits.memory < inf:
            with suppress(psutil.Error):
                self._resources = psutil.Process(process.pid)
        self._seconds, self._memory = self._used()
        self._looked, self._silent, self._signs = time.monotonic(), 0.0, cast(object, None)
        self._left = GRACE_SECONDS + 10 * limits.seconds
        self._heard: queue.SimpleQueue[_Heard] = queue.SimpleQueue()
        pipes = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        words = (*pipes, message, limits.answer + _HEAD, self._heard)
        self._thread = threading.Thread(target=_talk, args=words, daemon=True)
        self._thread.start()

    def result(
        self, stopped: Callable[[], bool] | None = None, progress: Callable[[float], None] | None = None,
        signs: Callable[[], object] | None = None,
    ) -> Answer:  # fmt: skip
        """Wait for the answer. `progress` is called with the shares, in 0..1, that the child reports; what `signs`
        returns changes while there is life elsewhere. Where anything but the child's own error is raised, the process
        has ended. Raises EdgeError: the function raised this error; Stopped: `stopped` returned True; LimitExceeded:
        the answer takes more than its limits; ChildFailed: the call ended the child; ChildKilled: a user or the system
        ended the child; BrokenPipeError: the child had gone before it was asked, or ended as if it had nothing more to
        do."""
        try:
            while True:
                try:
                    heard = self._heard.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    if stopped is not None and stopped():
                        raise Stopped from None
                    self._check(None if signs is None else signs())
                    continue
                if isinstance(heard, BaseException):
                    raise heard
                self.began = True
                head, data = heard
                if "progress" not in head:
                    break
                self._silent = 0.0
                if progress is not None and isinstance(share := head["progress"], (int, float)):
                    progress(share)
        except EOFError:
            self._thread.join()
            raise self._ended() from None
        except BaseException:
            self._process.kill()
            self._thread.join()
            self._child.close()
            raise
        if (name := head.get("error")) is None:
            return Answer(head.get("value"), data)
        kind = getattr(errors, str(name), None)
        kind = kind if isinstance(kind, type) and issubclass(kind, EdgeError) else EngineFailed
        raise kind(str(head.get("what"))[:_SAID], str(head.get("next_step"))[:_SAID])

    def _ended(self) -> Exception:
        self._process.kill()  # the child has ended, or closed its pipe
        code = self._process.wait()
        if code == 0:
            return BrokenPipeError()
        if code == OUT_OF_MEMORY:
            return LimitExceeded("it exceeds its memory limit")
        cause = cause_of(code)
        return ChildFailed(f"its process ended with {cause}", cause)

    def _check(self, signs: object) -> None:
        """Raise LimitExceeded where anything is more than the limits."""
        limits, now = self._limits, time.monotonic()
        seconds, memory = self._used()
        if seconds - self._seconds > limits.seconds:
            raise LimitExceeded(f"it takes more than {limits.seconds:.1f} s of the processor")
        if memory - self._memory > limits.memory:
            raise LimitExceeded(f"it takes more than {int(limits.memory) >> 20} MiB of memory")
        passed = min(now - self._looked, _LATE_SECONDS)  # the machine may have slept
        self._left -= passed
        if self._left < 0:
            raise LimitExceeded(f"it takes more than {GRACE_SECONDS + 10 * limits.seconds:.0f} s")
        self._silent += passed
        if signs != self._signs:
            self._signs, self._silent = signs, 0.0
        self._looked = now
        if self._silent > limits.silence:
            raise ChildSilent(self._silent)

    def _used(self) -> tuple[float, int]:
        """Return seconds of the processor and bytes of memory; zeros of a process that has ended."""
        if self._resources is not None:
            with suppress(psutil.Error):
                times = self._resources.cpu_times()
                return times.user + times.system, self._resources.memory_info().rss
        return 0.0, 0


def cause_of(code: int) -> str:
    """Return the cause of a process's end, such as "SIGSEGV" or "exit code 1". Raises ChildKilled: a user or the system
    ended it."""
    try:
        cause = signal.Signals(-code).name
    except ValueError:
        cause = f"exit code {code}"
    if cause in _FROM_OUTSIDE:
        next_step = "Try again; if the machine is short of memory, free some first."
        raise ChildKilled(f"A child process was ended by {cause}.", next_step)
    return cause


_Heard: TypeAlias = tuple[dict[str, Any], memoryview] | BaseException


def _talk(calls: IO[bytes], answers: IO[bytes], message: bytes, most: int, heard: queue.SimpleQueue[_Heard]) -> None:
    """Send the call, and put the child's messages into the queue, or EOFError if the process has ended."""
    try:
        calls.write(message)
        calls.flush()
        while True:
            (size,) = LENGTH.unpack(_whole(answers, LENGTH.size))
            if size > most:
                raise LimitExceeded(f"its answer has {size} bytes; {most} are allowed")
            whole = _whole(answers, size)
            try:
                found = unpack(whole)
            except (ValueError, RecursionError, struct.error) as error:
                raise ChildFailed(f"its answer cannot be read: {error}") from None
            heard.put(found)
            if "progress" not in found[0]:
                return
    except (OSError, ValueError, EOFError):  # ValueError: the pipes are closed
        heard.put(EOFError())
    except BaseException as error:  # noqa: BLE001  raised where it is waited for
        heard.put(error)


def _whole(answers: IO[bytes], size: int) -> bytes:
    data = answers.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _end(process: subprocess.Popen[bytes], output: IO[bytes] | None) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, output):
        if pipe is not None:
            with suppress(OSError):  # some data was still to be written
                pipe.close()
