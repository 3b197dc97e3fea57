"""A model that several devices hold by llama.cpp's RPC: where its layers go, and replies from it."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from edgellm.engine import ContextSpec, Model, ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.engine.memory_fit import positions_of
from edgellm.errors import EdgeError
from edgellm.layer_range import HERE, StageShare, read_split
from edgellm.llm.engine import PairEngine
from edgellm.llm.llm import LLM
from edgellm.llm.mesh_llm import Workload, open_text
from edgellm.llm.model_loading import EngineConfig, Progress
from edgellm.mesh.weight_cache import ComputeUnit
from edgellm.rpc.protos.rpc_engine_pb2 import OfferReply
from edgellm.rpc_engine.backend import require
from edgellm.rpc_engine.model import RpcModel, RpcVerifier, RpcWork
from edgellm.rpc_engine.plan import MARGIN, RpcHome, RpcPlacement, by_memory, plan_rpc, rpc_costs
from edgellm.rpc_engine.process import ModelProcess
from edgellm.rpc_engine.session import ask_offer
from edgellm.services.client.stage_client import worker_endpoints
from edgellm.spec.protocols import Elsewhere

if TYPE_CHECKING:
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.rpc.layers import Worker


def open_over_rpc(
    file: ModelFile,
    layers: str | RpcPlacement,
    config: EngineConfig = EngineConfig(draft=None),
    notify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    *,
    text: Model | None = None,
) -> LLM:
    """Return a pair whose verifier is the model in `file`, loaded over the devices by a split, or as it is placed. This
    device's own layers and the draft model, by default none, are computed as `config` says; `peers` and `text` as for
    `open_mesh`, `progress` as for `LLM.open`. Raises EngineFailed: this llama.cpp has no RPC backend, or cannot use
    the model; InvalidOption, PlanImpossible: an invalid split, or devices that cannot hold the model; NotPaired,
    NotPermitted, DeviceLost, VerifierUnreachable: a named device cannot be used."""
    require()
    placed, shares = (None, read_split(layers)) if isinstance(layers, str) else (layers, layers.option.shares)
    hardware = config.hardware
    unit, costs = ComputeUnit.choose(hardware), rpc_costs(file)
    work = RpcWork(file, _context(file, config.replies, hardware), unit)
    workers = () if placed is None else tuple(placed.workers.values())
    devices = list(worker_endpoints([share.name for share in shares], config.peers, workers).values())
    wanted = {share.name for share in shares} - {HERE}

    def plan(names: Collection[str]) -> Sequence[StageShare]:
        """Return the devices' layers: as requested, and by figures or free memory after a loss."""
        if wanted.issubset(names):
            return shares
        if placed is not None:
            return placed.again(names)
        memory = {HERE: unit.available()}
        for device in devices:
            if device.name in names:
                with suppress(EdgeError):  # the device is lost, too
                    memory[device.name] = max(0, ask_offer(device).memory - MARGIN)
        return by_memory(costs, memory, cards=bool(unit.name))

    engine = PairEngine(config)
    with engine.closed_on_error():
        model = engine.own(RpcModel(work, devices, plan, notify))
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(model.open, partial(progress, file.path.name) if progress else None)
            text = engine.own(text or open_text(file))
            opening.result()
        own = sum(costs.weights(share.layers) for share in model.shares if share.name == HERE) + costs.embedding
        verifier = engine.own(RpcVerifier(model, text.is_eog, text.grammar))
        verifier.locate(Elsewhere(engine.idle.file_hash(file.path).compute))
        return LLM(engine.attach_beside(text, Counter({"CPU": own}), verifier, progress))


def _context(file: ModelFile, sessions: int, hardware: Hardware) -> ContextSpec:
    """Return a context for `sessions` replies of the tokens of `positions_of`."""
    positions = positions_of(file, hardware.n_ctx)
    return ContextSpec(positions, sessions, hardware.n_batch, unified=sessions == 1, rolls_back=True)


def place_over_rpc(file: ModelFile, survey: "Survey", workload: Workload) -> RpcPlacement:
    """Return the best placement of the model in `file` on the surveyed devices that serve llama.cpp's RPC. Raises
    EngineFailed: this llama.cpp has no RPC backend; ModelUnsupported, DeviceLost: llama.cpp cannot use the model;
    PlanImpossible: the devices cannot hold it."""
    require()
    unit = ComputeUnit.choose(workload.hardware)
    context = _context(file, workload.sessions, workload.hardware)
    with closing(ModelProcess(file.path, 1, context, unit.hardware)) as process:
        costs = rpc_costs(file, *process.beside_weights())
    given, refused = _ask_offers(survey.workers)
    left_out = [*refused, *((name, error.what) for name, error in survey.left_out)]
    known = {device.name: device for device in survey.fleet().devices}
    total = sum(costs.layer_bytes) + costs.head
    others = (replace(known[name], memory=float(max(1, offer.memory - MARGIN))) for name, offer in given.items())
    home = RpcHome(
        (known[HERE], *others), costs, max(1, workload.tokens_in), workload.tokens_out, workload.objective,
        {name: min(1.0, offer.cached / total) for name, offer in given.items()}, bool(unit.name),
    )  # fmt: skip
    return replace(plan_rpc(home), workers={name: survey.workers[name] for name in given}, left_out=tuple(left_out))


def _ask_offers(workers: "Mapping[str, Worker]") -> tuple[dict[str, OfferReply], list[tuple[str, str]]]:
    """Ask all workers at once for offers over llama.cpp's RPC; return the offers, and why other workers have none."""
    given: dict[str, OfferReply] = {}
    refused: list[tuple[str, str]] = []

    def ask(name: str) -> None:
        try:
            given[name] = ask_offer(workers[name].reached())
        except EdgeError as error:
            refused.append((name, str(error)))

    with ThreadPoolExecutor(max(1, len(workers))) as pool:
        list(pool.map(ask, workers))
    return {name: given[name] for name in workers if name in given}, sorted(refused)
