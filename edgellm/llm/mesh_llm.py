"""A model that several devices hold: which device takes which layers, and replies from it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Self

from edgellm.coldstart import prefill_chunking
from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.hardware import Device, LayersOnDevice
from edgellm.coldstart.plan import Objective, Plan, PlanOption, predict
from edgellm.coldstart.plan import plan as best_plan
from edgellm.coldstart.problem_builder import MemoryOverhead
from edgellm.engine import GgufHeader, Model, ModelFile, costs_of, dimensions
from edgellm.engine.hardware import ON_PROCESSOR, Hardware
from edgellm.engine.memory_fit import check_context, trained_positions
from edgellm.errors import EdgeError, InvalidOption
from edgellm.layer_range import EXAMPLE, HERE, LayerRange, StageShare, read_split
from edgellm.llm.idle_work import IdleWork
from edgellm.llm.llm import LLM
from edgellm.llm.model_loading import PairFit, fit, load, named, place_named
from edgellm.mesh.compute_unit import ComputeUnit
from edgellm.mesh.coordinator import Mesh, MeshDevice
from edgellm.mesh.fleet_file import Fleet
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.messages import MAX_ROWS, StageSpec
from edgellm.mesh.model_costs import model_costs
from edgellm.mesh.phases.phased_placement import PhasedPlacement, place_in_phases
from edgellm.mesh.pipeline import LocalStageHost, StageHost
from edgellm.mesh.placement import Placement, plan_shares
from edgellm.mesh.verifier import MeshVerifier
from edgellm.mesh.weight_cache import WeightCache
from edgellm.storage.default_pair import Named
from edgellm.storage.layers.manifest import check_stages, layers_per_piece

if TYPE_CHECKING:
    from edgellm.rpc.discovery.workers import Worker

PHASE_SECONDS = 1.0  # for the plan of a reply in phases, for which the devices wait before they load


SESSIONS = 4
_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """The settings of a mesh. The layers follow `split`, or a plan over the devices of `fleet`, or the placement
    `placed` on the measured devices (`edgellm.llm.home`).

    `peers`: HOST:PORT or NAME=HOST:PORT of workers; those without layers are spares for lost devices. `wide`: rows are
    sent as 32-bit floats. `phases`: another placement may take over behind a reply, if the devices are known and that
    pays, as planned here or before (`phased`); with `rests`, also after it, so that the model lies where the next reply
    is fastest. `following`: splits that take over from `split`, one after the other; with `sends_caches`, keys and
    values are sent to them.
    """

    split: str | None = None
    fleet: Fleet | None = None
    placed: Placement | None = None
    peers: tuple[str, ...] = ()
    context: int | None = None
    sessions: int = SESSIONS
    wide: bool = False
    tokens_in: int = 256
    tokens_out: int = 128
    objective: Objective = "ttft"
    phases: bool = True
    phased: PhasedPlacement | None = None
    rests: bool = False
    following: tuple[str, ...] = ()
    sends_caches: bool = False

    @property
    def described(self) -> Fleet | None:
        """The devices whose speed and memory are known."""
        return self.fleet if self.placed is None else self.placed.fleet


class LocalDevice:
    """This device as a member of a mesh."""

    def __init__(self, whole: WholeModel, unit: ComputeUnit, known: Device) -> None:
        """`unit` computes its layers. `known`: the device as it was measured."""
        self.name = HERE
        self._whole, self._cache, self._known = whole, WeightCache(whole, unit=unit), known

    def describe(self, model: str) -> Device:  # noqa: ARG002 - there is only this one
        """See `MeshDevice.describe`."""
        layers, pieces = LayersOnDevice(self._whole.held, self._cache.warm(self._whole)), self._whole.pieces
        if pieces is not None:
            begins, ends = (frozenset(one.start for one in pieces), frozenset(one.last for one in pieces))
            layers = replace(layers, begins=begins, ends=ends)
        return self._known.updated(layers, float(self._cache.available()[0]), self._cache.unit.name)

    def stage_host(self) -> StageHost:
        return LocalStageHost(self.name, self._cache)


@dataclass(frozen=True, slots=True)
class OpenedMesh:
    """A pair whose verifier is a mesh, with its plan, if any, and the reason for the size of the prompt's parts.

    `began` is the `perf_counter` time when the devices began to load. `workers` are the devices with measured figures,
    except this one; None if they were described. `phases`: how the first reply goes on, and where the model lies then.
    """

    pair: LLM
    verifier: MeshVerifier
    plan: Plan | None
    model: ModelCosts
    fleet: Fleet | None
    reason: str
    began: float
    workers: Mapping[str, Worker] | None = None
    phases: PhasedPlacement | None = None

    def predict(self, tokens_in: int, tokens_out: int, *, cold: bool = True) -> PlanOption | None:
        """Return the planner's times for a reply with the current layers; `cold`: they must still be loaded. None if
        their devices are not described."""
        shares, devices = self.verifier.mesh.shares, self.fleet.devices if self.fleet is not None else ()
        names = [device.name for device in devices]
        if self.fleet is None or not all(share.name in names for share in shares):
            return None
        cut = tuple((names.index(share.name), len(share.layers)) for share in shares)
        return predict(devices, self.model, cut, tokens_in, tokens_out, links=self.fleet.links, cold=cold)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.pair.close()


def open_mesh(
    file: ModelFile,
    options: MeshOptions,
    *,
    draft: Named | None = None,
    hardware: Hardware = ON_PROCESSOR,
    draft_hardware: Hardware = ON_PROCESSOR,
    history: bool = True,
    notify: Callable[[str], None] | None = None,
) -> OpenedMesh:
    """Load each device's layers of the model in `file`, and open the pair meanwhile. This device's own layers are
    loaded and computed as `hardware` says, and the draft model beside them. `history` as for `LLM.open`.

    Raises:
        ModelUnsupported, ModelCorrupt: the model cannot be split.
        InvalidOption, PlanImpossible: an invalid split, or devices that cannot hold the model.
        NotPaired, NotPermitted, DeviceLost, VerifierUnreachable: a named device cannot be used.
    """
    began = perf_counter()
    whole, header, model = WholeModel(file), file.header, model_costs(file)
    positions = positions_of(file, options.context or hardware.n_ctx)
    overhead = overhead_of(header, positions, options.sessions, hardware.cache_type)
    plan, shares = _shares(model, options, overhead)
    fleet = options.described
    phases = options.phased or _phases(options, model, shares, overhead)
    shares = shares if phases is None else phases.shares
    following = tuple(map(read_split, options.following)) if phases is None else phases.following
    placements = [shares, *following, () if phases is None else phases.rest]
    for placement in placements:
        check_stages(file, [share.layers for share in placement])
    unit = ComputeUnit.choose(hardware)
    devices = _devices(options, [share.name for placement in placements for share in placement], whole, unit)
    if (plan is not None or options.placed is not None) and fleet is not None:
        cut = _cut(shares, fleet)
        parts = prefill_chunking.choose(fleet.devices, model, cut, options.tokens_in, links=fleet.links)
    else:
        parts = prefill_chunking.PrefillChunks(
            MAX_ROWS, 0.0, f"parts of {MAX_ROWS} tokens: the devices were not measured"
        )
    vocabulary = next(t.shape[-1] for t in header.tensors if t.name == "token_embd.weight")
    work = StageSpec(
        whole.model, model.name, LayerRange(0, model.shape.layers), model.shape.layers, int(model.shape.d_model),
        vocabulary, positions, options.sessions, options.wide,
    )  # fmt: skip
    closing = ExitStack()
    idle = IdleWork()
    closing.callback(idle.close)
    try:
        mesh = Mesh(
            devices, shares, work, model, links=None if fleet is None else fleet.links, overhead=overhead, notify=notify
        )
        closing.callback(mesh.close)
        mesh.pipeline()
        mesh.move(
            following, phases.rest if phases is not None and options.rests else (),
            sends_caches=options.sends_caches if phases is None else phases.sends_caches,
        )  # fmt: skip
        text = Model.load(file, text_only=True, chat=True)
        closing.callback(text.close)
        small, compared = None, PairFit()
        if (name := named(draft)) is not None:
            taken = _taken(next((share for share in shares if share.name == HERE), None), model, overhead, unit)
            placed = place_named(name, draft_hardware, taken, verifies=False)
            small = load(placed, progress=None, closing=closing, idle=idle)
            compared = fit(small, text, name, file.path)
            small = None if compared.left_out else small
        verifier = MeshVerifier(
            mesh, text.is_eog, min(parts.tokens, hardware.n_batch or MAX_ROWS, _most_rows(devices, work)), text.grammar
        )
        pair = LLM(
            text,
            draft=small,
            verifier=verifier,
            model_hash=lambda: whole.model,
            fit=compared,
            history=history,
            closing=closing,
            idle=idle,
        )
    except BaseException:
        closing.close()
        raise
    workers = None if options.placed is None else options.placed.workers
    return OpenedMesh(pair, verifier, plan, model, fleet, parts.reason, began, workers, phases)


def positions_of(file: ModelFile, asked: int | None) -> int:
    """Return how many tokens of prompt and reply a session has room for: `asked`, by default `_POSITIONS` or as many as
    the model was trained for. Raises InvalidOption where fewer than `asked` are."""
    check_context(file.header, file.path.name, asked)
    return min(asked or _POSITIONS, trained_positions(file.header) or _POSITIONS)


def planned_positions(file: ModelFile, asked: int | None, tokens: int) -> int:
    """Return for how many tokens of prompt and reply a plan counts memory: as many as are `asked` for, by default as
    `positions_of` says, or the planned `tokens` in all where these are more, as far as the model was trained.

    Raises:
        InvalidOption: fewer are asked for than are planned, or more than the model was trained for.
    """
    if asked is not None and tokens > asked:
        raise InvalidOption(
            f"A prompt and a reply of {tokens} tokens in all do not fit into a context of {asked}.",
            "Give a longer --ctx-size, or fewer --tokens-in and --tokens-out.",
        )
    default = positions_of(file, asked)
    return default if asked is not None else max(default, min(tokens, trained_positions(file.header) or tokens))


def overhead_of(header: GgufHeader, context: int, sessions: int, cache_type: str | None = None) -> MemoryOverhead:
    """Return the memory of a layer and of a stage beside weights, for `sessions` replies of `context` tokens each.
    `cache_type` is that of this device's keys and values; those of others are as by default, and the larger count."""
    costs = costs_of(header)
    per_block = min(layers_per_piece(header), dimensions(header).layers)  # layers that share one block's batch
    batch = costs.batch(per_block, context, MAX_ROWS + 1, ends=False)
    cache = max(costs.cache(1, context, sessions), costs_of(header, cache_type).cache(1, context, sessions))
    return MemoryOverhead(cache + batch / per_block, costs.batch(1, context, MAX_ROWS + 1, ends=True))


