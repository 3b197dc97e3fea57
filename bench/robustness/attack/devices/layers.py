"""A paired device that may only upload layers tries to control what a worker computes, or to end the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio

from bench.robustness.attack.harness import Attack, Found
from edgellm.engine import ModelFile
from edgellm.errors import EdgeError
from edgellm.layer_range import LayerRange
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.layers.codec import PROTOCOL, method, write_manifest
from edgellm.rpc.layers.upload import RateLimiter, clean, upload
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.handshake import connect_authenticated
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import read_rights
from edgellm.rpc.trust.trust import Trust
from edgellm.storage import resolve
from edgellm.storage.layers.manifest import LayerPiece, Manifest, manifest_of
from testkit import ROOT
from testkit.hostile.poisoned_layers import FIRST, LAST, Bytes, claimed, deadly, garbled

MODEL = "edgellm-verifier"
QUESTION = "Where is my red mug?"


def edgellm(home: Path, *words: str, seconds: float = 120.0) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a command of the user whose files are in `home`."""
    done = subprocess.run(
        [sys.executable, "-m", "edgellm", *words], cwd=ROOT, env=os.environ | {"EDGELLM_HOME": str(home)},
        capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


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

    def deploy(self) -> tuple[int, str, str]:
        split = f"desk:{FIRST + 1}-{LAST + 1}"
        return edgellm(self.folder / "owner", "mesh", "deploy", MODEL, "--split", split)

    def run(self, split: str = f"here:1-{FIRST},desk:{FIRST + 1}-{LAST + 1}") -> tuple[int, str, str]:
        words = ("--split", split, "--max-tokens", "12", "--retrieval", "off", "--ctx-size", "256")
        return edgellm(self.folder / "owner", "mesh", "run", MODEL, QUESTION, *words)

    def alone(self) -> str:
        """Return the reply that the owner's device writes without the worker."""
        return self.run(f"here:1-{LAST + 1}")[1]


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


class Attacker:
    """The calls that a device with the right `files` may make to the worker."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def removes(self, fingerprint: str) -> None:
        async def work(channel: grpc.aio.Channel) -> None:
            await clean(channel, "the worker", fingerprint)

        self._ask(work)

    def brings(self, manifest: Manifest, pieces: Bytes, places: Sequence[int]) -> None:
        async def work(channel: grpc.aio.Channel) -> None:
            def cut(piece: LayerPiece) -> Iterator[bytes]:
                return iter([pieces[piece]])

            await upload(channel, "the worker", manifest, places, cut, RateLimiter(), lambda _carried: None)

        self._ask(work)

    def wants(self, manifest: Manifest, places: Sequence[int], data: bytes = b"") -> None:
        """Announce pieces, and send nothing of them, or a false beginning."""

        async def work(channel: grpc.aio.Channel) -> None:
            bring: Any = channel.stream_stream(method("Put"), pb.PutFrame.SerializeToString, pb.PutReply.FromString)
            call = bring()
            wanted = pb.Wanted(protocol=PROTOCOL, recipe=write_manifest(manifest), pieces=places)
            await call.write(pb.PutFrame(wanted=wanted))
            await call.read()
            if data:
                await call.read()
                await call.write(pb.PutFrame(portion=pb.Portion(piece=places[0], data=data)))
                await call.read()
            call.cancel()

        self._ask(work)

    def _ask(self, work: Callable[[grpc.aio.Channel], object]) -> None:
        async def call_worker() -> None:
            address = Address(self._home.host, self._home.port)
            async with (await connect_authenticated(address, self._home.attacker))[0] as channel:
                await work(channel)  # type: ignore[misc]

        with suppress(EdgeError, grpc.aio.AioRpcError, asyncio.InvalidStateError):  # a refusal is no harm
            run_in_network_loop(call_worker()).result(60)


def trial(make: Callable[[Manifest, Path], Bytes], order: str, *options: str) -> list[str]:
    """Have the owner upload layers and write a reply before and after the attack; return the harm."""
    os.environ["EDGELLM_HOME"] = tempfile.gettempdir() + "/edgellm-attack"
    model = resolve(MODEL)
    as_deployed = [LayerRange(0, FIRST), LayerRange(FIRST, LAST + 1)]
    manifest = manifest_of(ModelFile.open(model), as_deployed)
    bad, pieces = claimed(manifest, make(manifest, model))
    with household("files", "--keep", "0.1", *options) as home:
        if order in ("first", "begun"):
            expected = home.alone()
        else:
            if "-m" not in options:
                home.deploy()
            code, expected, error = home.run()
            if code:
                return [f"{order}: nothing works before the attack: {error[-200:]}"]
            time.sleep(2.0)  # until the worker has unloaded its layers
        wrong = attacked(home, order, manifest, bad, pieces, expected)
        code, out, error = home.run()
        if not home.alive:
            wrong.append(f"{order}: the worker has ended with {home.process.poll() if home.process else None}")
        if code == 0 and out != expected:
            wrong.append(f"{order}: the reply is {out.strip()[:60]!r} instead of {expected.strip()[:60]!r}")
        if code:
            wrong.append(f"{order}: the owner's layers cannot be used any more: {error.strip()[-160:]}")
        return wrong


def attacked(home: Home, order: str, manifest: Manifest, bad: Manifest, pieces: Bytes, expected: str) -> list[str]:
    """Attack in the given `order`; return the harm seen at once."""
    attacker, places = Attacker(home), [at for at, piece in enumerate(manifest.pieces) if piece.first >= FIRST]
    if order == "restarted":
        home.stop()
        home.start()
    if order in ("removed", "restarted"):
        attacker.removes(manifest.fingerprint)
    if order == "announced":
        attacker.wants(bad, places)
    elif order == "begun":
        attacker.wants(manifest, places, b"garbage")
    else:
        attacker.brings(bad, pieces, places)
    if order not in ("first", "begun"):
        return []
    code, out, _ = home.run()
    wrong = [f"{order}: layers of the attacker were computed"] if code == 0 and out != expected else []
    code, _, error = home.deploy()
    return wrong + ([f"{order}: the owner cannot upload its layers any more: {error[-160:]}"] if code else [])


def poison(quick: bool) -> Found:
    return _tried(garbled, quick)


def crash(quick: bool) -> Found:
    return _tried(deadly, quick)


def _tried(make: Callable[[Manifest, Path], Bytes], quick: bool) -> Found:
    own = ("-m", MODEL)
    cases = [("removed", ()), ("restarted", ()), ("kept", ()), ("announced", ()), ("begun", ()), ("first", ()),
             ("removed", own), ("restarted", own), ("kept", own)]  # fmt: skip
    chosen = [("removed", ()), ("removed", own)] if quick else cases
    wrong = [harm for order, options in chosen for harm in trial(make, order, *options)]
    return Found(len(chosen), tuple(wrong))


ATTACKS = (
    Attack("layers-poisoned", "a device with `files` alone puts other layers in the place of another device's", poison),
    Attack("layers-deadly", "the same with layers that end the process that loads them", crash),
)
