"""A model cut into layers, and devices that hold them, in this process."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm.coldstart import costs, problem
from edgellm.coldstart.costs import LayersOnDevice, ModelCosts, TransformerShape
from edgellm.engine import Context, ContextSpec, Floats, Ids, Model
from edgellm.errors import DeviceLost
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.layer_sources import LayerSource
from edgellm.mesh.messages import MicroBatch, StageLost, StageSpec
from edgellm.mesh.pipeline import LocalStageHost, Pipeline, Post, StageHost
from edgellm.mesh.verifier import MeshVerifier
from edgellm.mesh.weight_cache import WeightCache
from edgellm.spec.protocols import GenerationState, Session
from edgellm.spec.types import GREEDY, Chunk, Sampling
from edgellm.storage.fingerprint import fingerprint
from tests.decodes import greedy
from tests.mesh.folder import FolderLayers
from tests.verifier.asking import judged

NOTHING = Chunk()


@dataclass(frozen=True)
class Cut:
    """A model file, its layers as files, and what a stage is to do with all of them."""

    path: Path
    layers: FolderLayers
    work: StageSpec


def cut_model(path: Path, folder: Path) -> Cut:
    layers = FolderLayers(folder)
    layers.cut(path)
    return Cut(path, layers, stage_spec(path))


def stage_spec(path: Path) -> StageSpec:
    """What a stage with all layers of a model does for two replies."""
    with Model.load(path) as model:
        n, embd, vocab = model.n_layer, model.n_embd, model.n_vocab
    return StageSpec(fingerprint(path), path.stem, LayerRange(0, n), n, embd, vocab, 256, 2)


class Device:
    """A member of a mesh in this process, which can be lost."""

    def __init__(self, name: str, layers: LayerSource, only: Sequence[int] | None = None) -> None:
        self.name, self.cache = name, WeightCache(layers)
        self.only, self.lost = only, False
        self.posts: list[Post] = []

    def describe(self, model: str) -> costs.Device:
        if self.lost:
            raise DeviceLost(f"{self.name} is off.", "Switch it on.")
        found = self.cache.layers.open(model)
        if found is None:
            return costs.Device.unmeasured(self.name, LayersOnDevice(frozenset()))
        held = found.held if self.only is None else found.held & set(self.only)
        return costs.Device.unmeasured(self.name, LayersOnDevice(held, self.cache.warm(found)))

    def stage_host(self) -> StageHost:
        return DeviceStageHost(self)

    def lose(self) -> None:
        """It is gone from now on, with all its stages."""
        self.lost = True
        for post in self.posts:
            post(StageLost(DeviceLost("the plug was pulled.", "Put it back.")))


class DeviceStageHost(LocalStageHost):
    def __init__(self, device: Device) -> None:
        super().__init__(device.name, device.cache)
        self._device = device

    def begin(self, work: StageSpec, post: Post, pipeline: Pipeline) -> None:
        if self._device.lost:
            post(StageLost(DeviceLost("the plug was pulled.", "Put it back.")))
            return
        self._device.posts.append(post)
        super().begin(work, lambda event: None if self._device.lost else post(event), pipeline)

    def send(self, batch: MicroBatch) -> None:
        if not self._device.lost:
            super().send(batch)


class Home:
    """A mesh over devices of this process, which hold all layers or those that are named."""

    def __init__(self, cut: Cut, holds: Mapping[str, Sequence[int] | None]) -> None:
        self.devices = {name: Device(name, cut.layers, only) for name, only in holds.items()}
        self.told: list[str] = []
        devices, shares = list(self.devices.values()), even(cut.work, list(holds))
        self.mesh = Mesh(devices, shares, cut.work, home_of(cut.work), self.told.append)
        self.verifier = MeshVerifier(self.mesh, lambda _token: False, rows=16)


def home_of(work: StageSpec) -> problem.Home:
    """What is planned for once a device is lost: a usual transformer of the same width."""
    heads = work.n_embd // 64
    shape = TransformerShape(work.n_layers, work.n_embd, heads, heads, 64, 4 * work.n_embd)
    return problem.Home((costs.Device.unmeasured("here"),), ModelCosts.of(shape, work.name), 1)


def even(work: StageSpec, names: Sequence[str]) -> tuple[StageShare, ...]:
    """The layers in about equal parts."""
    ends = np.linspace(0, work.n_layers, len(names) + 1).round().astype(int).tolist()
    return tuple(StageShare(name, LayerRange(a, b)) for name, a, b in zip(names, ends, ends[1:], strict=False))


def logits_of(pipeline: Pipeline, session: int, start: int, ids: Ids, outputs: int, rows: int = 256) -> Floats:
    """The logits of the last `outputs` of `ids`, through all stages."""
    n = len(ids) - (outputs - 1)
    ask = judged(Chunk(ids[n:]), GREEDY, start + n, logits=True)
    found = pipeline.ask(session, start, ids, ask, rows).result(60).logits
    assert found is not None
    return found


class Whole:
    """The uncut model, to compare with."""

    def __init__(self, path: Path, context: int = 256) -> None:
        self.model = Model.load(path)
        self.context = Context(self.model, ContextSpec(n_ctx=context, threads=1))

    def text(self, prompt: Ids, n: int) -> list[int]:
        """Its own greedy text."""
        return greedy(self.context, prompt, n)

    def close(self) -> None:
        self.context.close()
        self.model.close()


def asker(session: Session) -> Callable[[Ids], int]:
    """Return what asks a session for the token behind a text."""
    return lambda text: int(session.submit(text, NOTHING).result().tokens[0])


def write(ask: Callable[[Ids], int], prompt: Ids, n: int) -> list[int]:
    """`n` tokens, each asked for with all before it."""
    text = prompt
    for _ in range(n):
        text = np.append(text, ask(text)).astype(np.int32)
    return text[len(prompt) :].tolist()


def all_at_once(verifier: MeshVerifier, sampling: Sampling, prompts: Sequence[Ids], n: int) -> list[list[int]]:
    """`n` tokens behind each prompt, each reply written by a thread of its own."""

    def reply(session: Session, prompt: Ids) -> list[int]:
        return write(asker(session), prompt, n)

    sessions = [verifier.open(GenerationState(sampling=sampling)) for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(reply, sessions, prompts))
    for session in sessions:
        session.close()
    return found
