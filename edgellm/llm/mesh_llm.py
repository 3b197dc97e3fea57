"""A model that several devices hold: the engine that spreads it, which device takes which layers, and its replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from edgellm.coldstart.costs import Device, LayersOnDevice
from edgellm.coldstart.plan import PlanOption, choose_part, predict
from edgellm.coldstart.problem import Fleet, Home, MemoryOverhead, Objective
from edgellm.engine import GgufHeader, Model, ModelFile
from edgellm.engine.gguf.cuttable import cut_points
from edgellm.engine.hardware import ON_PROCESSOR, Hardware
from edgellm.engine.memory_fit import positions_of, trained_positions
from edgellm.engine.model import LoadSpec
from edgellm.errors import EdgeError, EngineFailed, InvalidOption, ModelUnsupported
from edgellm.layer_range import HERE, LayerRange, StageShare, read_split
from edgellm.llm.engine import PairEngine
from edgellm.llm.llm import LLM
from edgellm.llm.model_loading import EngineConfig
from edgellm.mesh import EngineName, part_of
from edgellm.mesh.coordinator import Mesh, MeshDevice
from edgellm.mesh.layer_costs import costs_of, shape_of
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.messages import MAX_ROWS, StageSpec
from edgellm.mesh.pipeline import LocalStageHost, StageHost
from edgellm.mesh.placement import PLAN_SECONDS, Placement, first_cut, missing, model_costs, place, with_phases, within
from edgellm.mesh.verifier import MeshVerifier
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
from edgellm.spec.protocols import Elsewhere
from edgellm.storage.layer_pieces import check_stages, layers_per_piece

if TYPE_CHECKING:
    from edgellm.coldstart.phases import Phases
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.rpc.layers import Worker

Asked = Sequence[tuple[Device, Device | EdgeError]]
"""Devices as measured, each with its present state and layers, or the reason why it cannot be used."""


class EngineChoice(NamedTuple):
    """The engine that spreads a model over devices, and why."""

    engine: EngineName
    reason: str

    @property
    def over_rpc(self) -> bool:
        return self.engine == "rpc"


def choose_engine(file: ModelFile, asked: Literal["auto", "stages", "rpc"] = "auto") -> EngineChoice:
    """Return the engine that was `asked` for; else stages if the model's layers can be cut, and RPC if not. Raises
    ModelUnsupported: its layers cannot be cut, and there is no RPC here; EngineFailed: RPC was asked for, and this
    llama.cpp has no backend for it."""
    if asked != "auto":
        if asked == "rpc":
            part_of("rpc", "backend").require()
        return EngineChoice(asked, "asked for")
    try:
        cut_points(file.header)
    except ModelUnsupported as error:
        try:
            part_of("rpc", "backend").require()
        except EngineFailed as missing:
            next_step = f"Run it over llama.cpp's RPC instead. {missing.what} {missing.next_step}"
            raise ModelUnsupported(error.what, next_step) from None
        return EngineChoice("rpc", error.what)
    return EngineChoice("stages", "its layers can be cut: each device loads its own, and all do so at once")


@dataclass(frozen=True, slots=True)
class Workload:
    """The reply that a plan is for: the tokens of its prompt and its own, and the `objective`, the time to minimise.

    Each device has memory for `sessions` replies at once, in contexts like those of `hardware`, which also tells where
    this device computes. `half`: activations are sent as 16-bit floats.
    """

    tokens_in: int
    tokens_out: int
    objective: Objective = "ttft"
    sessions: int = 1
    hardware: Hardware = ON_PROCESSOR
    half: bool = False

    def home(self, file: ModelFile | None, fleet: Fleet) -> Home:
        """Return the home of a fleet with this reply and the model in `file`, without a file the fleet's own. Raises
        InvalidOption: there is neither; ModelUnsupported, ModelCorrupt: the model cannot be split."""
        if file is not None:
            positions = positions_of(file, self.hardware.n_ctx)
            overhead = overhead_of(file.header, positions, self.sessions, self.hardware.cache_type)
            model = model_costs(file)
        elif fleet.model is not None:
            model, overhead = fleet.model, MemoryOverhead()
        else:
            next_step = "Give a MODEL, or add a [model] table to the devices file."
            raise InvalidOption("There is no model to plan for.", next_step)
        if self.half:
            model = replace(model, shape=replace(model.shape, bytes_per_activation=2.0))
        return Home(fleet.devices, model, self.tokens_in, self.tokens_out, self.objective, fleet.links, overhead)


def open_text(file: ModelFile) -> Model:
    """Return a model without its weights, which tokenises and writes prompts."""
    return Model.load(file, LoadSpec(text_only=True, chat=True))


def planned_positions(file: ModelFile, asked: int | None, tokens: int) -> int:
    """Return how many tokens of prompt and reply a plan counts memory for: `asked`, by default those of `positions_of`,
    or the planned `tokens` if these are more, as far as the model was trained. Raises InvalidOption: fewer are asked
    for than are planned, or more than the model was trained for."""
    if asked is not None and tokens > asked:
        raise InvalidOption(
            f"A prompt and a reply of {tokens} tokens in all do not fit into a context of {asked}.",
            "Give a longer --ctx-size, or fewer --tokens-in and --tokens-out.",
        )
    default = positions_of(file, asked)
    return default if asked is not None else max(default, min(tokens, trained_positions(file.header) or tokens))


def overhead_of(header: GgufHeader, context: int, sessions: int, cache_type: str | None) -> MemoryOverhead:
    """Return the memory of a layer and of a stage beside weights, for `sessions` replies of `context` tokens each.
    `cache_type` is that of this device's keys and values; other devices have the default, and the larger one counts."""
    costs = costs_of(header)
    per_block = min(layers_per_piece(header), shape_of(header).layers)  # layers that share one block's batch
    batch = costs.batch(per_block, context, MAX_ROWS + 1, ends=False)
    cache = max(costs.cache(1, context, sessions), costs_of(header, cache_type).cache(1, context, sessions))
    return MemoryOverhead(cache + batch / per_block, costs.batch(1, context, MAX_ROWS + 1, ends=True))


