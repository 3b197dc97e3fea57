"""Three devices: a worker in a process of its own, its owner, and an attacker with some rights."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgellm.rpc.address import Address
from edgellm.rpc.trust.trust import Peer, Trust, read_rights
from testkit import ROOT, free_port, until_listening

MODEL = "edgellm-verifier"


@dataclass(frozen=True, slots=True)
class Home:
    """A worker's process, an owner who may upload layers and have them computed, and an attacker with some rights."""

    folder: Path
    port: int
    owner: Trust
    attacker: Trust
    host: str
    process: subprocess.Popen[bytes]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@contextmanager
def household(rights: str = "files", *options: str, host: str = "127.0.0.1") -> Iterator[Home]:
    """Yield three devices, paired as far as needed; the attacker has these `rights` at the worker."""
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        worker, owner, attacker = (
            Trust.load(folder / who / "data" / "trust") for who in ("worker", "owner", "attacker")
        )
        for trust, granted in ((owner, "compute files"), (attacker, rights)):
            held = read_rights(granted.split())
            worker.peers.add(Peer("device", trust.identity.certificate, held, held))
            trust.peers.add(Peer("desk", worker.identity.certificate, held, held))
            trust.peers.record_seen(worker.identity.id, Address(host, port))
        words = ("serve", "--role", "worker", "--host", host, "--port", str(port), "--paired-only", "--no-announce")
        process = subprocess.Popen(
            [sys.executable, "-m", "edgellm", *words, "--no-http", *options], cwd=ROOT,
            env=os.environ | {"EDGELLM_HOME": str(folder / "worker")}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            until_listening(port, process, host)
            yield Home(folder, port, owner, attacker, host, process)
        finally:
            process.kill()
            process.wait()
