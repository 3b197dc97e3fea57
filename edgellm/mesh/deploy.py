"""Deployment: every device gets the layers that it lacks, all devices at once; interrupted transfers are resumed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.discovery.workers import Worker, local_worker, reach_worker
from edgellm.rpc.layers.upload import RateLimiter, UploadProgress, clean, upload
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.storage.layers.manifest import LayerPiece, Manifest, cut_piece, forget_hashes
from edgellm.storage.layers.store import CleanResult, LayerStore, cut_layers

ATTEMPTS = 6  # attempts in a row without a new byte
FIRST_PAUSE, MAX_PAUSE = 0.2, 8.0  # seconds between two attempts


@dataclass(frozen=True, slots=True)
class DeployPart:
    """Layers for a worker, or for this device if `worker` is None."""

    worker: Worker | None
    layers: LayerRange

    @property
    def name(self) -> str:
        return "here" if self.worker is None else self.worker.name


@dataclass(frozen=True, slots=True)
class DeployProgress:
    """The progress of a part: `arrived` of `total` bytes are there, `already` were there before, and `sent` were sent.

    `activity` is for people. `error`: why the part has ended early. `done` is set last, with or without an error.
    """

    part: DeployPart
    total: int
    already: int = 0
    arrived: int = 0
    sent: int = 0
    seconds: float = 0.0
    attempts: int = 0
    activity: str = ""
    done: bool = False
    error: EdgeError | None = None


OnProgress = Callable[[DeployProgress], None]


def deploy(
    model: ModelFile,
    manifest: Manifest,
    parts: Sequence[DeployPart],
    *,
    trust: Trust | None = None,
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
        if part.worker is not None:
            check_right(part.worker)
    deployment = _Deployment(model, manifest, trust, RateLimiter(rate), store or LayerStore(), notify)
    return run_in_network_loop(deployment.all(parts)).result()


def check_right(worker: Worker) -> None:
    """Check that a worker's device may copy models from here. Raises NotPermitted: the device has no such right."""
    peer = worker.peer
    if peer is not None and Right.FILES not in peer.rights:
        raise NotPermitted(
            f"{peer.name} ({peer.id.short}) has no right to copy models from here.",
            f"To allow it: edgellm peers grant {peer.id.short} files",
        )


class _Deployment:
    def __init__(
        self,
        model: ModelFile,
        manifest: Manifest,
        trust: Trust | None,
        limiter: RateLimiter,
        store: LayerStore,
        notify: OnProgress,
    ) -> None:
        self._model, self._manifest, self._trust = model, manifest, trust
        self._limiter, self._store, self._notify = limiter, store, notify

    async def all(self, parts: Sequence[DeployPart]) -> list[DeployProgress]:
        return list(await asyncio.gather(*(self._part(part) for part in parts)))

    async def _part(self, part: DeployPart) -> DeployProgress:
        pieces = self._manifest.covering(part.layers)
        state = _PartState(DeployProgress(part, sum(piece.size for piece in pieces)), self._notify)
        try:
            if part.worker is None:
                await self._copy_local(part, state)
            else:
                await self._upload(part.worker, [self._manifest.pieces.index(piece) for piece in pieces], state)
            return state.end()
        except LayersCorrupt as error:
            forget_hashes(self._manifest.fingerprint)
            return state.end(error)
        except EdgeError as error:
            return state.end(error)

    async def _copy_local(self, part: DeployPart, state: _PartState) -> None:
        state.describe("cutting")
        held = sum(self._store.arrived(piece) for piece in self._manifest.covering(part.layers))
        state.uploaded(UploadProgress(held, state.now.total, 0))

        def progress(share: float) -> None:
            state.uploaded(UploadProgress(max(held, int(share * state.now.total)), state.now.total, 0))

        await asyncio.to_thread(cut_layers, self._model, self._manifest, part.layers, self._store, progress)

    async def _upload(self, worker: Worker, places: Sequence[int], state: _PartState) -> None:
        """Send the pieces. Retry as long as bytes arrive, and give a lost device some time to come back."""
        failures = 0
        while True:
            before = state.now.arrived
            try:
                state.attempt()
                channel = await reach_worker(self._trust, worker)
                async with channel:
                    state.describe("sending")
                    await upload(channel, worker.name, self._manifest, places, self._cut, self._limiter, state.uploaded)
                    return
            except (DeviceLost, VerifierUnreachable) as error:
                failures = 0 if state.now.arrived > before else failures + 1
                if failures >= ATTEMPTS:
                    raise DeviceLost(
                        f"{worker.name} was lost, with {state.now.arrived} of {state.now.total} bytes sent:"
                        f" {error.what}",
                        "Deploy again when it is back: what has arrived is kept.",
                    ) from None
                state.describe("waiting")
                await asyncio.sleep(min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** max(0, failures - 1)))

    def _cut(self, piece: LayerPiece) -> Iterator[bytes | memoryview]:
        return cut_piece(self._model, piece.layers)


class _PartState:
    """The progress of one part, reported on every change."""

    def __init__(self, first: DeployProgress, notify: OnProgress) -> None:
        self.now, self._notify = first, notify
        self._began, self._known, self._sent_before = time.monotonic(), False, 0

    def attempt(self) -> None:
        self._sent_before = self.now.sent
        self._change(replace(self.now, activity="connecting", attempts=self.now.attempts + 1))

    def uploaded(self, uploaded: UploadProgress) -> None:
        already = self.now.already if self._known else uploaded.arrived
        self._known = True
        sent = self._sent_before + uploaded.sent
        self._change(replace(self.now, arrived=uploaded.arrived, sent=sent, already=already))

    def describe(self, activity: str) -> None:
        self._change(replace(self.now, activity=activity))

    def end(self, error: EdgeError | None = None) -> DeployProgress:
        arrived = self.now.arrived if error is not None else self.now.total
        self._change(replace(self.now, activity="", done=True, error=error, arrived=arrived))
        return self.now

    def _change(self, now: DeployProgress) -> None:
        self.now = replace(now, seconds=time.monotonic() - self._began)
        self._notify(self.now)


def deploy_parts(split: Sequence[StageShare], workers: Mapping[str, Worker]) -> list[DeployPart]:
    """Return the parts of a split, with devices looked up by name; workers on this machine by HOST:PORT. Raises
    NotPaired: no device has that name; InvalidOption: a device is named twice; EdgeError: a device cannot be used; says
    why."""
    names = [share.name for share in split]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidOption(f"{twice} is named twice.", "Give each device its layers in one part.")
    return [DeployPart(_worker(share.name, workers), share.layers) for share in split]


def _worker(name: str, workers: Mapping[str, Worker]) -> Worker | None:
    if name == HERE:
        return None
    worker = workers.get(name)
    if worker is None and ":" in name:
        return run_in_network_loop(local_worker(Address.parse(name).require_loopback())).result()
    if worker is None:
        names = ", ".join([HERE, *workers])
        raise NotPaired(f"No paired device is called {name!r}.", f"Devices: {names}. Pair one with: edgellm pair")
    if worker.error is not None:
        raise worker.error
    return worker


def clean_worker(worker: Worker, fingerprint: str) -> CleanResult:
    """Remove pieces that are not in use from a worker, of one model or of all. Raise the errors of
    `edgellm.rpc.layers.upload.clean`."""

    async def work() -> CleanResult:
        async with await reach_worker(Trust.load() if worker.peer else None, worker) as channel:
            return await clean(channel, worker.name, fingerprint)

    return run_in_network_loop(work()).result()
