"""A child process that answers one request at a time, within limits, and can be killed at any time.

It lowers its own limits (`edgellm.isolation.serving`), which hold even if this process has ended. This process monitors
it as well, because not every system has every limit: a child that takes too much processor time, memory or wall time,
or whose answer is too long, is killed. Answers are bytes; the caller checks their meaning.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import psutil

import edgellm
from edgellm.errors import EngineFailed, Stopped
from edgellm.isolation.serving import LENGTH, OUT_OF_MEMORY

GRACE_SECONDS = 30.0  # limit of an answer by the clock, plus ten times its processor-time limit
_POLL_SECONDS = 0.02  # between two checks of the child
_FIRST_POLL_SECONDS = 0.001
_TAIL = 4_096  # bytes of the last output
_FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"})  # sent by the system or a user


class ChildFailed(Exception):
    """The child ended over a request. The text says how, about the request as "it"."""


class LimitExceeded(ChildFailed):
    """The child was ended because an answer took more than its limits."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one answer: seconds of the processor, bytes of memory beyond what the child had before, bytes of the
    answer itself."""

    seconds: float
    memory: int
    answer: int


def start_child(
    module: str, *arguments: str, environment: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[bytes]:
    """Return a process of `python -m module` with this process's import path; `options` are Popen's.

    Raises:
        EngineFailed: no process can be started.
    """
    path = [str(Path(edgellm.__file__).parent.parent), *filter(None, sys.path)]
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            env={**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}, **options,
        )  # fmt: skip
    except OSError as error:
        raise EngineFailed(f"No child process can be started: {error.strerror}.", "Close other programs.") from error


def cause_of(code: int) -> str:
    """Return the cause of a process's end, such as "SIGSEGV" or "exit code 1".

    Raises:
        EngineFailed: a user or the system ended it.
    """
    try:
        cause = signal.Signals(-code).name
    except ValueError:
        cause = f"exit code {code}"
    if cause in _FROM_OUTSIDE:
        raise EngineFailed(
            f"A child process was ended by {cause}.", "Try again; if the machine is short of memory, free some first."
        )
    return cause


def last_lines(output: IO[bytes]) -> str:
    """Return the last lines that a process has written to the file `output`, in one line without control characters."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
    lines = output.read().decode("utf-8", "replace").splitlines()[-3:]
    return "; ".join("".join(filter(str.isprintable, line)).strip() for line in lines if line.strip())


class ChildProcess:
    """A child process that runs `edgellm.isolation.serving.serve`; it ends with this object, at the latest."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> None:
        """Start the process, without waiting for it. Raise EngineFailed if no process can be started."""
        self._process = start_child(
            module, *arguments, environment=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the caller, who decides
        )  # fmt: skip
        self._pipes = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        """Whether the process can take requests."""
        return self._process.poll() is None

    def ask(self, request: bytes, limits: Limits, stopped: Callable[[], bool] | None = None) -> bytes:
        """Return the child's answer to `request`; one thread at a time. Where anything is raised, the child is gone.

        Raises:
            Stopped: `stopped` returned True.
            LimitExceeded: the answer takes more than `limits`.
            ChildFailed: the request ended the child.
            EngineFailed: a user or the system ended the child.
            BrokenPipeError: the child had gone before it was asked, or ended as if it had nothing more to do.
        """
        answer: Future[bytes] = Future()
        thread = threading.Thread(target=_talk, args=(*self._pipes, request, limits.answer, answer), daemon=True)
        watch = _Watch(self._process.pid, limits)
        thread.start()
        wait = _FIRST_POLL_SECONDS
        try:
            while True:
                with suppress(TimeoutError):
                    return answer.result(wait)
                wait = min(2 * wait, _POLL_SECONDS)
                if stopped is not None and stopped():
                    raise Stopped
                watch.check()
        except EOFError:
            thread.join()
            raise self._ended() from None
        except BaseException:
            self._process.kill()
            thread.join()
            self.close()
            raise

    def _ended(self) -> Exception:
        self._process.kill()  # it has ended, or wants to be heard no more
        code = self._process.wait()
        if code == 0:
            return BrokenPipeError()
        if code == OUT_OF_MEMORY:
            return LimitExceeded("it exceeds its memory limit")
        return ChildFailed(f"its process ended with {cause_of(code)}")

    def close(self) -> None:
        """End the process, even if it is at work."""
        self._end()


class _Watch:
    """What a process has taken since this was made."""

    def __init__(self, pid: int, limits: Limits) -> None:
        self._limits = limits
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):
            self._process = psutil.Process(pid)
        self._end = time.monotonic() + GRACE_SECONDS + 10 * limits.seconds
        self._seconds, self._memory = self._used()

    def check(self) -> None:
        """Raise LimitExceeded where it is more than the limits."""
        seconds, memory = self._used()
        if seconds - self._seconds > self._limits.seconds:
            raise LimitExceeded(f"it takes more than {self._limits.seconds:.1f} s of the processor")
        if memory - self._memory > self._limits.memory:
            raise LimitExceeded(f"it takes more than {self._limits.memory >> 20} MiB of memory")
        if time.monotonic() > self._end:
            raise LimitExceeded(f"it takes more than {GRACE_SECONDS + 10 * self._limits.seconds:.0f} s")

    def _used(self) -> tuple[float, int]:
        """Return seconds of the processor and bytes of memory; zeros of a process that has ended."""
        if self._process is not None:
            with suppress(psutil.Error):
                times = self._process.cpu_times()
                return times.user + times.system, self._process.memory_info().rss
        return 0.0, 0


def _talk(requests: IO[bytes], answers: IO[bytes], request: bytes, most: int, answer: Future[bytes]) -> None:
    """Send the request and store the answer, or EOFError if the process has ended."""
    try:
        requests.write(LENGTH.pack(len(request)) + request)
        requests.flush()
        (size,) = LENGTH.unpack(_whole(answers, LENGTH.size))
        if size > most:
            raise LimitExceeded(f"its answer has {size} bytes; {most} are allowed")
        answer.set_result(_whole(answers, size))
    except (OSError, ValueError):
        answer.set_exception(EOFError())
    except BaseException as error:  # noqa: BLE001  raised where it is waited for
        answer.set_exception(error)


def _whole(answers: IO[bytes], size: int) -> bytes:
    data = answers.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # some data was still to be written
                pipe.close()
