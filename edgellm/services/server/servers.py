"""Servers of a verifier and of layers, which are started and stopped from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc.aio

from edgellm.engine import Context, ContextSpec, Model, ModelFile, head_pays
from edgellm.engine.hardware import ON_PROCESSOR, Hardware
from edgellm.engine.memory_fit import LEAST_CONTEXT, check_context, place_sessions
from edgellm.errors import InvalidOption
from edgellm.mesh.device_profiler import measure_device
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.channel import (
    DEFAULT_PORT,
    MAX_CHUNK,
    bind,
    check_bindable,
    network_loop,
    new_server,
    run_in_network_loop,
)
from edgellm.rpc.layers.service import layer_handlers
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor
from edgellm.rpc.trust.handshake import OfferedModel, welcome_handlers
from edgellm.rpc.trust.trust import Trust
from edgellm.services.handshake import VerifierInfo
from edgellm.services.server.mesh_service import WorkerService
from edgellm.services.server.rpc_engine_service import RpcEngineService
from edgellm.services.server.verification_service import EventKind, ServerEvent, VerificationService
from edgellm.services.server.verifying_model import VerifyingModel, tokenizer_to_send
from edgellm.spec.draft_length import CostCurve
from edgellm.spec.model_sampling import sampling_of
from edgellm.spec.verifier import Capabilities
from edgellm.storage import name_of
from edgellm.storage.fingerprint import fingerprint
from edgellm.verifier.extra_drafts import ExtraDrafts
from edgellm.verifier.in_process import ColocatedVerifier, VerifierWorker
from edgellm.verifier.judgement import Counters
from edgellm.verifier.scheduler import SchedulerLimits

SESSIONS = 8
"""Replies for which a verifier has memory, by default."""
GRACE_SECONDS = 10.0  # for what is in flight, when the server is stopped


class Listener:
    """`start`, then `stop`; both may come from any thread. Subclasses implement `_serve`."""

    def __init__(self, address: Address, trust: Trust | None) -> None:
        """With `trust`, answer only paired devices, by mutual TLS; without it, every caller on this machine.

        Raises:
            PairingRequired: the address is not loopback, and there is no `trust`.
        """
        self.address = address if trust is not None else address.require_loopback()
        self.trust = trust
        self._task: Future[None] | None = None
        self._started = threading.Event()  # listening, or failed to
        self._error: BaseException | None = None
        self._stop_requests: asyncio.Queue[float] = asyncio.Queue()

    def start(self) -> Address:
        """Start to listen; return the address, with the real port if port 0 was asked for.

        Raises:
            PairingRequired: with `trust`, no device is paired.
            PortTaken: something else listens there.
            InvalidOption: this machine does not have the address, or does not give away the port.
        """
        self._task = run_in_network_loop(self._live())
        self._started.wait()
        if self._error is not None:
            self._task.result()
            raise self._error
        return self.address

    def request_stop(self, grace: float = GRACE_SECONDS) -> None:
        """Begin to stop, and return at once; may be called in a signal handler, and again with less grace.

        Nothing new is taken from now on. What is in flight is finished, for at most `grace` seconds; 0 cuts it off.
        """
        if self._task is not None and not self._task.done():
            network_loop().call_soon_threadsafe(self._stop_requests.put_nowait, grace)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has ended; return whether it has."""
        return self._task is None or bool(wait_for([self._task], timeout).done)

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Stop, and return when everything is closed."""
        self.request_stop(grace)
        self.wait()

    def close(self) -> None:
        """Release the server's resources, after it has ended."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    async def _live(self) -> None:
        try:
            await self._serve()
        except Exception as error:  # noqa: BLE001 - whatever it is, `start` waits for it and raises it
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        """Serve until a stop is requested; set `_started` once the server listens."""
        raise NotImplementedError

    async def _shut_down(self, server: grpc.aio.Server, grace: float) -> None:
        """Stop the server; a further stop request may shorten the `grace`."""
        closing = asyncio.create_task(server.stop(grace))
        while grace > 0 and not closing.done():
            shorten = asyncio.create_task(self._stop_requests.get())
            await asyncio.wait({closing, shorten}, return_when=asyncio.FIRST_COMPLETED)
            if not shorten.cancel():
                grace = shorten.result()
                if grace <= 0:
                    await server.stop(None)
        await closing


