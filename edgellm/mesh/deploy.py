"""Copies to every device the layers that it needs and does not have: all devices at once, each as fast as it accepts
them; an interrupted transfer is resumed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgellm.errors import DeployFailed, DeviceLost, EdgeError, LayersCorrupt, NotPermitted, VerifierUnreachable
from edgellm.layer_range import LayerRange
from edgellm.rpc.channel import run_there
from edgellm.rpc.discovery.workers import Worker, reach_worker
from edgellm.rpc.layers.upload import RateLimiter, UploadProgress, put
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.storage.layers.manifest import LayerPiece, Recipe, cut_piece, forget_recipe
from edgellm.storage.layers.store import LayerStore, cut_layers

ATTEMPTS = 6  # in a row without a single new byte
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 8.0  # seconds between two attempts


@dataclass(frozen=True, slots=True)
class DeployPart:
    """Layers for a worker, or for this device if `worker` is None."""

    worker: Worker | None
    layers: LayerRange

    @property
    def name(self) -> str:
        return "here" if self.worker is None else self.worker.name


@dataclass(frozen=True, slots=True)
class Moved:
    """The progress of a part: `arrived` of `total` bytes are there, `already` were before, `sent` went over the line.

    `doing` is for people. `error`: why the part has stopped for good. `done` is set last, with or without an error.
    """

    part: DeployPart
    total: int
    already: int = 0
    arrived: int = 0
    sent: int = 0
    seconds: float = 0.0
    attempts: int = 0
    doing: str = ""
    done: bool = False
    error: EdgeError | None = None


Tell = Callable[[Moved], None]


def deploy(
    model: Path,
    recipe: Recipe,
    parts: Sequence[DeployPart],
    *,
    trust: Trust | None = None,
    rate: float = 0.0,
    store: LayerStore | None = None,
    tell: Tell = lambda _moved: None,
) -> list[Moved]:
    """Copy each part of `model` to its device; return how each ended, in the same order.

    `rate` limits all lines together, in bytes per second; 0 is no limit. `store` is this device's own. `tell` is
    called with every step, from other threads. A failure on one device does not stop the others.

    Raises:
        InvalidOption: the model has no such layers.
        NotPermitted: a device has no right to copy models from here.
    """
    for part in parts:
        recipe.covering(part.layers)
        if part.worker is not None:
            check_right(part.worker)
    bringing = _Bringing(model, recipe, trust, RateLimiter(rate), store or LayerStore(), tell)
    return run_there(bringing.all(parts)).result()


def check_right(worker: Worker) -> None:
    """Check that a worker's device may copy models from here.

    Raises:
        NotPermitted: the device has no such right.
    """
    peer = worker.peer
    if peer is not None and Right.FILES not in peer.rights:
        raise NotPermitted(
            f"{peer.name} ({peer.id.short}) has no right to copy models from here.",
            f"If it shall have them: edgellm peers grant {peer.id.short} files",
        )


class _Bringing:
    def __init__(
        self, model: Path, recipe: Recipe, trust: Trust | None, pace: RateLimiter, store: LayerStore, tell: Tell
    ) -> None:
        self._model, self._recipe, self._trust = model, recipe, trust
        self._pace, self._store, self._tell = pace, store, tell

    async def all(self, parts: Sequence[DeployPart]) -> list[Moved]:
        return list(await asyncio.gather(*(self._part(part) for part in parts)))

    async def _part(self, part: DeployPart) -> Moved:
        pieces = self._recipe.covering(part.layers)
        state = _State(Moved(part, sum(piece.size for piece in pieces)), self._tell)
        try:
            if part.worker is None:
                await self._here(part, state)
            else:
                await self._there(part.worker, [self._recipe.pieces.index(piece) for piece in pieces], state)
            return state.end()
        except LayersCorrupt as error:
            forget_recipe(self._recipe)
            return state.end(error)
        except EdgeError as error:
            return state.end(error)

    async def _here(self, part: DeployPart, state: _State) -> None:
        state.say("cutting")
        held = sum(self._store.arrived(piece) for piece in self._recipe.covering(part.layers))
        state.carried(UploadProgress(held, state.now.total, 0))

        def progress(share: float) -> None:
            state.carried(UploadProgress(max(held, int(share * state.now.total)), state.now.total, 0))

        await asyncio.to_thread(cut_layers, self._model, self._store, progress, part.layers)

    async def _there(self, worker: Worker, places: Sequence[int], state: _State) -> None:
        """Send the pieces, and try again as long as bytes arrive; a lost device is given some time to come back."""
        failures = 0
        while True:
            before = state.now.arrived
            try:
                state.attempt()
                channel = await reach_worker(self._trust, worker)
                async with channel:
                    state.say("sending")
                    await put(channel, worker.name, self._recipe, places, self._cut, self._pace, state.carried)
                    return
            except (DeviceLost, VerifierUnreachable) as error:
                failures = 0 if state.now.arrived > before else failures + 1
                if failures >= ATTEMPTS:
                    raise DeployFailed(
                        f"{worker.name} has {state.now.arrived} of {state.now.total} bytes, and cannot be reached any"
                        f" more: {error.what}",
                        "What has arrived is kept: deploy again when it is back.",
                    ) from None
                state.say("waiting")
                await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** max(0, failures - 1)))

    def _cut(self, piece: LayerPiece) -> Iterator[bytes | memoryview]:
        return cut_piece(self._model, self._recipe.layers, piece.first, piece.last)


class _State:
    """The progress of one part, reported on every change."""

    def __init__(self, first: Moved, tell: Tell) -> None:
        self.now, self._tell = first, tell
        self._began, self._known, self._sent_before = time.monotonic(), False, 0

    def attempt(self) -> None:
        self._sent_before = self.now.sent
        self._change(replace(self.now, doing="connecting", attempts=self.now.attempts + 1))

    def carried(self, carried: UploadProgress) -> None:
        already = self.now.already if self._known else carried.arrived
        self._known = True
        sent = self._sent_before + carried.sent
        self._change(replace(self.now, arrived=carried.arrived, sent=sent, already=already))

    def say(self, doing: str) -> None:
        self._change(replace(self.now, doing=doing))

    def end(self, error: EdgeError | None = None) -> Moved:
        arrived = self.now.arrived if error is not None else self.now.total
        self._change(replace(self.now, doing="", done=True, error=error, arrived=arrived))
        return self.now

    def _change(self, now: Moved) -> None:
        self.now = replace(now, seconds=time.monotonic() - self._began)
        self._tell(self.now)
