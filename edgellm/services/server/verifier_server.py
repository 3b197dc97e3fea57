"""A verifier that other devices can ask: the model, its worker, and the gRPC service in the network's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc.aio

from edgellm.engine import Context, Model, head_pays
from edgellm.errors import InvalidOption
from edgellm.rpc.address import Address
from edgellm.rpc.channel import DEFAULT_PORT, MAX_CHUNK, bind, new_server, probe
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor
from edgellm.rpc.trust.handshake import Offer, welcome_handlers
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.grpc_server import Listener
from edgellm.services.server.verification_service import Happened, ServerEvent, Service
from edgellm.spec.draft_length import CostCurve
from edgellm.storage.fingerprint import fingerprint
from edgellm.verifier.requests import Counters
from edgellm.verifier.scheduler import SchedulerLimits
from edgellm.verifier.served_in_process import InsideVerifier
from edgellm.verifier.worker import VerifierWorker

_POSITIONS = 4096  # per session, where the model was trained for more and nobody asked for more


class VerifierServer(Listener):
    """Verifies for several devices at once. `start`, then `stop`; both may come from any thread."""

    def __init__(
        self,
        model: Model,
        address: Address,
        *,
        sessions: int = 8,
        context: int | None = None,
        threads: int | None = None,
        max_waiting: int = 128,
        limits: SchedulerLimits | None = None,
        on_event: Callable[[ServerEvent], None] | None = None,
        trust: Trust | None = None,
    ) -> None:
        """Reserve memory for `sessions` replies of `context` tokens each. More replies may be open than that.

        With `trust`, answer only paired devices, by mutual TLS; without it, every caller on this machine.
        `on_event` is called from the loop's thread, and must not block. `model` stays the caller's to close.

        Raises:
            PairingRequired: the address is not loopback, and there is no `trust`.
            InvalidOption: a size that cannot be meant.
            EngineFailed: no memory for that many sessions.
        """
        super().__init__(address, trust)
        self.model = model
        self.sessions = _positive("sessions", sessions)
        self.context_length = _positions(model, context)
        limits = limits or SchedulerLimits()
        self._max_waiting = _positive("max_waiting", max_waiting)
        self._model_hash = ""
        with suppress(OSError):  # the file has gone since: devices are not told
            self._model_hash = fingerprint(model.path)
        self._tell = on_event or (lambda _event: None)
        # llama.cpp aborts where a batch cannot hold a row of every sequence; the longest chunk fits in any case
        rows = max(limits.rows, sessions, MAX_CHUNK + 1)
        engine = Context(
            model, n_ctx=self.context_length, n_seq=sessions, n_batch=rows, threads=threads, unified=False,
            late=head_pays(model),
        )  # fmt: skip
        self._worker = VerifierWorker(engine, sessions, model.is_eog, limits)

    @property
    def counters(self) -> Counters:
        """Counters of the work done so far."""
        return self._worker.counters

    def inside(self) -> InsideVerifier:
        """Return this verifier for use in this process; its requests share batches with those of devices."""
        return InsideVerifier(self._worker, self.model.name, self.context_length)

    def fill(self, curve: CostCurve) -> None:
        """Set to how many rows the decodes of a device that is alone are filled up; see `Context.fill`."""
        self._worker.fill(*curve.filling())

    def close(self) -> None:
        """Close the model, after the server has ended."""
        self.model.close()

    async def _serve(self) -> None:
        server = new_server()
        guard = None if self.trust is None else AuthInterceptor(self.trust, self._refused)
        watch = None if guard is None else asyncio.create_task(guard.watch())
        service = Service(
            self._worker,
            vocabulary=self.model.vocabulary,
            model=self.model.name,
            model_hash=self._model_hash,
            context=self.context_length,
            max_waiting=self._max_waiting,
            tell=self._tell,
            guard=guard,
        )
        server.add_generic_rpc_handlers((service.handlers(),))
        if self.trust is not None and guard is not None:
            server.add_generic_rpc_handlers((welcome_handlers(self.trust, guard, [self._offer()]),))
        try:
            self.address = bind(server, self.address, self.trust)
            await server.start()
            self._worker.start()
            self._tell(ServerEvent(Happened.LISTENING, f"{self.model.name} verifies at {self.address}."))
            self._up.set()
            await self._finish(server, service)
        finally:
            await server.stop(None)
            if watch is not None:
                watch.cancel()
            await asyncio.to_thread(self._worker.close)

    def _offer(self) -> Offer:
        return Offer("verifier", self.model.name, self.model.size_bytes, self.model.vocabulary.fingerprint)

    def _refused(self, what: str) -> None:
        self._tell(ServerEvent(Happened.REFUSED, what))

    async def _finish(self, server: grpc.aio.Server, service: Service) -> None:
        """Wait for a stop request, then for requests in flight; a later stop request may shorten that."""
        grace = await self._goodbyes.get()
        self._tell(ServerEvent(Happened.STOPPING, "The verifier finishes what is in flight, and takes nothing new."))
        service.drain()
        await self._farewell(server, grace)
        self._tell(ServerEvent(Happened.STOPPED, "The verifier has stopped."))


def serve_verifier(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    sessions: int = 8,
    context: int | None = None,
    threads: int | None = None,
    gpu_layers: int = 0,
    paired_only: bool = False,
    on_event: Callable[[ServerEvent], None] | None = None,
    progress: Callable[[float], None] | None = None,
    measure: Callable[[Model], CostCurve] | None = None,
) -> VerifierServer:
    """Load the model file and serve it; return the running server, which the caller stops. `measure` returns the cost
    curve of the loaded model, before any request; see `VerifierServer.fill`.

    Off loopback, and with `paired_only` everywhere, paired devices alone are answered, by mutual TLS.

    Raises:
        PairingRequired, TrustUnusable, PortTaken, InvalidOption: nobody can or may listen there; said before the model
            is loaded.
        ModelNotFound, ModelCorrupt, ModelUnsupported, EngineFailed: from loading.
    """
    address = Address.of(host, port)
    trust = None if address.loopback and not paired_only else Trust.here()
    if trust is not None:
        trust.require_peers()
    probe(address)
    loaded = Model.load(model, gpu_layers=gpu_layers, progress=progress)
    curve = None if measure is None else measure(loaded)
    server = VerifierServer(
        loaded,
        address,
        sessions=sessions,
        context=context,
        threads=threads,
        on_event=on_event,
        trust=trust,
    )
    if curve is not None:
        server.fill(curve)
    server.start()
    return server


def _positions(model: Model, wanted: int | None) -> int:
    if wanted is None:
        return min(model.n_ctx_train, _POSITIONS)
    if wanted > model.n_ctx_train:
        raise InvalidOption(
            f"context is {wanted}, and {model.name} was trained for {model.n_ctx_train} tokens.",
            "Give that many at most.",
        )
    return _positive("context", wanted)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidOption(f"{name} is {value}.", "Give a whole number of at least 1.")
    return value
