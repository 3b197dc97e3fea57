"""Three devices: a worker or verifier in a process of its own, its owner, and an attacker with some rights."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from edgellm.rpc.address import Address
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import read_rights
from edgellm.rpc.trust.trust import Trust
from testkit import ROOT

MODEL = "edgellm-verifier"


@dataclass(slots=True)
class Home:
    """A worker's process, an owner who may upload layers and have them computed, and an attacker with some rights."""

    folder: Path
    port: int
    owner: Trust
    attacker: Trust
    options: tuple[str, ...] = ()
    role: str = "worker"
    host: str = "127.0.0.1"
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        words = (
            "serve",
            "--role",
            self.role,
            "--host",
            self.host,
            "--port",
            str(self.port),
            "--paired-only",
            "--no-announce",
            "--no-http",
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgellm", *words, *self.options], cwd=ROOT,
            env=os.environ | {"EDGELLM_HOME": str(self.folder / "worker")}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 60.0
        while time.monotonic() < end and self.alive:
            with suppress(OSError), socket.create_connection((self.host, self.port), 1.0):
                return
            time.sleep(0.05)
        raise RuntimeError("the worker did not start")

    def stop(self) -> None:
        if self.process is not None and self.alive:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)


@contextmanager
def household(rights: str = "files", *options: str, role: str = "worker", host: str = "127.0.0.1") -> Iterator[Home]:
    """Yield three devices, paired as far as needed; the attacker has these `rights` at the worker."""
    with tempfile.TemporaryDirectory() as name, socket.create_server((host, 0)) as free:
        folder, port = Path(name), int(free.getsockname()[1])
        free.close()
        worker, owner, attacker = (
            Trust.load(folder / who / "data" / "trust") for who in ("worker", "owner", "attacker")
        )
        for trust, granted in ((owner, "compute files"), (attacker, rights)):
            worker.peers.add(_peer(trust.identity, "device", granted))
            trust.peers.add(_peer(worker.identity, "desk", granted))
            trust.peers.record_seen(worker.identity.id, Address(host, port))
        home = Home(folder, port, owner, attacker, options, role, host)
        try:
            home.start()
            yield home
        finally:
            if home.process is not None:
                home.process.kill()
                home.process.wait()


def _peer(identity: Identity, name: str, rights: str) -> Peer:
    now, held = datetime.now(UTC).replace(microsecond=0), read_rights(rights.split())
    return Peer(name, identity.certificate, held, held, (), now, now)
