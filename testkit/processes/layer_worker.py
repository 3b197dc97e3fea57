"""A device that only keeps layers for others and measures itself.

    python -m testkit.processes.layer_worker --port 50151 --store layers

With `--home` it serves paired devices only, as the device with that home folder.
"""

import argparse
import signal
from pathlib import Path

from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.servers import WorkerServer
from edgellm.storage.layer_store import LayerStore


def serve(address: Address, store: LayerStore, trust: Trust | None) -> None:
    """Serve until SIGINT or SIGTERM."""
    stored = StoredLayers(store)
    server = WorkerServer(
        WeightCache(stored), address, on_event=lambda event: print(event.text), trust=trust, stored=stored
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.request_stop())
    print(f"listening at {server.start()}", flush=True)
    while not server.wait(1.0):  # signals are handled between two waits
        pass


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
    serve(Address(args.host, args.port), store, trust)


if __name__ == "__main__":
    main()