class SessionServer(Listener):
    """Answers sessions of several devices at once. Subclasses say what verifies."""

    def __init__(self, address: Address, on_event: Callable[[ServerEvent], None] | None, trust: Trust | None) -> None:
        """`on_event` is called from the loop's thread, and must not block.

        Raises:
            PairingRequired: the address is not loopback, and there is no `trust`.
        """
        super().__init__(address, trust)
        self._notify = on_event or (lambda _event: None)
        self._preparing = ""
        self._serving: list[VerifyingModel] = []
        self._offers: list[OfferedModel] = []
        self._service: VerificationService | None = None

    def verifying(self) -> Sequence[VerifyingModel]:
        """Return the models that are served, whose backends are closed with this server."""
        raise NotImplementedError

    def prepare(self, doing: str) -> None:
        """Note what is done before the first model is served, such as "loading a.gguf", for devices that ask
        meanwhile."""
        self._preparing = doing

    def _offer(self, model: VerifyingModel) -> OfferedModel:
        info = model.info
        return OfferedModel("verifier", info.model, model.size_bytes, info.vocabulary, info.behind)

    async def _serve(self) -> None:
        server = new_server()
        guard = None if self.trust is None else AuthInterceptor(self.trust, self._refused)
        watch = None if guard is None else asyncio.create_task(guard.watch())
        self._serving = list(self.verifying())
        self._offers = [*map(self._offer, self._serving)]
        service = self._service = VerificationService(
            self._serving, notify=self._notify, guard=guard, preparing=lambda: self._preparing
        )
        server.add_generic_rpc_handlers((service.handlers(),))
        if self.trust is not None and guard is not None:
            server.add_generic_rpc_handlers((welcome_handlers(self.trust, guard, self._offers),))
        try:
            self.address = bind(server, self.address, self.trust)
            await server.start()
            for model in self._serving:
                self._begin(model)
            self._started.set()
            await self._finish(server, service)
        finally:
            await server.stop(None)
            if watch is not None:
                watch.cancel()
            for model in self._serving:
                await asyncio.to_thread(model.backend.close)

    def _begin(self, model: VerifyingModel) -> None:
        model.backend.start()
        self._notify(ServerEvent(EventKind.LISTENING, f"{model.name} verifies at {self.address}."))

    async def _serve_another(self, model: VerifyingModel) -> None:
        """Serve another model from now on, if the server runs; it is closed with it."""
        if self._service is not None:
            self._serving.append(model)
            self._offers.append(self._offer(model))
            self._service.add(model)
            self._begin(model)

    def _refused(self, what: str) -> None:
        self._notify(ServerEvent(EventKind.REFUSED, what))

    async def _finish(self, server: grpc.aio.Server, service: VerificationService) -> None:
        """Wait for a stop request, then for requests in flight; a later stop request may shorten that."""
        grace = await self._stop_requests.get()
        self._notify(
            ServerEvent(EventKind.STOPPING, "The verifier finishes running requests, and accepts no new ones.")
        )
        service.drain()
        await self._shut_down(server, grace)
        self._notify(ServerEvent(EventKind.STOPPED, "The verifier has stopped."))


