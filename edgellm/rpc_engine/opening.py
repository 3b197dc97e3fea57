"""A model that several devices hold by llama.cpp's RPC: where its layers go, and replies from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Self

from edgellm.engine import Model, ModelFile
from edgellm.engine.hardware import N_BATCH, Hardware
from edgellm.engine.memory_fit import free_memory
from edgellm.engine.model import LoadSpec
from edgellm.errors import EdgeError, InvalidOption
from edgellm.layer_range import HERE, StageShare, read_split
from edgellm.llm.home import Workload, positions_of
from edgellm.llm.llm import LLM
from edgellm.llm.mesh_llm import SESSIONS
from edgellm.llm.model_loading import EngineConfig, Progress
from edgellm.llm.opening.elsewhere import OpenedVerifier
from edgellm.llm.opening.engine import PairEngine
from edgellm.mesh.weight_cache import ComputeUnit
from edgellm.rpc_engine.backend import require
from edgellm.rpc_engine.model import RpcDevice, RpcModel, RpcVerifier, RpcWork
from edgellm.rpc_engine.plan import MARGIN, RpcHome, RpcPlacement, RpcSite, by_memory, plan_rpc, rpc_costs
from edgellm.rpc_engine.process import ContextSizes, ModelProcess

if TYPE_CHECKING:
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.rpc.discovery.workers import Worker
    from edgellm.rpc_engine.session import RpcOffer


@dataclass(frozen=True, slots=True)
class RpcOptions:
    """The settings of a model over RPC: its layers follow `split`, or the placement `placed` on the measured devices.

    `peers`: HOST:PORT or NAME=HOST:PORT of workers; those without layers are spares for lost devices.
    """

    split: str | None = None
    placed: RpcPlacement | None = None
    peers: tuple[str, ...] = ()
    context: int | None = None
    sessions: int = SESSIONS


@dataclass(frozen=True, slots=True)
class OpenedRpc:
    """A pair whose verifier is a model over RPC. `began` is the `perf_counter` time when loading began."""

    pair: LLM
    verifier: RpcVerifier
    began: float

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.pair.close()


def open_over_rpc(
    file: ModelFile,
    options: RpcOptions,
    config: EngineConfig | None = None,
    notify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> OpenedRpc:
    """Load the model in `file` over the devices, and open the pair meanwhile. This device's own layers and the draft
    model, by default none, are computed as `config` says. `progress` as for `LLM.open`.

    Raises:
        EngineFailed: this llama.cpp has no RPC backend, or cannot use the model.
        InvalidOption, PlanImpossible: an invalid split, or devices that cannot hold the model.
        NotPaired, NotPermitted, DeviceLost, VerifierUnreachable: a named device cannot be used.
    """
    require()
    began = perf_counter()
    shares = _shares(options)
    config = config or EngineConfig(draft=None)
    hardware = config.hardware
    unit, costs = ComputeUnit.choose(hardware), rpc_costs(file)
    sizes = _context_sizes(file, options.context, options.sessions, hardware)
    work = RpcWork(file, costs.vocabulary, sizes, unit.hardware, unit.devices if unit.name else ())
    devices = _devices(options, [share.name for share in shares])
    engine = PairEngine(config)
    try:
        model = engine.own(RpcModel(work, devices, _planner(options, shares, devices, file), notify))
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(model.open, partial(progress, file.path.name) if progress else None)
            text = engine.own(Model.load(file, LoadSpec(text_only=True, chat=True)))
            opening.result()
        own = sum(costs.weights(share.layers) for share in model.shares if share.name == HERE) + costs.embedding
        small, compared = engine.load_beside(text, Counter({"CPU": own}), progress)
        verifier = engine.own(RpcVerifier(model, text.is_eog, text.grammar))
        model_hash = engine.idle.file_hash(file.path).compute
        pair = LLM(engine.attach(text, small, OpenedVerifier(verifier, model_hash), compared))
    except BaseException:
        engine.close()
        raise
    return OpenedRpc(pair, verifier, began)


def _shares(options: RpcOptions) -> tuple[StageShare, ...]:
    if options.split is not None:
        return read_split(options.split)
    if options.placed is not None:
        return options.placed.shares
    raise InvalidOption("Neither a split nor measured devices are given.", "Give a split: --split here:1-12,desk:13-24")


def _devices(options: RpcOptions, names: Sequence[str]) -> list[RpcDevice]:
    """Return the other devices that hold layers, and spares."""
    if options.placed is None and not options.peers and set(names) == {HERE}:  # gRPC imports slowly.
        return []
    from edgellm.rpc_engine.session import RpcWorker
    from edgellm.services.client.stage_client import remote_devices

    discovered = () if options.placed is None else tuple(options.placed.workers.values())
    found = remote_devices(names, options.peers, discovered, {}, lambda _wanted: ())
    return [RpcWorker(device.endpoint) for device in found.values()]


def _planner(
    options: RpcOptions, shares: Sequence[StageShare], devices: Sequence[RpcDevice], file: ModelFile
) -> Callable[[Collection[str]], Sequence[StageShare]]:
    """Return the function that assigns layers to devices: as requested, and by figures or memory after a loss."""
    wanted = {share.name for share in shares} - {HERE}

    def plan(names: Collection[str]) -> Sequence[StageShare]:
        if wanted.issubset(names):
            return shares
        if options.placed is not None:
            return options.placed.again(names)
        memory = {HERE: free_memory()}
        for device in devices:
            if device.name in names:
                with suppress(EdgeError):  # The device is lost, too.
                    memory[device.name] = max(0, device.free_memory() - MARGIN)
        return by_memory(rpc_costs(file), memory)

    return plan


def _beside_weights(file: ModelFile, sizes: ContextSizes, hardware: Hardware) -> tuple[int, int]:
    """Return the bytes of the model's caches, and of its buffers; llama.cpp computes them in a second or two.

    Raises as `ModelProcess.beside_weights`.
    """
    with closing(ModelProcess(file.path, 1, sizes, hardware)) as process:
        return process.beside_weights()


def _context_sizes(file: ModelFile, context: int | None, sessions: int, hardware: Hardware) -> ContextSizes:
    """Return the sizes of a context for `sessions` replies of `context` tokens, by default those of `positions_of`."""
    return ContextSizes(positions_of(file, context or hardware.n_ctx), sessions, hardware.n_batch or N_BATCH)


def place_over_rpc(file: ModelFile, survey: Survey, workload: Workload) -> RpcPlacement:
    """Return the best placement of the model in `file` on the surveyed devices that serve llama.cpp's RPC.

    Raises:
        EngineFailed: this llama.cpp has no RPC backend.
        ModelUnsupported, DeviceLost: llama.cpp cannot use the model.
        PlanImpossible: the devices cannot hold it.
    """
    require()
    unit = ComputeUnit.choose(workload.hardware)
    sizes = _context_sizes(file, workload.context, workload.sessions, workload.hardware)
    costs = rpc_costs(file, *_beside_weights(file, sizes, unit.hardware))
    given, refused = _ask_offers(survey.workers)
    left_out = [*refused, *((name, error.what) for name, error in survey.left_out)]
    fleet = survey.fleet()
    known = {device.name: device for device in fleet.devices}
    total, sites = sum(costs.layer_bytes) + costs.head, []
    for name, offer in given.items():
        device = replace(known[name], memory=float(max(1, offer.memory - MARGIN)))
        kept = min(1.0, offer.cached / total)
        sites.append(RpcSite(device, fleet.links[HERE, name], fleet.links[name, HERE], kept))
    home = RpcHome(
        known[HERE], tuple(sites), costs, max(1, workload.tokens_in), workload.tokens_out, workload.objective,
        cards=bool(unit.name), cold=workload.cold,
    )  # fmt: skip
    return RpcPlacement(plan_rpc(home), {name: survey.workers[name] for name in given}, tuple(left_out))


def _ask_offers(workers: Mapping[str, Worker]) -> tuple[dict[str, RpcOffer], list[tuple[str, str]]]:
    """Ask all workers at once for offers over llama.cpp's RPC; return the offers, and why other workers have none."""
    if not workers:
        return {}, []
    from edgellm.rpc_engine.session import ask_offer
    from edgellm.services.client.stage_client import endpoint_of

    given: dict[str, RpcOffer] = {}
    refused: list[tuple[str, str]] = []

    def ask(name: str) -> None:
        try:
            given[name] = ask_offer(endpoint_of(workers[name]))
        except EdgeError as error:
            refused.append((name, str(error)))

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(ask, workers))
    return {name: given[name] for name in workers if name in given}, sorted(refused)
