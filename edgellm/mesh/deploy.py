"""Deployment: every device gets the layers that it lacks, all devices at once; interrupted transfers are resumed."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgellm.engine import ModelFile
from edgellm.errors import (
    DeviceLost,
    EdgeError,
    InvalidOption,
    LayersCorrupt,
    NotPaired,
    NotPermitted,
    VerifierUnreachable,
)
from edgellm.layer_range import HERE, LayerRange, StageShare
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.layers import RateLimiter, Worker, ask_worker, clean, upload
from edgellm.rpc.link import Endpoint
from edgellm.rpc.trust.trust import Right
from edgellm.storage.layer_pieces import LayerPiece, Manifest, cut_piece, forget_hashes
from edgellm.storage.layer_store import CleanResult, LayerStore

ATTEMPTS = 6  # attempts in a row without a new byte
PAUSE_SECONDS = 1.0  # between two attempts


@dataclass(frozen=True, slots=True)
class DeployPart:
    """Layers for a worker, or for this device if `worker` is None."""

    worker: Worker | None
    layers: LayerRange

    @property
    def name(self) -> str:
        return "here" if self.worker is None else self.worker.name


@dataclass(slots=True)
class DeployProgress:
    """The progress of a part: `arrived` of `total` bytes are there, `already` were there before, and `sent` were sent.

    `notify` is called with every change. `activity` is for people. `error`: why the part has ended early.
    """

    part: DeployPart
    total: int
    notify: "OnProgress"
    began: float = field(default_factory=time.monotonic)
    already: int | None = None
    arrived: int = 0
    sent: int = 0
    seconds: float = 0.0
    attempts: int = 0
    activity: str = ""
    error: EdgeError | None = None

    def change(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self, name, value)
        if self.already is None:
            self.already = changes.get("arrived")
        self.seconds = time.monotonic() - self.began
        self.notify(self)


OnProgress = Callable[[DeployProgress], None]


def deploy(
    model: ModelFile,
    manifest: Manifest,
    parts: Sequence[DeployPart],
    *,
    rate: float = 0.0,
    store: LayerStore | None = None,
    notify: OnProgress = lambda _progress: None,
) -> list[DeployProgress]:
    """Copy each part of `model`, in the pieces of `manifest`, to its device. Return how each ended, in the same order.

    `rate` limits all connections together, in bytes per second; 0 is no limit. `store` is this device's own. `notify`
    is called with every step, from other threads. A failure on one device does not stop the others. Raises
    InvalidOption: the model has no such layers; NotPermitted: a device has no right to copy models from here."""
    for part in parts:
        manifest.covering(part.layers)
        if part.worker is not None and (peer := part.worker.peer) is not None and Right.FILES not in peer.rights:
            raise NotPermitted(
                f"{peer.name} ({peer.id.short}) has no right to copy models from here.",
                f"To allow it: edgellm peers grant {peer.id.short} files",
            )
    deployment = _Deployment(model, manifest, RateLimiter(rate), store or LayerStore(), notify)
    return run_in_network_loop(deployment.all(parts)).result()


@dataclass(frozen=True, slots=True)
class _Deployment:
    model: ModelFile
    manifest: Manifest
    limiter: RateLimiter
    store: LayerStore
    notify: OnProgress

    async def all(self, parts: Sequence[DeployPart]) -> list[DeployProgress]:
        return list(await asyncio.gather(*map(self._part, parts)))

    async def _part(self, part: DeployPart) -> DeployProgress:
        pieces = self.manifest.covering(part.layers)
        state = DeployProgress(part, sum(piece.size for piece in pieces), self.notify)
        try:
            if part.worker is None:
                await self._copy_here(pieces, state)
            else:
                await self._send(part.worker, replace(self.manifest, pieces=pieces), state)
        except EdgeError as error:
            if isinstance(error, LayersCorrupt):
                forget_hashes(self.manifest.fingerprint)
            state.change(activity="", error=error)
        else:
            state.change(activity="", arrived=state.total)
        return state

    async def _copy_here(self, pieces: Sequence[LayerPiece], state: DeployProgress) -> None:
        held, done, wanted = sum(map(self.store.arrived, pieces)), 0, {piece.sha256 for piece in pieces}
        state.change(activity="cutting", arrived=held)
        for piece in pieces:
            await asyncio.to_thread(self.store.cut, self.model, piece.layers, piece.size, wanted)
            done += piece.size
            state.change(arrived=max(held, done))

    async def _send(self, worker: Worker, manifest: Manifest, state: DeployProgress) -> None:
        """Send these pieces. Retry as long as bytes arrive, and give a lost device some time to come back."""
        failures, cut = 0, lambda piece: cut_piece(self.model, piece.layers)
        while True:
            before = state.arrived

            def uploaded(arrived: int, more: int, sent: int = state.sent) -> None:
                state.change(arrived=arrived, sent=sent + more)

            try:
                state.change(activity="connecting", attempts=state.attempts + 1)
                async with await worker.reached().connect() as channel:
                    state.change(activity="sending")
                    await upload(channel, worker.name, manifest, cut, self.limiter, uploaded)
                    return
            except (DeviceLost, VerifierUnreachable) as error:
                failures = 0 if state.arrived > before else failures + 1
                if failures >= ATTEMPTS:
                    raise DeviceLost(
                        f"{worker.name} was lost, with {state.arrived} of {state.total} bytes sent: {error.what}",
                        "Deploy again when it is back: what has arrived is kept.",
                    ) from None
                state.change(activity="waiting")
                await asyncio.sleep(PAUSE_SECONDS)


def deploy_parts(split: Sequence[StageShare], workers: Mapping[str, Worker]) -> list[DeployPart]:
    """Return the parts of a split. Raises InvalidOption: a device is named twice; NotPaired, EdgeError: as for
    `worker_named`."""
    names = [share.name for share in split]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidOption(f"{twice} is named twice.", "Give each device its layers in one part.")
    return [DeployPart(worker_named(share.name, workers), share.layers) for share in split]


def worker_named(name: str, workers: Mapping[str, Worker]) -> Worker | None:
    """Return the worker of that name, or at that HOST:PORT; None for this device. Raises NotPaired: no
    device has that name; EdgeError: the device cannot be used; says why."""
    if name == HERE:
        return None
    worker = workers.get(name)
    if worker is None and ":" in name:
        return run_in_network_loop(ask_worker(Endpoint.parse(name))).result()
    if worker is None:
        names = ", ".join([HERE, *workers])
        raise NotPaired(f"No paired device is called {name!r}.", f"Devices: {names}. Pair one with: edgellm pair")
    worker.reached()
    return worker


def clean_worker(worker: Worker, fingerprint: str) -> CleanResult:
    """Remove pieces that are not in use from a worker, of one model or of all. Raise the errors of
    `edgellm.rpc.layers.clean`."""

    async def work() -> CleanResult:
        async with await worker.reached().connect() as channel:
            return await clean(channel, worker.name, fingerprint)

    return run_in_network_loop(work()).result()