def _taken(share: StageShare | None, model: ModelCosts, overhead: MemoryOverhead, unit: ComputeUnit) -> Counter[str]:
    """Return the bytes that this device's own layers take of its memory, or of its cards' in equal parts."""
    if share is None:
        return Counter()
    size = sum(model.layer_bytes[share.layers.start : share.layers.stop])
    size += model.embedding * (share.layers.start == 0) + model.head * (share.layers.stop == model.shape.layers)
    size += overhead.layer * len(share.layers) + overhead.stage
    names = unit.hardware.devices if unit.name else ("CPU",)
    return Counter({name: int(size / len(names)) for name in names})


def _devices(options: MeshOptions, names: Sequence[str], whole: WholeModel, unit: ComputeUnit) -> list[MeshDevice]:
    """Return the named devices, further `peers` and this device: one without layers may replace a lost one."""
    known = {device.name: device for device in (options.described.devices if options.described else ())}
    here = LocalDevice(whole, unit, known.get(HERE) or Device.unmeasured(HERE))
    if options.placed is None and not options.peers and set(names) == {HERE}:  # gRPC is slow to import
        found: list[MeshDevice] = [here]
    else:
        from edgellm.services.client.worker_selection import remote_devices

        discovered = () if options.placed is None else map(options.placed.workers.get, known)
        remote = remote_devices(
            names, options.peers, [worker for worker in discovered if worker is not None], known, whole.own_pieces
        )
        devices: dict[str, MeshDevice] = {**remote, HERE: here}
        found = [devices[name] for name in dict.fromkeys((*names, *devices))]
    if options.placed is None:  # else they were asked before
        with ThreadPoolExecutor(len(found)) as pool:
            list(pool.map(partial(_learn_pieces, whole.model), found))
    return found


