"""A device that takes layers, by mutual TLS or on this machine, in this process's network loop."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial

from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel, run_in_network_loop
from edgellm.rpc.layers import Cut, RateLimiter, upload
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.layer_service import LayerService, Measurer
from edgellm.storage.layer_pieces import Manifest
from edgellm.storage.layer_store import LayerStore
from tests.rpc.doors import serving
from tests.storage.pieces import part


def taking(
    store: LayerStore, trust: Trust | None = None, measurer: Measurer | None = None
) -> AbstractAsyncContextManager[Address]:
    """A device with this store; with `trust`, for paired devices alone."""
    return serving(trust, make=partial(LayerService, store, measurer=measurer))


@contextmanager
def device_taking(store: LayerStore, trust: Trust | None = None, measurer: Measurer | None = None) -> Iterator[Address]:
    """`taking`, for a test outside the loop."""
    running = taking(store, trust, measurer=measurer)
    address = run_in_network_loop(running.__aenter__()).result(120)
    try:
        yield address
    finally:
        run_in_network_loop(running.__aexit__(None, None, None)).result(120)


async def bring(
    address: Address, manifest: Manifest, wanted: Sequence[int], cut: Cut, trust: Trust | None = None, rate: float = 0.0
) -> list[tuple[int, int]]:
    """Return the bytes that have arrived and that were sent, as was told on the way and in the end."""
    told: list[tuple[int, int]] = []
    pieces = part(manifest, *(manifest.pieces[place] for place in wanted))
    async with open_channel(address, trust) as channel:
        await upload(channel, "desk", pieces, cut, RateLimiter(rate), lambda *moved: told.append(moved))
    return told
