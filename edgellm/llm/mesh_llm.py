"""A model that several devices hold: which device takes which layers, and replies from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Self

from edgellm.coldstart import prefill_chunking
from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.hardware import Device
from edgellm.coldstart.home import MemoryOverhead
from edgellm.coldstart.plan import PlanOption, predict
from edgellm.engine import Model, ModelFile
from edgellm.engine.model import LoadSpec
from edgellm.errors import EdgeError, InvalidOption
from edgellm.layer_range import EXAMPLE, HERE, LayerRange, StageShare, read_split
from edgellm.llm.elsewhere import OpenedVerifier
from edgellm.llm.engine import PairEngine
from edgellm.llm.home import LocalDevice, overhead_of, positions_of
from edgellm.llm.llm import LLM
from edgellm.llm.model_loading import EngineConfig
from edgellm.mesh.coordinator import Mesh, MeshDevice
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.messages import MAX_ROWS, StageSpec
from edgellm.mesh.model_costs import model_costs
from edgellm.mesh.placement import Placement
from edgellm.mesh.verifier import MeshVerifier
from edgellm.mesh.weight_cache import ComputeUnit
from edgellm.storage.layers.manifest import check_stages

if TYPE_CHECKING:
    from edgellm.coldstart.phases import Phases
    from edgellm.rpc.discovery.workers import Worker

SESSIONS = 4


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """The settings of a mesh. The layers follow `split`, or else the placement `placed` (`edgellm.llm.home`).

    `peers`: HOST:PORT or NAME=HOST:PORT of workers; those without layers are spares for lost devices. `wide`: rows are
    sent as 32-bit floats. With `rests`, the model may move after a reply to where the next reply is fastest.
    `following`: splits that take over from `split`, one after the other.
    """

    split: str | None = None
    placed: Placement | None = None
    peers: tuple[str, ...] = ()
    context: int | None = None
    sessions: int = SESSIONS
    wide: bool = False
    rests: bool = False
    following: tuple[str, ...] = ()

    @property
    def asked(self) -> Mapping[str, Worker] | None:
        """Return the measured workers, which were asked for their layers, if any."""
        return None if self.placed is None else self.placed.workers


@dataclass(frozen=True, slots=True)
class OpenedMesh:
    """A pair whose verifier is a mesh, with its placement, if any, and the `reason` for the size of the prompt's
    parts. `began` is the `perf_counter` time when the devices began to load."""

    pair: LLM
    verifier: MeshVerifier
    model: ModelCosts
    placed: Placement | None
    reason: str
    began: float

    @property
    def workers(self) -> Mapping[str, Worker] | None:
        """Return the other devices with measured figures, if any."""
        return None if self.placed is None else self.placed.workers

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
    options: MeshOptions,
    config: EngineConfig | None = None,
    notify: Callable[[str], None] | None = None,
) -> OpenedMesh:
    """Load each device's layers of the model in `file`, and open the pair meanwhile. This device's own layers and the
    draft model, by default none, are loaded and computed as `config` says.

    Raises:
        ModelUnsupported, ModelCorrupt: the model cannot be split.
        InvalidOption, PlanImpossible: an invalid split, or devices that cannot hold the model.
        NotPaired, NotPermitted, DeviceLost, VerifierUnreachable: a named device cannot be used.
    """
    began = perf_counter()
    config = config or EngineConfig(draft=None)
    hardware = config.hardware
    whole, header, model = WholeModel(file), file.header, model_costs(file)
    positions = positions_of(file, options.context or hardware.n_ctx)
    overhead = overhead_of(header, positions, options.sessions, hardware.cache_type)
    placed = options.placed
    shares = _shares(options)
    phases = None if placed is None else placed.phases
    following = tuple(map(read_split, options.following))
    if phases is not None and phases.following:
        following = (phases.following,)
    placements = [shares, *following, () if phases is None else phases.rest]
    for placement in placements:
        check_stages(file, [share.layers for share in placement])
    unit = ComputeUnit.choose(hardware)
    devices = _devices(options, [share.name for placement in placements for share in placement], whole, unit)
    if placed is not None:
        parts = prefill_chunking.choose(placed.home, placed.home.cut(shares))
    else:
        parts = prefill_chunking.PrefillChunks(
            MAX_ROWS, 0.0, f"parts of {MAX_ROWS} tokens: the devices were not measured"
        )
    vocabulary = next(t.shape[-1] for t in header.tensors if t.name == "token_embd.weight")
    work = StageSpec(
        whole.model, model.name, LayerRange(0, model.shape.layers), model.shape.layers, int(model.shape.d_model),
        vocabulary, positions, options.sessions, options.wide,
    )  # fmt: skip
    engine = PairEngine(config)
    with engine.closed_on_error():
        links = None if placed is None else placed.home.links
        mesh = Mesh(devices, shares, work, model, links=links, overhead=overhead, notify=notify)
        engine.own(mesh)
        mesh.pipeline()
        mesh.move(following, phases.rest if phases is not None and options.rests else ())
        text = engine.own(Model.load(file, LoadSpec(text_only=True, chat=True)))
        own = next((share for share in shares if share.name == HERE), None)
        rows = min(parts.tokens, hardware.n_batch or MAX_ROWS, _most_rows(devices, work))
        verifier = MeshVerifier(mesh, text.is_eog, rows, text.grammar)
        opened = OpenedVerifier(verifier, lambda: whole.model)
        engine.attach_beside(text, _taken(own, model, overhead, unit), opened)
    return OpenedMesh(LLM(engine), verifier, model, placed, parts.reason, began)


def _taken(share: StageShare | None, model: ModelCosts, overhead: MemoryOverhead, unit: ComputeUnit) -> Counter[str]:
    """Return the bytes of this device's own layers in its memory, or in its cards' in equal parts."""
    if share is None:
        return Counter()
    size = sum(model.layer_bytes[share.layers.start : share.layers.stop])
    size += model.embedding * (share.layers.start == 0) + model.head * (share.layers.stop == model.shape.layers)
    size += overhead.layer * len(share.layers) + overhead.stage
    names = unit.hardware.devices if unit.name else ("CPU",)
    return Counter({name: int(size / len(names)) for name in names})


def _devices(options: MeshOptions, names: Sequence[str], whole: WholeModel, unit: ComputeUnit) -> list[MeshDevice]:
    """Return the named devices, further `peers` and this device: a spare may replace a lost device."""
    known = {} if options.placed is None else {device.name: device for device in options.placed.home.devices}
    here = LocalDevice(whole, unit, known.get(HERE) or Device.unmeasured(HERE))
    if options.asked is None and not options.peers and set(names) == {HERE}:  # gRPC imports slowly.
        found: list[MeshDevice] = [here]
    else:
        from edgellm.services.client.stage_client import remote_devices

        discovered = [worker for name, worker in (options.asked or {}).items() if name in known]
        remote = remote_devices(names, options.peers, discovered, known, whole.own_pieces)
        devices: dict[str, MeshDevice] = {**remote, HERE: here}
        found = [devices[name] for name in dict.fromkeys((*names, *devices))]
    if options.asked is None:
        with ThreadPoolExecutor(len(found)) as pool:
            list(pool.map(partial(_learn_pieces, whole.model), found))
    return found


def _most_rows(devices: Sequence[MeshDevice], work: StageSpec) -> int:
    """Return the most rows of a micro-batch, which has to fit a message unless all layers are here."""
    if len(devices) == 1:
        return MAX_ROWS
    from edgellm.services.mesh_codec import most_rows

    return most_rows(work.n_embd)


def _learn_pieces(model: str, device: MeshDevice) -> None:
    """Ask a device which pieces of the model it was sent, so that their hashes are found. The pipeline reports a device
    that cannot be asked."""
    with suppress(EdgeError):
        device.describe(model)


def _shares(options: MeshOptions) -> tuple[StageShare, ...]:
    if options.split is not None:
        return read_split(options.split)
    if options.placed is None:
        raise InvalidOption("Neither a split nor devices are given.", f"{EXAMPLE}, or describe the devices in a file.")
    return options.placed.shares
