"""A mesh at the pace of a home's devices: its workers load layers and compute passes as slowly as larger models do.

Layers of the pairs that this repository makes are loaded in a millisecond. So every load of a layer, and every pass
through one, is made to last a given time. A device has one disk and one processor: its loads come one after the other,
and so do its passes. All else is real: processes, gRPC, relays with the network's bandwidth and round trip, the layers,
and the tokens. Nothing stays in memory once no stage uses it, so that every reply begins cold. As in a larger model,
every piece has one layer, so that stages with other layers share those that they both have.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edgellm.engine import Block, ContextSpec, Floats, Ids, Model
from edgellm.mesh import stage, weight_cache
from edgellm.mesh.weight_cache import WeightCache
from edgellm.storage import layer_pieces as manifest
from testkit.network.relay import Network, Relay
from testkit.processes.worker import WorkerProcess

_FIRST = """
from testkit.processes.paced_mesh import Pace, paced
slowly = paced(Pace({}, {}, {}))
slowly.__enter__()
"""
_disk, _processor = threading.Lock(), threading.Lock()
_reserve = WeightCache.reserve


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds in which a device loads a layer, and takes a pass through one: `step`, and `row` for each row of it."""

    load: float
    step: float
    row: float

    def of_pass(self, layers: int, rows: int) -> float:
        """Return the seconds of a pass through so many layers."""
        return layers * (self.step + rows * self.row)


class PacedBlock(Block):
    """Layers whose passes last at least as long as the `pace` says."""

    def __init__(self, model: Model, spec: ContextSpec, *, pace: Pace, **options: Any) -> None:
        self._pace, self._layers = pace, model.n_layer
        super().__init__(model, spec, **options)

    def forward(self, given: Ids | Floats, **place: Any) -> Floats:
        """See `Block.forward`."""
        with _processor:
            end = time.perf_counter() + self._pace.of_pass(self._layers, len(given))
            found = super().forward(given, **place)
            time.sleep(max(0.0, end - time.perf_counter()))
        return found


def _cold(weights: WeightCache, *stage: Any) -> ExitStack:
    """Reserve room for a stage, and unload what no stage uses once that ends."""
    ending = ExitStack()
    ending.callback(weights.evict_unused, everything=True)
    ending.enter_context(_reserve(weights, *stage))
    return ending


@contextmanager
def paced(pace: Pace) -> Iterator[None]:
    """Load and compute the stages of this process at a pace."""

    class PacedModel(Model):
        @classmethod
        def load(cls, *arguments: Any, **options: Any) -> Any:
            with _disk:
                began = time.perf_counter()
                model = super().load(*arguments, **options)
                time.sleep(max(0.0, began + pace.load * model.n_layer - time.perf_counter()))
            return model

    with ExitStack() as patched:
        for module, name, slow in (
            (stage, "Block", partial(PacedBlock, pace=pace)),
            (weight_cache, "Model", PacedModel),
            (WeightCache, "reserve", _cold),
            (manifest, "PIECE_BYTES", 1),
        ):
            patched.enter_context(patch.object(module, name, slow))
        yield


@contextmanager
def paced_workers(names: Sequence[str], model: Path, home: Path, pace: Pace, network: Network) -> Iterator[list[str]]:
    """Run a worker of each name at a pace, behind a relay; yield them as `--peer` takes them: NAME=HOST:PORT."""
    with ExitStack() as closing:
        workers = []
        for name in names:
            worker = WorkerProcess(model, home / name, first=_FIRST.format(*astuple(pace)))
            closing.callback(worker.close)
            workers.append(worker)
        for worker in workers:
            worker.wait()
        relays = [closing.enter_context(Relay(worker.port, network)) for worker in workers]
        yield [f"{name}=127.0.0.1:{relay.port}" for name, relay in zip(names, relays, strict=True)]
