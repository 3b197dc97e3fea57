"""A verifier in a process of its own, which can be killed, stopped and started again.

    python -m testkit.processes.verifier MODEL PORT SESSIONS

serves paired devices only, and prints a line of JSON each second with the number of open sessions.
`PairedVerifierProcess` starts it, with a home folder in which the calling device is paired.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgellm.engine import Vocabulary
from edgellm.engine.hardware import Hardware
from edgellm.errors import EdgeError
from edgellm.rpc.address import Address
from edgellm.rpc.link import Endpoint
from edgellm.rpc.trust.trust import Peer, Right, Trust
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.listener import Listening
from edgellm.services.server.servers import serve_verifier
from testkit import ROOT, free_port

_SERVE = """
import sys
from pathlib import Path
from edgellm.engine.hardware import Hardware
from edgellm.services.server.listener import Listening
from edgellm.services.server.servers import serve_verifier
model, port, threads, context = sys.argv[1:]
hardware = Hardware(threads=int(threads) or None, n_ctx=int(context))
serve_verifier(Path(model), Listening(port=int(port)), 2, hardware=hardware).wait()
"""
CONTEXT = 1024  # positions of a session


class VerifierProcess:
    """A verifier's process at a port of its own, which can be killed or stopped, and started again."""

    def __init__(self, model: Path, threads: int | None = 1, context: int = CONTEXT) -> None:
        self.port = free_port()
        words = map(str, (model, self.port, threads or 0, context))
        self._run = [sys.executable, "-c", _SERVE, *words]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._run, cwd=ROOT, text=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = self._started()

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        """Wait until it listens."""
        while True:
            with suppress(ConnectionError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.05)

    def connect(self, vocabulary: Vocabulary, trust: Trust | None = None, port: int | None = None) -> RemoteVerifier:
        """Return a device's connection to it once it is up, through a relay's `port` if given."""
        where, end = Endpoint("", Address("127.0.0.1", port or self.port), trust), time.monotonic() + 60
        while True:
            try:
                return RemoteVerifier(where, vocabulary)
            except EdgeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)


def acquaint(host: Path, devices: Sequence[Path]) -> list[Trust]:
    """Create the identities of a verifier and of devices in these homes, and pair each device with the verifier.

    Return the devices' trust.
    """
    here, rights = Trust.load(host / "data" / "trust"), frozenset({Right.VERIFY})
    made = []
    for number, folder in enumerate(devices):
        there = Trust.load(folder / "data" / "trust")
        there.peers.add(Peer("host", here.identity.certificate, rights, rights))
        here.peers.add(Peer(f"device-{number}", there.identity.certificate, rights, rights))
        made.append(there)
    return made


class PairedVerifierProcess(VerifierProcess):
    """A verifier's process that serves paired devices only; `status` is the last line that it printed."""

    def __init__(self, model: Path, home: Path, sessions: int) -> None:
        """`home` is where `acquaint` has made the verifier's identity."""
        self._home = home
        self.port = free_port()
        self._run = [sys.executable, "-m", "testkit.processes.verifier", str(model), str(self.port), str(sessions)]
        self.status: dict[str, Any] = {}
        self._process = self._started()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def _started(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "EDGELLM_HOME": str(self._home)}
        process = subprocess.Popen(self._run, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
        self._listener = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._listener.start()
        return process

    def close(self) -> None:
        super().close()
        self._listener.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # it was killed in the middle of a line
                    self.status = json.loads(line)


def main() -> None:
    model, port, sessions = sys.argv[1:]
    open_now = 0

    def on_event(event: str) -> None:
        nonlocal open_now
        open_now += event.endswith("begins.") - event.endswith("ends.")

    server = serve_verifier(
        Path(model),
        Listening(port=int(port), paired_only=True, on_event=on_event),
        int(sessions),
        hardware=Hardware(threads=1, n_ctx=CONTEXT),
    )
    while not server.wait(1.0):
        print(json.dumps({"sessions": open_now, **asdict(server.counters)}), flush=True)


if __name__ == "__main__":
    main()
