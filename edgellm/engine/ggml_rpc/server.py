"""A child process that serves this machine's devices by llama.cpp's RPC, on loopback: see `RpcServer`.

The child is `python -m edgellm.engine.ggml_rpc.server PORT THREADS MEMORY PROGRAM CACHE DEVICE...`. It ends with its
standard input, so that it never outlives the process that started it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from edgellm.engine.ggml_rpc import backend
from edgellm.engine.hardware import Hardware
from edgellm.engine.native import available_threads
from edgellm.errors import EngineFailed
from edgellm.isolation.child_process import last_lines, start_child
from edgellm.system import be_killed_first, limit

STARTING_SECONDS = 60.0
_POLL_SECONDS = 0.02
_BESIDE = 2**30  # bytes of a server's own memory beside what its client asks for
_HASHED = "rpc"  # folder in which llama.cpp's own program keeps weights
_NONE = "-"


def server_kind() -> tuple[str, Path | None]:
    """Return what would serve on this machine, in words, and the program if it is one of llama.cpp's own; "" where
    nothing can."""
    if backend.is_compiled_in():
        return "llama.cpp's RPC backend, which is compiled in", None
    program = backend.find_program()
    return ("", None) if program is None else (f"the program {program}", program)


def require_server() -> tuple[str, Path | None]:
    """Return `server_kind`'s answer. Raise EngineFailed where nothing here can serve."""
    what, program = server_kind()
    if not what:
        raise EngineFailed("This device has no RPC server of llama.cpp.", f"Compile one: {backend.how_to_compile()}")
    return what, program


class RpcServer:
    """An RPC server in a child process, for one client; it ends with this object, at the latest."""

    def __init__(
        self,
        hardware: Hardware,
        devices: Sequence[str] = ("CPU",),
        *,
        memory: int | None = None,
        cache: Path | None = None,
    ) -> None:
        """Start the process, and return when it listens. It computes on `devices`: the processor, with the threads of
        `hardware`, or graphics cards. Beside what it needs itself it gets `memory` bytes at most, where the system can
        limit that. Large weights are kept in the folder `cache`.

        Raises:
            EngineFailed: nothing here can serve, or the server does not start.
        """
        _what, program = require_server()
        with socket.create_server((backend.HOST, 0)) as free:
            self.port: int = free.getsockname()[1]
        threads = hardware.threads or available_threads()
        words = [str(self.port), str(threads), str(memory or 0), str(program or _NONE), str(cache or _NONE)]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = start_child(
            "edgellm.engine.ggml_rpc.server", *words, *devices, environment={**os.environ, "GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.PIPE, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process, self._output)
        try:
            self._wait_until_listening()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return the end of what the process has printed, in one line without control characters."""
        with suppress(OSError, ValueError):
            return last_lines(self._output)
        return ""

    def close(self) -> None:
        """End the process, even if it computes."""
        self._end()

    def _wait_until_listening(self) -> None:
        """Wait for the child itself to listen at its port: another program may have taken it meanwhile."""
        deadline = time.monotonic() + STARTING_SECONDS
        while self.alive and time.monotonic() < deadline:
            if self.port in _listening(self._process.pid):
                return
            time.sleep(_POLL_SECONDS)
        cause = self.last_words() or f"it ended with {self._process.poll()}"
        raise EngineFailed(f"The RPC server did not start: {cause}.", "Try again; edgellm doctor says what serves.")


def _listening(process: int) -> set[int]:
    """Return the ports at which a process or one that it started listens."""
    found: set[int] = set()
    with suppress(psutil.Error):
        parent = psutil.Process(process)
        for one in (parent, *parent.children()):
            with suppress(psutil.Error):
                connections = one.net_connections(kind="tcp")
                found |= {at.laddr.port for at in connections if at.status == psutil.CONN_LISTEN}
    return found


def _end(process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)  # a program of llama.cpp's is ended by the child first
    process.kill()
    process.wait()
    output.close()


def main(arguments: list[str]) -> None:
    """Serve until standard input ends; `arguments` are those of the module."""
    port, threads, memory = map(int, arguments[:3])
    program, cache, devices = arguments[3], arguments[4], arguments[5:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, too, and ends this process
    be_killed_first()
    limit("RLIMIT_CORE", 0)
    if memory:
        limit("RLIMIT_DATA", memory + _BESIDE)
    folder = None if cache == _NONE else Path(cache)
    if program == _NONE:
        threading.Thread(target=_end_with_input, daemon=True).start()
        backend.serve(port, threads, devices, None if folder is None else _made(folder / _HASHED))
        raise SystemExit(1)
    options = ["-H", backend.HOST, "-p", str(port), "-t", str(threads), "-d", ",".join(devices)]
    environment = {**os.environ}
    if folder is not None:
        options.append("-c")
        environment["LLAMA_CACHE"] = str(folder)
    served = subprocess.Popen([program, *options], env=environment, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_input, args=(served,), daemon=True).start()
    raise SystemExit(served.wait())


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _end_with_input(served: subprocess.Popen[bytes] | None = None) -> None:
    sys.stdin.buffer.read()
    if served is not None:
        served.kill()
        served.wait()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
