"""Every call to a worker and a verifier with every set of rights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from edgellm.engine import Model
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO, SESSION, TOKENIZER, run_in_network_loop
from edgellm.rpc.layers import method
from edgellm.rpc.trust.handshake import connect_authenticated
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.services.mesh_codec import CARRY, HOLDS, WORK
from edgellm.services.server.servers import VerifierServer, WorkerServer
from edgellm.storage.layer_store import LayerStore
from tests.rpc.doors import ended
from tests.services.conftest import ANYWHERE

STREAM, UNARY = "stream_stream", "unary_unary"
WORKER = (
    (HOLDS, UNARY, Right.COMPUTE), (WORK, STREAM, Right.COMPUTE), (CARRY, STREAM, Right.COMPUTE),
    (method("Held"), UNARY, Right.FILES), (method("Put"), STREAM, Right.FILES), (method("Clean"), UNARY, Right.FILES),
    (method("Measure"), "unary_stream", Right.COMPUTE), (method("Flow"), STREAM, Right.COMPUTE),
    (method("Line"), UNARY, Right.COMPUTE),
)  # fmt: skip
VERIFIER = (
    (HELLO, UNARY, Right.VERIFY), (TOKENIZER, "unary_stream", Right.VERIFY),
    (SESSION, STREAM, Right.VERIFY),
)  # fmt: skip
SUBSETS = [frozenset(some) for size in range(4) for some in combinations(Right, size)]
Calls = Sequence[tuple[str, str, Right]]
_TRIES = 5  # gRPC's client says INTERNAL of its own where a refusal arrives while it writes


async def status_of(channel: grpc.aio.Channel, path: str, kind: str) -> str:
    """Return the status of a call with invalid bytes."""
    if kind == STREAM:
        return (await ended(channel, path, b"\xff\xff\xff")).partition(" ")[0]
    method: Any = getattr(channel, kind)(path)
    call = method(b"")
    with suppress(grpc.aio.AioRpcError):  # its status is read below
        await (call if kind == UNARY else call.read())
    if kind != UNARY:
        call.cancel()
    return str((await call.code()).name)


async def answer_of(channel: grpc.aio.Channel, path: str, kind: str) -> str:
    """Return "" if the guard refuses a call, or the status: any other passes it, also that the bytes are invalid."""
    for _ in range(_TRIES):
        if (code := await status_of(channel, path, kind)) != "INTERNAL":
            break
    return "" if code == "PERMISSION_DENIED" else code


def broken(server: Trust, client: Trust, address: Address, calls: Calls) -> tuple[int, list[str]]:
    """Try every call with every set of rights; return their number, and those whose answer is against the rule."""

    async def ask(some: frozenset[Right]) -> list[str]:
        async with (await connect_authenticated(address, client))[0] as channel:
            return [
                f"{path} with {', '.join(sorted(some)) or 'no right'}: {answer or 'refused'}"
                for path, kind, right in calls
                if bool(answer := await answer_of(channel, path, kind)) != (right in some)
            ]

    wrong = []
    for some in SUBSETS:
        server.peers.revoke(client.identity.id, Right)
        server.peers.grant(client.identity.id, some)
        wrong += run_in_network_loop(ask(some)).result(120)
    return len(SUBSETS) * len(calls), wrong


def test_a_worker_answers_a_call_with_its_right_alone(host: Trust, guest: Trust, tmp_path: Path) -> None:
    stored = StoredLayers(LayerStore(tmp_path / "store", 10**9))
    with WorkerServer(WeightCache(stored), ANYWHERE, trust=host, stored=stored) as worker:
        tried, wrong = broken(host, guest, worker.address, WORKER)
    assert (tried, wrong) == (len(SUBSETS) * 9, [])


def test_a_verifier_answers_with_the_right_to_verify_alone(host: Trust, guest: Trust, exact: Model) -> None:
    with VerifierServer(exact, ANYWHERE, sessions=1, context=64, threads=1, trust=host) as server:
        tried, wrong = broken(host, guest, server.address, VERIFIER)
    assert (tried, wrong) == (len(SUBSETS) * len(VERIFIER), [])
