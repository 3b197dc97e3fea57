"""Servers of a verifier and of layers, which are started and stopped from any thread."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from edgellm.engine import ContextSpec, Model, ModelFile
from edgellm.engine.hardware import ON_PROCESSOR, Hardware
from edgellm.engine.memory_fit import check_context, place_sessions, positions_of
from edgellm.engine.model import LoadSpec
from edgellm.errors import InvalidOption
from edgellm.mesh.device_profiler import measure_device
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.channel import MAX_CHUNK
from edgellm.rpc.trust.handshake import AuthInterceptor
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.layer_service import LayerService
from edgellm.services.server.listener import BEAT_SECONDS, Listener, Listening, Notify, Service, tell_nobody
from edgellm.services.server.mesh_service import WorkerService
from edgellm.services.server.verification_service import MAX_WAITING, VerificationService, VerifyingModel
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.protocols import Capabilities
from edgellm.spec.sampling import sampling_of
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.model_files import name_of
from edgellm.verifier.scheduler import Counters, SchedulerLimits
from edgellm.verifier.worker import ColocatedVerifier, VerifierWorker

SESSIONS = 8
"""Replies for which a verifier has memory, by default."""


class SessionServer(Listener):
    """Answers sessions of several devices at once, for the models that are added, whose backends it closes."""

    kind = "verifier"

    def __init__(self, address: Address, on_event: Notify, trust: Trust | None) -> None:
        super().__init__(address, trust, on_event)
        self._service = VerificationService(self._notify, self.guard)
        self.services.append(self._service)

    def prepare(self, doing: str) -> None:
        """Note the work before the first model is served, such as "loading a.gguf", for devices that ask meanwhile."""
        self._service.prepare(doing)

    def serve(self, model: VerifyingModel) -> None:
        """Serve another model from now on; it is closed with the server. Any thread may call this."""
        self._offers.append(model.offer())
        self._service.add(model)
        if self._started.is_set():
            self._begin(model)

    def _listening(self) -> None:
        for model in self._service.models:
            self._begin(model)

    def _begin(self, model: VerifyingModel) -> None:
        model.backend.start()
        self._notify(f"{model.name} verifies at {self.address}.")

    def _stopping(self, grace: float) -> float:
        self._notify("The verifier finishes running requests, and accepts no new ones.")
        self._service.draining.set()
        return grace

    async def _release(self) -> None:
        for model in self._service.models:
            await asyncio.to_thread(model.backend.close)


class VerifierServer(SessionServer):
    """Verifies for several devices at once. `start`, then `stop`; both may come from any thread."""

    model: Model

    def __init__(
        self, model: Model | None, address: Address, *, on_event: Notify = tell_nobody, trust: Trust | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Serve `model` with these `options` of `use`; without it, listen, and have devices wait for `use`. See
        `Listener`, and for what it raises also `use`."""
        super().__init__(address, on_event, trust)
        if model is not None:
            self.use(model, **options)

    def use(
        self, model: Model, sessions: int = SESSIONS, context: int | None = None, threads: int | None = None,
        max_waiting: int = MAX_WAITING, *, curve: CostCurve | None = None, placement: str = "",
    ) -> None:  # fmt: skip
        """Serve `model` from now on. The caller closes it. Memory is reserved for `sessions` replies of `context`
        tokens each; more may be open than that. Beyond `max_waiting` requests at once, further ones are answered
        *busy*. The cost `curve` decides the padding of decodes for a lone device (see `Context.fill`), and the tokens
        by which prefills advance. `placement` says where the model is, and why. Raises InvalidOption: a size that
        cannot be meant; EngineFailed: no memory for that many sessions."""
        self.model, self.placement = model, placement
        self.sessions = positive("sessions", sessions)
        asked = model.hardware.n_ctx if context is None else context
        self.context_length = positive("context", positions_of(model.file, asked))
        limits = SchedulerLimits(rows=model.hardware.n_batch or SchedulerLimits().rows)
        model_hash = ""
        with suppress(OSError):  # the file has been removed: it is not offered
            model_hash = fingerprint(model.path)
        # llama.cpp aborts where a batch cannot hold a row of every sequence; the longest chunk fits in any case
        rows = max(limits.rows, sessions, MAX_CHUNK + 1)
        spec = ContextSpec(
            self.context_length, sessions, rows, threads, unified=False, rolls_back=True,
            speculates=True, reproducible=model.hardware.reproducible,
        )  # fmt: skip
        self._worker = VerifierWorker.over(model, spec, limits)
        if curve is not None:
            self._worker.fill(curve.widths())
            self._worker.use_curve(curve)
        able = Capabilities(name_of(model.path), self.context_length, logprobs=True, penalties=True, grammars=True)
        wanted, size = sampling_of(model.file), model.header.file_size
        self.serve(VerifyingModel(model, self._worker, able, wanted, model_hash, max_waiting, size))

    @property
    def counters(self) -> Counters:
        return self._worker.counters

    def close(self) -> None:
        self.model.close()

    def inside(self) -> ColocatedVerifier:
        return self._service.models[0].inside()


