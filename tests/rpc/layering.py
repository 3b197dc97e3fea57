"""A device that takes layers, by mutual TLS or on this machine, in this process's network loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc.aio

from edgellm.engine import ModelFile
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind, new_server, open_channel, run_in_network_loop
from edgellm.rpc.layers.measuring import Measurer
from edgellm.rpc.layers.service import layer_handlers
from edgellm.rpc.layers.upload import Cut, RateLimiter, UploadProgress, upload
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor
from edgellm.rpc.trust.handshake import welcome_handlers
from edgellm.rpc.trust.trust import Trust
from edgellm.storage.layers.manifest import LayerPiece, Manifest, cut_piece
from edgellm.storage.layers.store import LayerStore


@asynccontextmanager
async def taking(
    store: LayerStore, trust: Trust | None = None, said: list[str] | None = None, measurer: Measurer | None = None
) -> AsyncIterator[Address]:
    """A device with this store; with `trust`, for paired devices alone."""
    told = said if said is not None else []
    server = new_server()
    guard = None if trust is None else AuthInterceptor(trust, told.append)
    watch = None if guard is None else asyncio.create_task(guard.watch())
    server.add_generic_rpc_handlers((layer_handlers(store, guard, told.append, measurer, trust),))
    if trust is not None and guard is not None:
        server.add_generic_rpc_handlers((welcome_handlers(trust, guard, []),))
    address = bind(server, Address("127.0.0.1", 0), trust)
    await server.start()
    try:
        yield address
    finally:
        if watch is not None:
            watch.cancel()
        await server.stop(None)


@contextmanager
def device_taking(store: LayerStore, trust: Trust | None = None, measurer: Measurer | None = None) -> Iterator[Address]:
    """`taking`, for a test outside the loop."""
    running = taking(store, trust, measurer=measurer)
    address = run_in_network_loop(running.__aenter__()).result(120)
    try:
        yield address
    finally:
        run_in_network_loop(running.__aexit__(None, None, None)).result(120)


def cutter(model: Path, manifest: Manifest) -> Cut:
    def cut(piece: LayerPiece) -> Iterator[bytes | memoryview]:
        return cut_piece(ModelFile.open(model), piece.layers)

    return cut


async def bring(
    address: Address, manifest: Manifest, wanted: list[int], cut: Cut, trust: Trust | None = None, rate: float = 0.0
) -> tuple[UploadProgress, list[UploadProgress]]:
    """What was carried, and all that was told on the way."""
    told: list[UploadProgress] = []
    channel: grpc.aio.Channel = open_channel(address, trust)
    try:
        return await upload(channel, "desk", manifest, wanted, cut, RateLimiter(rate), told.append), told
    finally:
        await channel.close(None)
