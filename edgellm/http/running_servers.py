"""The servers that this user runs on this machine: each leaves a private file, by which `edgellm ps` finds it.

A file counts while the process that wrote it runs: the system gives a process's number to others later.
"""

import json
import os
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from edgellm.errors import ServerUnreachable, StateDamaged
from edgellm.http.middleware import page_key
from edgellm.rpc.address import Address
from edgellm.state import read_json, write_cached
from edgellm.system import end_process, started_at, state_dir

_ANSWER_SECONDS = 10.0
_STARTED_WITHIN = 1.0  # seconds by which the system's times of one start may differ


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server: its process, with its start since the epoch, and where to ask; `certificate` is "" without TLS."""

    process: Annotated[int, Field(gt=0)]
    started: float
    host: str
    port: Annotated[int, Field(gt=0, lt=65536)]
    certificate: str = ""

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://{Address(self.host, self.port)}"

    def is_running(self) -> bool:
        """Return whether the process is still the one that wrote the file."""
        started = started_at(self.process)
        return started is not None and abs(started - self.started) < _STARTED_WITHIN

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Return the status and the JSON of an answer to the server's user. Raise ServerUnreachable without one."""
        headers = {"Authorization": f"Bearer {page_key()}", "Content-Type": "application/json"}
        try:
            with closing(self._connection()) as connection:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())
        except (OSError, HTTPException, ValueError) as error:
            raise ServerUnreachable(
                f"The server of process {self.process} does not answer at {self.url}: {error or type(error).__name__}.",
                f"End it with: edgellm stop {self.port}",
            ) from error

    def stop(self, seconds: float) -> bool:
        """Ask the process to end as Ctrl-C does, wait for up to `seconds`, and return whether it has ended."""
        if self.is_running():
            end_process(self.process)
        until = monotonic() + seconds
        while self.is_running() and monotonic() < until:
            sleep(0.05)
        return not self.is_running()

    def _connection(self) -> HTTPConnection:
        if not self.certificate:
            return HTTPConnection(self.host, self.port, timeout=_ANSWER_SECONDS)
        context = ssl.create_default_context(cafile=self.certificate)
        context.check_hostname = False  # the server must show this very certificate, whatever its names
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return HTTPSConnection(self.host, self.port, timeout=_ANSWER_SECONDS, context=context)


@contextmanager
def recorded(host: str, port: int, certificate: Path | None) -> Iterator[None]:
    """Record this process's server until the `with` ends; do nothing where the file cannot be written."""
    process = os.getpid()
    server = RunningServer(process, started_at(process) or 0.0, host, port, str(certificate or ""))
    path = state_dir() / "servers" / f"{process}-{port}.json"
    write_cached(path, asdict(server))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """Return the servers of this user, by port. Files of processes that have ended are removed."""
    found = []
    for path in (state_dir() / "servers").glob("*.json"):
        with suppress(StateDamaged):
            server = read_json(path, TypeAdapter(RunningServer).validate_python)
            if server is not None and server.is_running():
                found.append(server)
                continue
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda server: server.port)