class VerifierServer(SessionServer):
    """Verifies for several devices at once. `start`, then `stop`; both may come from any thread."""

    model: Model
    pieces = ""
    """By how many tokens prefills advance, and why; "" while nothing is measured."""

    def __init__(
        self,
        model: Model | None,
        address: Address,
        *,
        on_event: Callable[[ServerEvent], None] | None = None,
        trust: Trust | None = None,
        **options: Any,
    ) -> None:
        """Serve `model` with these options of `use`; without it, listen, and have devices wait for `use`.

        With `trust`, answer only paired devices, by mutual TLS; without it, every caller on this machine.
        `on_event` is called from the loop's thread, and must not block.

        Raises:
            PairingRequired: the address is not loopback, and there is no `trust`.
            Also what `use` raises.
        """
        super().__init__(address, on_event, trust)
        self._verifying: tuple[VerifyingModel, ...] = ()
        if model is not None:
            self.use(model, **options)

    def use(
        self,
        model: Model,
        *,
        sessions: int = SESSIONS,
        context: int | None = None,
        threads: int | None = None,
        max_waiting: int = 128,
        limits: SchedulerLimits | None = None,
        curve: CostCurve | None = None,
        placement: str = "",
    ) -> None:
        """Serve `model` from now on. Memory is reserved for `sessions` replies of `context` tokens each; more may be
        open than that. It stays the caller's to close; the rows of a batch are those of its hardware, unless there are
        `limits`. By its cost `curve` it is chosen to how many rows the decodes of a device that is alone are filled up
        (see `Context.fill`), and by how many tokens prefills advance. `placement` says where it is, and why.

        Raises:
            InvalidOption: a size that cannot be meant.
            EngineFailed: no memory for that many sessions.
        """
        self.model, self.placement = model, placement
        self.sessions = positive("sessions", sessions)
        self.context_length = _positions(model, context)
        positive("max_waiting", max_waiting)
        limits = limits or _limits(model.hardware.n_batch)
        model_hash = ""
        with suppress(OSError):  # the file has been removed: it is not offered
            model_hash = fingerprint(model.path)
        # llama.cpp aborts where a batch cannot hold a row of every sequence; the longest chunk fits in any case
        rows = max(limits.rows, sessions, MAX_CHUNK + 1)
        spec = ContextSpec(
            self.context_length, sessions, rows, threads, unified=False, lazy=head_pays(model), rolls_back=True,
            speculates=True,
        )  # fmt: skip
        engine = Context(model, spec)
        drafts = None if engine.speculator is None else ExtraDrafts(engine.speculator, model.is_eog)
        self._worker = VerifierWorker(engine, sessions, model.is_eog, limits, drafts)
        if curve is not None:
            self._worker.fill(*curve.filling())
            self.pieces = self._worker.use_curve(curve.rows, curve.seconds)
        name, vocabulary = name_of(model.path), model.vocabulary
        capabilities = Capabilities(
            name, self.context_length, logprobs=True, penalties=True, grammars=True,
            drafts_extra=engine.speculator is not None,
        )  # fmt: skip
        info = VerifierInfo(
            capabilities, vocabulary.fingerprint, vocabulary.size, sampling_of(model.file), model_hash,
            model.chat_template_source,
        )  # fmt: skip
        verifying = VerifyingModel(
            info, vocabulary, self._worker, max_waiting, model.grammar, model.size_bytes,
            tokenizer_to_send(model.file, name),
        )  # fmt: skip
        self._verifying = (verifying,)
        if self._task is not None:
            run_in_network_loop(self._serve_another(verifying)).result()

    @property
    def counters(self) -> Counters:
        """Counters of the work done so far."""
        return self._worker.counters

    def close(self) -> None:
        """Close the model, after the server has ended."""
        self.model.close()

    def inside(self) -> ColocatedVerifier:
        """See `VerifyingModel.inside`."""
        return self._verifying[0].inside()

    def verifying(self) -> Sequence[VerifyingModel]:
        """See `SessionServer.verifying`: it is one, or none before `use`."""
        return self._verifying


def serve_verifier(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    sessions: int | None = None,
    context: int | None = None,
    threads: int | None = None,
    hardware: Hardware = ON_PROCESSOR,
    eagle3: ModelFile | None = None,
    paired_only: bool = False,
    on_event: Callable[[ServerEvent], None] | None = None,
    progress: Callable[[float], None] | None = None,
    measure: Callable[[Model], CostCurve] | None = None,
) -> VerifierServer:
    """Listen, load the model file and serve it; return the running server, which the caller stops. Devices that connect
    meanwhile wait, and are told what is done. It reserves memory for that
    many `sessions`, by default for `SESSIONS`, or as many as fit: `VerifierServer.placement` says why. `measure`
    returns the cost curve of the loaded model, before any request; see `VerifierServer.use`. `eagle3` is an
    EAGLE-3 head that drafts the extra tokens of verdicts.

    Off loopback, and with `paired_only` everywhere, paired devices alone are answered, by mutual TLS.

    Raises:
        PairingRequired, TrustUnusable, PortTaken, InvalidOption: it is impossible to listen there; raised before the
        model
            is loaded.
        ModelNotFound, ModelCorrupt, ModelUnsupported, EngineFailed: from loading.
        ModelUnsupported: the head does not fit the model.
        MemoryShort: the sessions, or not even one of them, do not fit; raised before the model is loaded.
    """
    wanted = SESSIONS if sessions is None else positive("sessions", sessions)
    address = Address.of(host, port)
    trust = None if address.loopback and not paired_only else Trust.load()
    if trust is not None:
        trust.require_peers()
    check_bindable(address)
    file, hardware = ModelFile.open(model), replace(hardware, n_ctx=context or hardware.n_ctx)
    check_context(file.header, file.path.name, hardware.n_ctx)
    placed = place_sessions(
        file, hardware, Counter(), sessions=wanted, fewer=sessions is None, eagle3=eagle3
    )  # fmt: skip
    server = VerifierServer(None, address, on_event=on_event, trust=trust)
    name = name_of(model)
    server.prepare(f"loading {name}")
    server.start()
    try:
        loaded = Model.load(
            placed.file, hardware=placed.hardware, progress=progress, speculates=True, eagle3=placed.eagle3
        )
        server.prepare(f"measuring {name}")
        curve = None if measure is None else measure(loaded)
        server.use(
            loaded, sessions=placed.sessions, context=context, threads=threads, curve=curve, placement=placed.reason
        )  # fmt: skip
    except BaseException:
        server.stop(0.0)
        raise
    return server


