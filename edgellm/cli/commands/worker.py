"""`edgellm serve --role worker`: the layers of this device, for models that several devices hold together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.cli.views.console import say
from edgellm.cli.views.text import size

if TYPE_CHECKING:
    from edgellm.services.server.verification_service import ServerEvent
    from edgellm.services.server.worker_server import WorkerServer


def serve_worker(
    model: Path | None,
    host: str,
    port: int,
    *,
    paired_only: bool,
    memory: float | None,
    keep: float,
    store: float | None = None,
) -> WorkerServer:
    """Start a worker. It has all layers of `model`, if given, and those that others bring, for which it has `store`
    gigabytes on disk. The limit of its `memory`, in gigabytes, is by default what is free now, less a tenth: without
    one, other devices would decide how much it takes.

    Raises what `WorkerServer` and, where the model cannot be cut, `WholeModel` raise.
    """
    from edgellm.mesh.profiling.free_memory import free_memory
    from edgellm.mesh.runtime.layer_sources import SeveralLayers, WholeModel
    from edgellm.mesh.runtime.stored_layers import StoredLayers
    from edgellm.mesh.runtime.weight_cache import Shelf
    from edgellm.rpc.address import Address
    from edgellm.rpc.trust.trust import Trust
    from edgellm.services.server.worker_server import WorkerServer
    from edgellm.storage.layers.store import LayerStore

    address = Address.of(host, port)
    trust = None if address.loopback and not paired_only else Trust.here()
    kept = LayerStore(limit=None if store is None else int(store * 1e9))
    brought = StoredLayers(kept)
    own = () if model is None else (WholeModel(model, kept),)
    layers = SeveralLayers(*own, brought)
    room, reason = free_memory() if memory is None else (int(memory * 1e9), "--memory")
    shelf = Shelf(layers, memory=room, keep=keep)
    server = WorkerServer(shelf, address, on_event=_tell, trust=trust, stored=brought)
    server.start()
    say(
        f"It is {server.address} in: edgellm mesh run MODEL PROMPT --split here:1-6,{server.address}:7-12", style="bold"
    )
    say(f"Memory for layers and caches: {size(room)} ({reason}).", style="dim")
    return server


def _tell(event: ServerEvent) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {event.text}")