def serve_verifier(
    model: Path, where: Listening = Listening(), sessions: int | None = None, *,
    hardware: Hardware = ON_PROCESSOR, eagle3: ModelFile | None = None,
    progress: Callable[[float], None] | None = None, measure: Callable[[Model], CostCurve] | None = None,
) -> VerifierServer:  # fmt: skip
    """Listen, load the model file and serve it; return the running server, which the caller stops. Devices that connect
    meanwhile wait, and are told of the progress. There is memory for so many `sessions`; without a number for
    `SESSIONS`, or as many as fit: `VerifierServer.placement` says why. `measure` returns the cost curve of the loaded
    model, before any request; see `VerifierServer.use`. `eagle3` is an EAGLE-3 head that drafts the extra tokens of
    verdicts. Raises PairingRequired, TrustUnusable, PortTaken, InvalidOption: it is impossible to listen there; raised
    before the model is loaded; ModelNotFound, ModelCorrupt, ModelUnsupported, EngineFailed: from loading;
    ModelUnsupported: the head does not fit the model; MemoryShort: the sessions, or not even one of them, do not fit;
    raised before the model is loaded."""
    wanted = SESSIONS if sessions is None else positive("sessions", sessions)
    address, trust = where.checked()
    file = ModelFile.open(model)
    check_context(file.header, file.path.name, hardware.n_ctx)
    placed = place_sessions(file, hardware, sessions=wanted, fewer=sessions is None, eagle3=eagle3)
    server = VerifierServer(None, address, on_event=where.on_event, trust=trust)
    name = name_of(model)
    server.prepare(f"loading {name}")
    server.start()
    try:
        loaded = Model.load(
            placed.file, LoadSpec(placed.hardware, speculates=True, eagle3=placed.eagle3), progress=progress
        )
        server.prepare(f"measuring {name}")
        curve = None if measure is None else measure(loaded)
        server.use(loaded, placed.sessions, curve=curve, placement=placed.reason)
    except BaseException:
        server.stop(0.0)
        raise
    return server


def positive(name: str, value: int) -> int:
    """Return `value`. Raises InvalidOption where it is less than 1."""
    if value < 1:
        raise InvalidOption(f"{name} is {value}.", "Give a whole number of at least 1.")
    return value


class WorkerServer(Listener):
    """Computes layers for several coordinators at once."""

    kind = "worker"

    def __init__(
        self, cache: WeightCache, address: Address, *, on_event: Notify = tell_nobody, trust: Trust | None = None,
        stored: StoredLayers | None = None,
        more: Sequence[Callable[[WeightCache, Notify, AuthInterceptor | None], Service]] = (),
    ) -> None:  # fmt: skip
        """With `stored`, other devices may upload layers to its store, and have this device measured. `more` services
        compute with the cache, too. See `Listener`."""
        super().__init__(address, trust, on_event)
        self.cache = cache
        self._tidying: asyncio.Task[None] | None = None
        self.services = [WorkerService(cache, self._notify, self.guard, stored)]
        self.services += [make(cache, self._notify, self.guard) for make in more]
        if stored is not None:
            measurer = partial(measure_device, folder=stored.store.root, unit=cache.unit, memory=cache.available)
            self.services.append(LayerService(stored.store, self._notify, self.guard, measurer))

    def close(self) -> None:
        self.cache.evict_unused(everything=True)

    def _listening(self) -> None:
        self._tidying = asyncio.create_task(self._evict_unused())
        self._notify(f"Layers are computed at {self.address}.")

    def _stopping(self, grace: float) -> float:  # noqa: ARG002
        """Return 0: a reply may go on for minutes, and its coordinator can go on without this device."""
        self._notify("The worker stops; its coordinators continue without it.")
        return 0.0

    async def _release(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()

    async def _evict_unused(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if evicted := await asyncio.to_thread(self.cache.evict_unused):
                self._notify(f"{evicted} unused pieces of models were unloaded.")