def _limits(rows: int | None) -> SchedulerLimits:
    """Return the limits for batches of that many rows, or the default ones."""
    default = SchedulerLimits()
    return default if rows is None else replace(default, rows=rows, chunk=min(default.chunk, rows), solo_chunk=rows)


def _positions(model: Model, wanted: int | None) -> int:
    wanted = model.hardware.n_ctx if wanted is None else wanted
    if wanted is None:
        return min(model.n_ctx_train, LEAST_CONTEXT)
    check_context(model.header, model.name, wanted)
    return positive("context", wanted)


def positive(name: str, value: int) -> int:
    """Return `value`. Raises InvalidOption where it is less than 1."""
    if value < 1:
        raise InvalidOption(f"{name} is {value}.", "Give a whole number of at least 1.")
    return value


_TIDY_SECONDS = 1.0


class WorkerServer(Listener):
    """Computes layers for several coordinators at once."""

    def __init__(
        self,
        cache: WeightCache,
        address: Address,
        *,
        on_event: Callable[[ServerEvent], None] | None = None,
        trust: Trust | None = None,
        stored: StoredLayers | None = None,
        rpc_engine: bool = False,
    ) -> None:
        """With `stored`, other devices may upload layers to its store, and have this device measured. `rpc_engine`:
        they may also have it run llama.cpp's RPC server, which obeys them and is no sandbox. `on_event` is called from
        the loop's thread; it must not block.

        Raises:
            PairingRequired: the address is not loopback, and there is no `trust`.
        """
        super().__init__(address, trust)
        self.cache = cache
        self._notify = on_event or (lambda _event: None)
        self._stored, self._rpc_engine = stored, rpc_engine

    def close(self) -> None:
        """Release all weights."""
        self.cache.evict_unused(everything=True)

    async def _serve(self) -> None:
        server = new_server()
        guard = None if self.trust is None else AuthInterceptor(self.trust, self._refused)
        tasks = [asyncio.create_task(self._evict_unused())]
        if guard is not None:
            tasks.append(asyncio.create_task(guard.watch()))
        service = WorkerService(self.cache, notify=self._notify, trust=self.trust, guard=guard, stored=self._stored)
        server.add_generic_rpc_handlers((service.handlers(),))
        if self._rpc_engine:
            rpc_engine = RpcEngineService(self.cache, notify=self._notify, guard=guard)
            server.add_generic_rpc_handlers((rpc_engine.handlers(),))
        if self._stored is not None:
            measurer = partial(
                measure_device, folder=self._stored.store.root, unit=self.cache.unit, memory=self.cache.available
            )
            handlers = layer_handlers(self._stored.store, guard, self._notify_upload, measurer, self.trust)
            server.add_generic_rpc_handlers((handlers,))
        if self.trust is not None and guard is not None:
            server.add_generic_rpc_handlers((welcome_handlers(self.trust, guard, ()),))
        try:
            self.address = bind(server, self.address, self.trust)
            await server.start()
            self._notify(ServerEvent(EventKind.LISTENING, f"Layers are computed at {self.address}."))
            self._started.set()
            await self._stop_requests.get()
            self._notify(ServerEvent(EventKind.STOPPING, "The worker stops; its coordinators continue without it."))
        finally:
            await server.stop(0)  # a reply may go on for minutes; its coordinator can go on without this device
            for task in tasks:
                task.cancel()
            self._notify(ServerEvent(EventKind.STOPPED, "The worker has stopped."))

    def _refused(self, what: str) -> None:
        self._notify(ServerEvent(EventKind.REFUSED, what))

    def _notify_upload(self, what: str) -> None:
        self._notify(ServerEvent(EventKind.CONNECTED, what))

    async def _evict_unused(self) -> None:
        while True:
            await asyncio.sleep(_TIDY_SECONDS)
            if evicted := await asyncio.to_thread(self.cache.evict_unused):
                self._notify(ServerEvent(EventKind.ENDED, f"{evicted} unused pieces of models were unloaded."))