def _most_rows(devices: Sequence[MeshDevice], work: StageSpec) -> int:
    """Return how many rows a micro-batch may have, which has to fit a message unless all layers are here."""
    if len(devices) == 1:
        return MAX_ROWS
    from edgellm.services.mesh_codec import most_rows

    return most_rows(work.n_embd)


def _learn_pieces(model: str, device: MeshDevice) -> None:
    """Ask a device which pieces of the model were brought to it, so that their hashes are found. If it cannot be asked,
    the pipeline reports that."""
    with suppress(EdgeError):
        device.describe(model)


def _shares(
    model: ModelCosts, options: MeshOptions, overhead: MemoryOverhead
) -> tuple[Plan | None, tuple[StageShare, ...]]:
    if options.split is not None:
        return None, read_split(options.split)
    if options.placed is not None:
        return options.placed.best, options.placed.shares
    if options.fleet is None:
        raise InvalidOption("Neither a split nor devices are given.", f"{EXAMPLE}, or describe the devices in a file.")
    plan = best_plan(
        options.fleet.devices, model, options.tokens_in, options.tokens_out, objective=options.objective,
        links=options.fleet.links, overhead=overhead,
    )  # fmt: skip
    return plan, plan_shares(plan)


def _phases(
    options: MeshOptions, model: ModelCosts, shares: Sequence[StageShare], overhead: MemoryOverhead
) -> PhasedPlacement | None:
    """Return `planned_phases` over known devices; None without them."""
    if not options.phases or options.split is not None or options.described is None:
        return None
    return planned_phases(
        options.described, model, shares, tokens_in=options.tokens_in, tokens_out=options.tokens_out,
        objective=options.objective, overhead=overhead,
    )  # fmt: skip


def planned_phases(
    fleet: Fleet, model: ModelCosts, shares: Sequence[StageShare], *, tokens_in: int, tokens_out: int,
    objective: Objective, overhead: MemoryOverhead, cold: bool = True,
) -> PhasedPlacement | None:  # fmt: skip
    """Return how a reply that begins with `shares` goes on over a fleet, as `place_in_phases` finds it within
    `PHASE_SECONDS`; None where it stays as it begins, for good."""
    if len(fleet.devices) < 2:
        return None
    began = time.monotonic()
    found = place_in_phases(
        fleet, model, shares, tokens_in=tokens_in, tokens_out=tokens_out, objective=objective, overhead=overhead,
        stop=lambda: time.monotonic() - began > PHASE_SECONDS, cold=cold,
    )  # fmt: skip
    return found if found is not None and (found.following or found.rest) else None


def _cut(shares: Sequence[StageShare], fleet: Fleet) -> tuple[tuple[int, int], ...]:
    names = [device.name for device in fleet.devices]
    return tuple((names.index(one.name), len(one.layers)) for one in shares)
