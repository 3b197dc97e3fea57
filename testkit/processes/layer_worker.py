"""A device that only keeps layers for others and measures itself.

    python -m testkit.processes.layer_worker --port 50151 --store layers

With `--home` it serves paired devices only, as the device with that home folder.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from functools import partial
from pathlib import Path

from edgellm.mesh.device_profiler import measure_device
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind, new_server
from edgellm.rpc.layers.service import layer_handlers
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor
from edgellm.rpc.trust.handshake import welcome_handlers
from edgellm.rpc.trust.trust import Trust
from edgellm.storage.layers.store import LayerStore


async def serve(address: Address, store: LayerStore, trust: Trust | None) -> None:
    """Serve until SIGINT or SIGTERM."""
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    server = new_server()
    guard = None if trust is None else AuthInterceptor(trust, print)
    watch = None if guard is None else asyncio.create_task(guard.watch())
    measurer = partial(measure_device, folder=store.root)
    server.add_generic_rpc_handlers((layer_handlers(store, guard, print, measurer, trust),))
    if trust is not None and guard is not None:
        server.add_generic_rpc_handlers((welcome_handlers(trust, guard, []),))
    at = bind(server, address, trust)
    await server.start()
    print(f"listening at {at}", flush=True)
    await over.wait()
    if watch is not None:
        watch.cancel()
    await server.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--home", type=Path, help="answer paired devices alone")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--limit", type=float, default=100.0, help="gigabytes")
    args = parser.parse_args()
    trust = None if args.home is None else Trust.load(args.home / "data" / "trust")
    store = LayerStore(args.store, int(args.limit * 1e9))
    asyncio.run(serve(Address(args.host, args.port), store, trust))


if __name__ == "__main__":
    main()