class LocalDevice:
    """This device as a member of a mesh."""

    def __init__(self, whole: WholeModel, unit: ComputeUnit, known: Device) -> None:
        """Compute layers on `unit`. `known`: the device as measured."""
        self.name = HERE
        self._whole, self._cache, self._known = whole, WeightCache(whole, unit=unit), known

    def describe(self, model: str) -> Device:  # noqa: ARG002 - there is only this one
        own = self._whole.layers
        cut = frozenset(own.cut() if own.cut else ())
        layers = LayersOnDevice(own.held, self._cache.warm(own), own.pieces, cut)
        return self._known.updated(layers, float(self._cache.available()), self._cache.unit.name)

    def stage_host(self) -> StageHost:
        return LocalStageHost(self.name, self._cache)


def place_described(file: ModelFile, fleet: Fleet, workload: Workload) -> Placement:
    """Return the best stages of the model in `file` on described devices, each of which has any layer."""
    return with_phases(place(workload.home(file, fleet), stop=within(PLAN_SECONDS)), within(PLAN_SECONDS))


def place_stages(file: ModelFile, survey: Survey, workload: Workload) -> Placement:
    """Return the best stages of the model in `file` on the surveyed devices, with the layers that these have. After
    `PLAN_SECONDS` the best plan so far is taken. Raises ModelUnsupported, ModelCorrupt: the model cannot be split;
    PlanImpossible: the devices cannot hold it; says which layers to send where, if that helps."""
    known = survey.fleet()
    asked = _asked(known.devices, WholeModel(file), survey.workers, ComputeUnit.choose(workload.hardware))
    devices = [found for _, found in asked if isinstance(found, Device)]
    left_out = [(name, error.what) for name, error in survey.left_out]
    left_out += [(device.name, found.what) for device, found in asked if not isinstance(found, Device)]
    home = workload.home(file, replace(known, devices=tuple(devices)))
    placed = place(home, survey.workers, left_out, within(PLAN_SECONDS))
    return with_phases(placed, within(PLAN_SECONDS))


def missing_layers(file: ModelFile, shares: Sequence[StageShare], survey: Survey) -> tuple[dict[str, int], str]:
    """Return the bytes that each device of a split still lacks of its layers, by name, and a sentence on what has to be
    cut once (`first_cut`). A device that no longer answers is taken to lack all of its layers."""
    names, costs = [share.name for share in shares], model_costs(file)
    named = [device for device in survey.fleet().devices if device.name in names]
    devices = [
        found if isinstance(found, Device) else replace(device, layers=LayersOnDevice(frozenset()))
        for device, found in _asked(named, WholeModel(file), survey.workers, ComputeUnit())
    ]
    lacking = {share.name: size for share, size in missing(costs, shares, devices)}
    return {name: lacking.get(name, 0) for name in names}, first_cut(costs, shares, devices)


def _asked(devices: Sequence[Device], whole: WholeModel, workers: Mapping[str, Worker], unit: ComputeUnit) -> Asked:
    """Return the present state of each device, or why it cannot be used. All are asked at once."""
    from edgellm.services.client.stage_client import RemoteDevice

    def ask(known: Device) -> tuple[Device, Device | EdgeError]:
        try:
            if known.name == HERE:
                return known, LocalDevice(whole, unit, known).describe(whole.model)
            worker = workers[known.name].reached()
            return known, RemoteDevice(worker, known=known, own=whole.own_pieces).describe(whole.model)
        except EdgeError as error:
            return known, error

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(ask, devices))


@dataclass(frozen=True, slots=True)
class OpenedMesh:
    """A pair whose verifier is a mesh, with its placement, if any. `began` is the `perf_counter` time when the devices
    began to load."""

    pair: LLM
    verifier: MeshVerifier
    placed: Placement | None
    began: float

    @property
    def phases(self) -> Phases | None:
        """Return the later placements of the first reply, and the final one."""
        return None if self.placed is None else self.placed.phases

    def predict(self, tokens_in: int, tokens_out: int, *, cold: bool = True) -> PlanOption | None:
        """Return the planner's times for a reply with the current layers; `cold`: layers must still be loaded. None if
        a device is not known."""
        shares = self.verifier.mesh.shares
        if self.placed is None or not all(share.name in self.placed.home.names for share in shares):
            return None
        home = replace(self.placed.home, tokens_in=tokens_in, tokens_out=tokens_out, cold=cold)
        return predict(home, home.cut(shares))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.pair.close()


