"""`edgellm serve --role worker`: this device computes layers of models for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from edgellm.mesh.profiling.device_profiler import figures_here
from edgellm.mesh.runtime.stored_layers import StoredLayers
from edgellm.mesh.runtime.weight_cache import Shelf
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind, new_server
from edgellm.rpc.layers.service import layer_handlers
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor
from edgellm.rpc.trust.handshake import Offer, welcome_handlers
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.grpc_server import Listener
from edgellm.services.server.mesh_service import WorkerService
from edgellm.services.server.verification_service import Happened, ServerEvent

_TIDY_SECONDS = 1.0


class WorkerServer(Listener):
    """Computes layers for several coordinators at once."""

    def __init__(
        self,
        shelf: Shelf,
        address: Address,
        *,
        threads: int | None = None,
        offers: Sequence[Offer] = (),
        on_event: Callable[[ServerEvent], None] | None = None,
        trust: Trust | None = None,
        stored: StoredLayers | None = None,
    ) -> None:
        """With `stored`, others may bring layers to its store, and have this device measured. `offers` are told to
        paired devices. `on_event` is called from the loop's thread; it must not block.

        Raises:
            PairingRequired: the address is not loopback, and there is no `trust`.
        """
        super().__init__(address, trust)
        self.shelf = shelf
        self._threads, self._offers = threads, offers
        self._tell = on_event or (lambda _event: None)
        self._stored = stored

    def close(self) -> None:
        """Release all weights."""
        self.shelf.tidy(everything=True)

    async def _serve(self) -> None:
        server = new_server()
        guard = None if self.trust is None else AuthInterceptor(self.trust, self._refused)
        tasks = [asyncio.create_task(self._tidy())]
        if guard is not None:
            tasks.append(asyncio.create_task(guard.watch()))
        service = WorkerService(
            self.shelf, threads=self._threads, tell=self._tell, trust=self.trust, guard=guard, stored=self._stored
        )
        server.add_generic_rpc_handlers((service.handlers(),))
        if self._stored is not None:
            measurer = partial(figures_here, folder=self._stored.store.root, threads=self._threads)
            handlers = layer_handlers(self._stored.store, guard, self._brought, measurer, self.trust)
            server.add_generic_rpc_handlers((handlers,))
        if self.trust is not None and guard is not None:
            server.add_generic_rpc_handlers((welcome_handlers(self.trust, guard, self._offers),))
        try:
            self.address = bind(server, self.address, self.trust)
            await server.start()
            self._tell(ServerEvent(Happened.LISTENING, f"Layers are computed at {self.address}."))
            self._up.set()
            await self._goodbyes.get()
            self._tell(ServerEvent(Happened.STOPPING, "The worker stops; its coordinators go on without it."))
        finally:
            await server.stop(0)  # a reply may go on for minutes; its coordinator can go on without this device
            for task in tasks:
                task.cancel()
            self._tell(ServerEvent(Happened.STOPPED, "The worker has stopped."))

    def _refused(self, what: str) -> None:
        self._tell(ServerEvent(Happened.REFUSED, what))

    def _brought(self, what: str) -> None:
        self._tell(ServerEvent(Happened.CONNECTED, what))

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(_TIDY_SECONDS)
            if gone := await asyncio.to_thread(self.shelf.tidy):
                self._tell(ServerEvent(Happened.ENDED, f"{gone} pieces of models that nobody used were given back."))
