"""Use the rights of a paired device to do what it may not, also when one is taken away meanwhile."""

import asyncio
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from bench.robustness.attack.devices.household import MODEL, Home, household
from bench.robustness.attack.harness import Attack, Found
from edgellm.engine import ModelFile, check_gguf
from edgellm.errors import EdgeError
from edgellm.layer_range import LayerRange
from edgellm.mesh.messages import StageSpec
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.layers import RateLimiter, upload
from edgellm.rpc.protos import mesh_pb2
from edgellm.rpc.trust.handshake import connect_authenticated
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.services.mesh_codec import WORK, write_work
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.layer_pieces import cut_piece, manifest_of
from edgellm.storage.layer_store import LayerStore
from edgellm.storage.model_files import resolve


def revoked(quick: bool) -> Found:
    """Take the right away while layers arrive, and while tokens are computed."""
    os.environ["EDGELLM_HOME"] = tempfile.gettempdir() + "/edgellm-attack"
    rounds, wrong, longest = 1 if quick else 5, list[str](), 0.0
    with household("compute files", "-m", MODEL) as home:
        server, who = Trust.load(home.folder / "worker" / "data" / "trust"), home.attacker.identity.id
        for _ in range(rounds):
            for right, work in ((Right.FILES, _bring), (Right.COMPUTE, _compute)):
                server.peers.grant(who, Right)
                events: list[float] = []
                running = run_in_network_loop(work(home, events))
                while len(events) < 3 and not running.done():
                    time.sleep(0.01)
                server.peers.revoke(who, [right])
                taken = time.monotonic()
                try:
                    running.result(20)
                    wrong.append(f"{right} was taken away, and all was done")
                except (EdgeError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    pass
                except TimeoutError:
                    wrong.append(f"{right} was taken away, and it goes on")
                    running.cancel()
                longest = max([longest, *(moment - taken for moment in events)])
    if longest > 2.0:
        wrong.append(f"something was done {longest:.1f} s after the right was taken away")
    return Found(2 * rounds, tuple(wrong), {"longest_s": round(longest, 2)})


async def _bring(home: Home, events: list[float]) -> None:
    model = ModelFile.open(resolve(MODEL))
    manifest = await asyncio.to_thread(manifest_of, model)

    def on_progress(_arrived: int, sent: int) -> None:
        if sent:
            events.append(time.monotonic())

    async with (await connect_authenticated(Address(home.host, home.port), home.attacker))[0] as channel:
        pace = RateLimiter(2e6)
        await upload(channel, "worker", manifest, lambda piece: cut_piece(model, piece.layers), pace, on_progress)


async def _compute(home: Home, events: list[float]) -> None:
    work = _work(range(6), 256)
    async with (await connect_authenticated(Address(home.host, home.port), home.attacker))[0] as channel:
        call: Any = channel.stream_stream(WORK)()  # type: ignore[call-arg]
        prepare = write_work(work)
        await call.write(mesh_pb2.Order(prepare=prepare).SerializeToString())
        for number in range(1, 10**6):
            batch = mesh_pb2.MeshParcel(session=0, number=number, start=0, ids=[5, 6, 7])
            await call.write(mesh_pb2.Order(parcel=batch).SerializeToString())
            data = await call.read()
            while not isinstance(data, bytes) or not mesh_pb2.Report.FromString(data).HasField("onward"):
                if not isinstance(data, bytes):
                    raise EdgeError("The stage has ended.", "That is right.")
                data = await call.read()
            events.append(time.monotonic())


def _work(layers: range, context: int) -> StageSpec:
    """Return the order for a stage of the bundled verifier."""
    model = resolve(MODEL)
    vocabulary = next(t.shape[-1] for t in check_gguf(model).tensors if t.name == "token_embd.weight")
    return StageSpec(fingerprint(model), "v", LayerRange(layers[0], layers[-1] + 1), 12, 192, vocabulary, context, 1)


def memory(quick: bool) -> Found:
    """Have a worker allocate as many positions as can be requested, again and again."""
    rounds, wrong = 3 if quick else 20, list[str]()
    with household("compute", "-m", MODEL) as home:
        room, calls = psutil.virtual_memory().available, []

        async def ask() -> None:
            work = _work(range(12), 2**20)
            channel = (await connect_authenticated(Address(home.host, home.port), home.attacker))[0]
            call: Any = channel.stream_stream(WORK)()  # type: ignore[call-arg]
            prepare = write_work(work)
            await call.write(mesh_pb2.Order(prepare=prepare).SerializeToString())
            calls.append((channel, call))

        for _ in range(rounds):
            run_in_network_loop(ask()).result(30)
        time.sleep(3.0)
        taken = psutil.Process(home.process.pid).memory_info().rss if home.alive else 0
        if not home.alive:
            wrong.append("the worker has ended")
        if taken > room:
            wrong.append(f"the worker takes {taken / 1e9:.1f} GB of {room / 1e9:.1f} GB")
        for channel, _ in calls:
            run_in_network_loop(channel.close(None)).result(10)
    return Found(rounds, tuple(wrong), {"taken_gb": round(taken / 1e9, 2)})


def links(_quick: bool) -> Found:
    """Put links at the paths that a store of layers writes."""
    os.environ["EDGELLM_HOME"] = tempfile.gettempdir() + "/edgellm-attack"
    model, wrong = resolve(MODEL), list[str]()
    manifest = manifest_of(ModelFile.open(model))
    piece = manifest.pieces[0]
    names = (f"pieces/{piece.sha256}.{piece.size}.here.partial", "lock", "here.lock", "records.json")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            precious, root = Path(folder) / "precious", Path(folder) / "store"
            precious.write_text("mine")
            (root / name).parent.mkdir(parents=True)
            (root / name).symlink_to(precious)
            store = LayerStore(root, 10**9)
            with suppress(EdgeError, OSError):
                store.reserve(replace(manifest, pieces=(piece,)))
                store.append(piece, 0, b"written through a link")
            if precious.read_text() != "mine":
                wrong.append(f"{name}: written through a link")
    return Found(len(names), tuple(wrong))


ATTACKS = (
    Attack("rights-revoked", "a right is taken away while layers arrive and while tokens are computed", revoked),
    Attack("compute-memory", "a device with `compute` repeatedly requests a million positions", memory),
    Attack("store-links", "links to a user's files at the paths that a store of layers writes", links),
)