def open_mesh(
    file: ModelFile,
    layers: str | Placement,
    config: EngineConfig = EngineConfig(draft=None),
    notify: Callable[[str], None] | None = None,
    *,
    half: bool = False,
    text: Model | None = None,
) -> OpenedMesh:
    """Load each device's layers of the model in `file`, by a split or as they are placed, and open the pair meanwhile.
    This device's own layers and the draft model, by default none, are loaded and computed as `config` says, whose
    `peers` are HOST:PORT or NAME=HOST:PORT of workers: those without layers are spares for lost devices. `half`: rows
    are sent as 16-bit floats. `text`: the model's tokeniser, if it is open. Raises ModelUnsupported, ModelCorrupt: the
    model cannot be split; InvalidOption, PlanImpossible: an invalid split, or devices that cannot hold the model;
    NotPaired, NotPermitted, DeviceLost, VerifierUnreachable: a named device cannot be used."""
    began = perf_counter()
    hardware = config.hardware
    whole, header = WholeModel(file), file.header
    placed, shares = (None, read_split(layers)) if isinstance(layers, str) else (layers, layers.shares)
    phases = None if placed is None else placed.phases
    following = () if phases is None else (phases.following,)
    placements = [shares, *following]
    for placement in placements:
        check_stages(file, [share.layers for share in placement])
    unit = ComputeUnit.choose(hardware)
    names = [share.name for placement in placements for share in placement]
    devices = _devices(placed, config.peers, names, whole, unit)
    if placed is None:
        unknown = Fleet((Device.unmeasured(HERE),))
        home = Workload(1, 0, sessions=config.replies, hardware=hardware, half=half).home(file, unknown)
    else:
        home = placed.home
    model = home.model
    tokens = MAX_ROWS if placed is None else choose_part(placed.home, placed.home.cut(shares))
    vocabulary = next(t.shape[-1] for t in header.tensors if t.name == "token_embd.weight")
    work = StageSpec(
        whole.model, model.name, LayerRange(0, model.shape.layers), model.shape.layers, int(model.shape.d_model),
        vocabulary, positions_of(file, hardware.n_ctx), config.replies, half,
        n_params=header.n_params, reproducible=hardware.reproducible,
    )  # fmt: skip
    engine = PairEngine(config)
    with engine.closed_on_error():
        mesh = Mesh(devices, shares, work, home, notify)
        engine.own(mesh)
        mesh.pipeline()
        mesh.move(following, between=phases is not None and phases.reply.move is None)
        text = engine.own(text or open_text(file))
        own = next((share for share in shares if share.name == HERE), None)
        rows = min(tokens, hardware.n_batch or MAX_ROWS, work.rows)
        verifier = MeshVerifier(mesh, text.is_eog, rows, text.grammar)
        verifier.locate(Elsewhere(lambda: whole.model))
        engine.attach_beside(text, _taken(own, home, unit), verifier)
    return OpenedMesh(LLM(engine), verifier, placed, began)


def _taken(share: StageShare | None, home: Home, unit: ComputeUnit) -> Counter[str]:
    """Return the bytes of this device's own layers in its memory, or in its cards' in equal parts."""
    if share is None:
        return Counter()
    size = home.model.size(share.layers) + home.overhead.layer * len(share.layers) + home.overhead.stage
    return Counter({name: int(size / len(unit.devices)) for name in unit.devices})


def _devices(
    placed: Placement | None, peers: Sequence[str], names: Sequence[str], whole: WholeModel, unit: ComputeUnit
) -> list[MeshDevice]:
    """Return the named devices, further `peers` and this device: a spare may replace a lost device. Devices that were
    not asked for their layers to place them are asked now."""
    from edgellm.services.client.stage_client import RemoteDevice, worker_endpoints

    known = {} if placed is None else {device.name: device for device in placed.home.devices}
    workers = None if placed is None else placed.workers
    here = LocalDevice(whole, unit, known.get(HERE) or Device.unmeasured(HERE))
    discovered = [worker for name, worker in (workers or {}).items() if name in known]
    devices: dict[str, MeshDevice] = {
        name: RemoteDevice(where, known=known.get(name), own=whole.own_pieces)
        for name, where in worker_endpoints(names, peers, discovered).items()
    }
    devices[HERE] = here
    found = [devices[name] for name in dict.fromkeys((*names, *devices))]

    def learn_pieces(device: MeshDevice) -> None:
        with suppress(EdgeError):  # The pipeline reports a device that cannot be asked.
            device.describe(whole.model)

    if workers is None:
        with ThreadPoolExecutor(len(found)) as pool:
            list(pool.map(learn_pieces, found))
    return found
