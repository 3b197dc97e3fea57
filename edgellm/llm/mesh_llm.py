"""A model that several devices hold: where its layers go by themselves, and replies from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Self

import psutil

from edgellm.coldstart import cost_model as planned
from edgellm.coldstart import prefill_chunking
from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.plan import Objective, Plan, PlanOption, foreseen
from edgellm.coldstart.plan import plan as best_plan
from edgellm.engine import GgufHeader, Model, check_gguf, costs_of, dimensions
from edgellm.errors import EdgeError, InvalidOption, NotPaired, NotPermitted
from edgellm.layer_range import EXAMPLE, HERE, LayerRange, StageShare, read_split
from edgellm.llm.llm import Pair
from edgellm.llm.model_loading import Named, check_vocabularies, load, named
from edgellm.mesh.coordinator import Mesh, MeshDevice
from edgellm.mesh.fleet_file import Fleet
from edgellm.mesh.fleet_profiler import Survey
from edgellm.mesh.home_workers import read_place
from edgellm.mesh.layer_sources import Layers, WholeModel
from edgellm.mesh.messages import MOST_ROWS, StageSpec
from edgellm.mesh.model_costs import model_of
from edgellm.mesh.pipeline import LocalSeat, StageHost
from edgellm.mesh.placement import DeviceCapability, MemoryOverhead, Placement, missing, of_plan, place
from edgellm.mesh.verifier import MeshVerifier
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.rpc.discovery.peer_probe import roll_call
from edgellm.rpc.discovery.workers import Worker
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.services.client.stage_client import Endpoint, RemoteMember
from edgellm.services.client.verifier_selection import trust_for
from edgellm.services.mesh_codec import most_rows
from edgellm.storage.layers.manifest import quick_recipe, recipe_of
from edgellm.storage.layers.store import together

PLAN_SECONDS = 5.0  # for the planner; then the best plan so far is taken


def place_at_home(
    path: Path, home: Survey, *, tokens_in: int, tokens_out: int, objective: Objective = "ttft",
    context: int | None = None, sessions: int = 1,
) -> Placement:  # fmt: skip
    """Return which surveyed devices take which layers of the model at `path` now, for a prompt of `tokens_in` tokens
    and a reply of `tokens_out`, with `sessions` caches of `context` tokens on each.

    Raises:
        ModelUnsupported, ModelCorrupt: a model that cannot be cut, by name.
        PlanImpossible: the devices do not hold it; says what to bring where, if that helps.
    """
    whole, fleet = WholeModel(path), home.fleet()
    model, header = model_of(path), check_gguf(path)
    room = room_of(header, positions_of(header, context), sessions)
    able: list[DeviceCapability] = []
    left_out = [(name, error.what) for name, error in home.left_out]
    for name, found in _asked([device.name for device in fleet.devices], whole, home, model, room):
        if isinstance(found, DeviceCapability):
            able.append(found)
        else:
            left_out.append((name, found.what))
    began = time.monotonic()
    return place(
        model, fleet, home.workers, able, tokens_in=tokens_in, tokens_out=tokens_out, objective=objective,
        left_out=left_out, room=room, stop=lambda: time.monotonic() - began > PLAN_SECONDS,
    )  # fmt: skip


def to_bring(path: Path, shares: Sequence[StageShare], home: Survey) -> list[tuple[str, int]]:
    """Return the bytes that each device of a split over the surveyed ones still lacks of its layers, by name. This
    device has the model; one that no longer answers is taken to lack all of its layers."""
    names = [share.name for share in shares]
    if names == [HERE]:
        return [(HERE, 0)]
    model = model_of(path)
    asked = _asked(names, WholeModel(path), home, model, MemoryOverhead())
    able = [
        found if isinstance(found, DeviceCapability) else DeviceCapability(name, frozenset()) for name, found in asked
    ]
    lacking = {one.share.name: one.size for one in missing(model, shares, able)}
    return [(name, lacking.get(name, 0)) for name in names]


def _asked(
    names: Sequence[str], whole: WholeModel, home: Survey, model: ModelCosts, room: MemoryOverhead
) -> list[tuple[str, DeviceCapability | EdgeError]]:
    """Return what each of these devices has of the model, or why it cannot be used; all are asked at once."""
    fleet, layer_bytes = home.fleet(), max(model.layer_bytes) + room.layer
    there = {name: home.workers[name] for name in names if name != HERE}
    recipe = recipe_digest(whole, [place_of(worker) for worker in there.values() if worker.address is not None])

    def ask(name: str) -> tuple[str, DeviceCapability | EdgeError]:
        known = like(name, fleet, model, layer_bytes)
        try:
            if name == HERE:
                return name, LocalMember(whole, None, known, layer_bytes).able(whole.model)
            member = RemoteMember(
                place_of(there[name]), like=known, layer_bytes=layer_bytes, stage_bytes=room.stage, recipe=recipe
            )
            return name, member.able(whole.model)
        except EdgeError as error:
            return name, error

    with ThreadPoolExecutor(len(names)) as at_once:
        return list(at_once.map(ask, names))


SESSIONS = 4
_SHARE = 0.8  # of the free memory: caches and batches need the rest
_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a mesh. `split` says which device holds which layers, or a plan over the devices of `fleet` does,
    or what was `placed` over the measured home (`edgellm.llm.mesh_llm.place_at_home`).

    `peers`: HOST:PORT, or NAME=HOST:PORT, of workers; those without layers at first take over when a device is lost.
    `wide`: rows travel as 32-bit floats.
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

    @property
    def described(self) -> Fleet | None:
        """The devices whose speed and memory are known."""
        return self.fleet if self.placed is None else self.placed.fleet


class LocalMember:
    """This device as a member of a mesh."""

    def __init__(self, layers: Layers, threads: int | None, like: DeviceCapability, layer_bytes: float) -> None:
        """`like`: what its layers are known to cost; each takes `layer_bytes` of memory, with its cache."""
        self.name = HERE
        self._shelf = WeightCache(layers)
        self._threads, self._like, self._layer_bytes = threads, like, layer_bytes

    def able(self, model: str) -> DeviceCapability:
        """See `MeshDevice.able`. It takes no more layers than there is memory free."""
        warm = self._shelf.warm(model)
        most = len(warm) + int(_SHARE * psutil.virtual_memory().available / self._layer_bytes)
        return replace(self._like, holds=self._shelf.layers.held(model), warm=warm, most=most)

    def seat(self) -> StageHost:
        return LocalSeat(self.name, self._shelf, self._threads)


@dataclass(frozen=True, slots=True)
class OpenedMesh:
    """A pair whose verifier is a mesh, the plan where one was made, and the reason for the size of the prompt's parts.

    `began` is when the devices began to load, by `perf_counter`. `workers`: the devices whose figures were measured,
    beside this one; None where they were described."""

    pair: Pair
    verifier: MeshVerifier
    plan: Plan | None
    model: planned.ModelCosts
    fleet: Fleet | None
    reason: str
    began: float
    workers: Mapping[str, Worker] | None = None

    def foreseen(self, tokens_in: int, tokens_out: int, *, cold: bool = True) -> PlanOption | None:
        """Return what a reply takes by the planner's model, with the layers where they are now; `cold`: they still have
        to be loaded. None where the devices that hold them are not described."""
        shares, devices = self.verifier.mesh.shares, self.fleet.devices if self.fleet is not None else ()
        names = [device.name for device in devices]
        if self.fleet is None or not all(share.name in names for share in shares):
            return None
        cut = tuple((names.index(share.name), len(share.layers)) for share in shares)
        return foreseen(devices, self.model, cut, tokens_in, tokens_out, links=self.fleet.links, cold=cold)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.pair.close()


def open_mesh(
    path: Path,
    options: Options,
    *,
    draft: Named | None = None,
    threads: int | None = None,
    history: bool = True,
    tell: Callable[[str], None] | None = None,
) -> OpenedMesh:
    """Let every device load its layers of the model at `path`, and open the rest meanwhile. `history` as for
    `Pair.open`.

    Raises:
        ModelUnsupported, ModelCorrupt: a model that cannot be cut, by name.
        InvalidOption, PlanImpossible: a split that makes no sense, or devices that do not hold the model.
        NotPaired, NotPermitted, DeviceLost, VerifierUnreachable: a device that is named and cannot be used.
        VocabularyMismatch: of the draft model and this one.
    """
    began = perf_counter()
    whole, header, model = WholeModel(path), check_gguf(path), model_of(path)
    plan, shares = _shares(model, options)
    positions = positions_of(header, options.context)
    room = room_of(header, positions, options.sessions)
    crew, recipe = _crew(options, [share.name for share in shares], model, whole, threads, room)
    fleet = options.described
    if (plan is not None or options.placed is not None) and fleet is not None:
        cut = _cut(shares, fleet)
        parts = prefill_chunking.choose(fleet.devices, model, cut, options.tokens_in, links=fleet.links)
    else:
        parts = prefill_chunking.PrefillChunks(MOST_ROWS, 0.0, f"parts of {MOST_ROWS} tokens: no device is described")
    vocabulary = next(t.shape[-1] for t in header.tensors if t.name == "token_embd.weight")
    work = StageSpec(
        whole.model, model.name, LayerRange(0, model.shape.layers), model.shape.layers, int(model.shape.d_model),
        vocabulary, positions, options.sessions, options.wide, recipe=recipe,
    )  # fmt: skip
    closing = ExitStack()
    try:
        mesh = Mesh(crew, shares, work, tell=tell)
        closing.callback(mesh.close)
        mesh.pipeline()
        text = Model.load(path, text_only=True, chat=True)
        closing.callback(text.close)
        small = None
        if (name := named(draft)) is not None:
            small = load(name, gpu_layers=0, progress=None, closing=closing)
            check_vocabularies(small, text)
        verifier = MeshVerifier(mesh, text.is_eog, min(parts.tokens, most_rows(work.n_embd)))
        pair = Pair(
            text,
            draft=small,
            verifier=verifier,
            model_hash=lambda: whole.model,
            threads=threads,
            history=history,
            closing=closing,
        )
    except BaseException:
        closing.close()
        raise
    workers = None if options.placed is None else options.placed.workers
    return OpenedMesh(pair, verifier, plan, model, fleet, parts.reason, began, workers)


def positions_of(header: GgufHeader, asked: int | None) -> int:
    """Return how many tokens of prompt and reply a session has room for: `asked`, but no more than the model can."""
    trained = header.metadata.get(f"{header.architecture}.context_length")
    return min(asked or _POSITIONS, trained if isinstance(trained, int) and trained > 0 else _POSITIONS)


def room_of(header: GgufHeader, context: int, sessions: int) -> MemoryOverhead:
    """Return the memory of a layer and of a stage beside weights, for `sessions` replies of `context` tokens each."""
    costs, layers = costs_of(header), dimensions(header).layers
    size = sum(tensor.nbytes for tensor in header.tensors if tensor.name.startswith("blk.")) / layers
    many = together(0, layers - 1, size) + 1  # layers of a block; each block has a batch of its own
    batch = costs.batch(many, context, MOST_ROWS + 1, ends=False)
    return MemoryOverhead(
        costs.cache(1, context, sessions) + batch / many, costs.batch(1, context, MOST_ROWS + 1, ends=True)
    )


def _crew(
    options: Options,
    names: Sequence[str],
    model: planned.ModelCosts,
    whole: WholeModel,
    threads: int | None,
    room: MemoryOverhead,
) -> tuple[list[MeshDevice], str]:
    """Return the named devices, further `peers` and this one, and what `recipe_digest` returns for them. A device
    without layers may be needed when another is lost."""
    places = {place.name: place for place in map(_place, options.peers)}
    if options.placed is not None:
        places = {device.name: place_of(options.placed.workers[device.name])
                  for device in options.placed.fleet.devices if device.name != HERE}  # fmt: skip
    places |= _met([name for name in dict.fromkeys(names) if name not in (HERE, *places)])
    layer_bytes = max(model.layer_bytes) + room.layer
    recipe = recipe_digest(whole, list(places.values()))
    found: list[MeshDevice] = []
    for name in dict.fromkeys((*names, *places, HERE)):
        known = like(name, options.described, model, layer_bytes)
        if name == HERE:
            found.append(LocalMember(whole, threads, known, layer_bytes))
        else:
            member = RemoteMember(
                places[name], like=known, layer_bytes=layer_bytes, stage_bytes=room.stage, recipe=recipe
            )
            found.append(member)
    return found, recipe


def recipe_digest(whole: WholeModel, places: Sequence[Endpoint]) -> str:
    """Return the digest of the recipe of this device's own file, by which devices use layers that were brought there.

    It is remembered. To find it out, the whole file has to be read; that is done where it is small, or where one of the
    devices was brought layers of it, or cannot be asked. Empty where none of them needs it.
    """
    if not places or (quick := quick_recipe(whole.path)) is not None:
        return quick.digest if places and quick is not None else ""

    def needs(place: Endpoint) -> bool:
        try:
            return RemoteMember(place).was_brought(whole.model)
        except EdgeError:
            return True

    with ThreadPoolExecutor(len(places)) as at_once:
        return recipe_of(whole.path).digest if any(at_once.map(needs, places)) else ""


def like(name: str, fleet: Fleet | None, model: planned.ModelCosts, layer_bytes: float) -> DeviceCapability:
    """Return what a layer costs on a device, as far as that is described; with its cache it takes `layer_bytes`."""
    device = next((one for one in (fleet.devices if fleet is not None else ()) if one.name == name), None)
    if device is None:
        return DeviceCapability(name, frozenset())
    size, shape = max(model.layer_bytes), model.shape
    step = size / device.bandwidth if device.bandwidth else shape.flops(1) / device.speed(1)
    hop = device.latency + 8.0 * shape.activation(1) / device.downlink
    return DeviceCapability(
        name, frozenset(), load=size / device.disk, step=step, hop=hop, most=int(device.memory / layer_bytes)
    )


def _shares(model: planned.ModelCosts, options: Options) -> tuple[Plan | None, tuple[StageShare, ...]]:
    if options.split is not None:
        return None, read_split(options.split)
    if options.placed is not None:
        return options.placed.best, options.placed.shares
    if options.fleet is None:
        raise InvalidOption("Nothing says which device holds which layers.", f"{EXAMPLE}; or describe your devices.")
    plan = best_plan(
        options.fleet.devices, model, options.tokens_in, options.tokens_out, objective=options.objective,
        links=options.fleet.links,
    )  # fmt: skip
    return plan, of_plan(plan)


def _cut(shares: Sequence[StageShare], fleet: Fleet) -> tuple[tuple[int, int], ...]:
    names = [device.name for device in fleet.devices]
    return tuple((names.index(one.name), len(one.layers)) for one in shares)


def _place(text: str) -> Endpoint:
    name, address = read_place(text)
    return Endpoint(name or str(address), address, trust_for(address))


def place_of(worker: Worker) -> Endpoint:
    """Return where a worker that was found is. Raises the reason why it cannot be used."""
    if worker.address is None:
        raise worker.trouble or NotPaired(f"Nobody knows where {worker.name} is.", "Is it on, and does it serve?")
    if worker.peer is None:
        return Endpoint(worker.name, worker.address)
    return Endpoint(worker.name, worker.address, Trust.here(), worker.peer.id)


def _met(names: Sequence[str]) -> dict[str, Endpoint]:
    """Return where devices are, named by an address or a paired device's name; paired ones are all asked at once."""
    found = {name: _place(name) for name in names if ":" in name}
    paired = [name for name in names if name not in found]
    if not paired:
        return found
    trust = Trust.here()
    for name, answer in zip(paired, roll_call(trust, list(map(trust.peers.find, paired)), chosen_hosts()), strict=True):
        if answer.welcomed is None:
            raise answer.trouble or InvalidOption(
                f"{name} does not answer.", f"Say where it is: --peer {name}=HOST:PORT"
            )
        if Right.COMPUTE not in answer.welcomed.rights:
            raise NotPermitted(
                f"{name} does not let this device have layers computed.",
                f"If it should, there: edgellm peers grant {trust.identity.id.short} compute",
            )
        found[name] = Endpoint(name, answer.welcomed.address, trust, answer.peer.id)
    return found
