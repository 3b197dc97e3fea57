"""Workers over real sockets."""

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from edgellm.coldstart import costs
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import LayerFile, LayerSource, ModelLayers
from edgellm.mesh.messages import StageSpec
from edgellm.mesh.pipeline import Pipeline
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
from edgellm.rpc.link import Endpoint
from edgellm.services.client.stage_client import RemoteDevice
from edgellm.services.server.servers import WorkerServer
from tests.mesh.folder import needed, reserve
from tests.mesh.household import NOTHING, Cut, Whole, even, logits_of
from tests.services.conftest import ANYWHERE
from tests.services.meshing import PROMPT, replying
from tests.waiting import until


def test_rows_of_16_bits_give_nearly_the_same(workers: list[WorkerServer], verifier_cut: Cut, whole: Whole) -> None:
    work = replace(verifier_cut.work, half=True)
    members = [RemoteDevice(Endpoint(str(at), worker.address)) for at, worker in enumerate(workers)]
    shares = even(work, [member.name for member in members])
    pipeline = Pipeline(
        [(m.stage_host(), replace(work, layers=s.layers)) for m, s in zip(members, shares, strict=True)]
    )
    whole.context.clear()
    expected = whole.context.decode(PROMPT, outputs=8)
    found = np.abs(logits_of(pipeline, 0, 0, PROMPT, 8) - expected).max()
    pipeline.close()
    assert 0.0 < found < 0.05 * np.abs(expected).max()


def test_weights_stay_warm_for_the_next_coordinator(workers: list[WorkerServer], verifier_cut: Cut) -> None:
    member = RemoteDevice(Endpoint("a", workers[0].address))
    with replying([member], verifier_cut.work) as (_, session):
        session.submit(PROMPT, NOTHING).result()
    assert member.describe(verifier_cut.work.model).layers.loaded == frozenset(range(12))


def test_a_worker_that_computes_elsewhere_than_it_was_measured_is_not_measured(verifier_cut: Cut) -> None:
    measured = replace(costs.devices()[0], unit="")
    model = verifier_cut.work.model
    for unit, known in (("", True), ("Card0", False)):
        weights = WeightCache(verifier_cut.layers, unit=ComputeUnit(name=unit))
        with WorkerServer(weights, ANYWHERE) as worker:
            found = RemoteDevice(Endpoint("a", worker.address), known=measured).describe(model)
        assert (found.unit, found.flops == measured.flops) == (unit, known)
        assert found.layers.stored == frozenset(range(12))


class Telling(WeightCache):
    """Says when it is asked for memory, and when it has given some."""

    def __init__(self, layers: LayerSource, memory: int) -> None:
        super().__init__(layers, memory=memory)
        self.asked, self.gave = threading.Event(), threading.Event()

    def reserve(self, work: StageSpec, model: ModelLayers, files: Sequence[LayerFile]) -> ExitStack:
        self.asked.set()
        reservation = super().reserve(work, model, files)
        self.gave.set()
        return reservation


def test_who_leaves_while_memory_is_waited_for_gets_none(verifier_cut: Cut) -> None:
    work = replace(verifier_cut.work, layers=LayerRange(2, 6))
    wanted = needed(verifier_cut.layers, work)
    cache = Telling(verifier_cut.layers, wanted)
    others = reserve(cache, work)
    cache.asked.clear()
    cache.gave.clear()
    with WorkerServer(cache, ANYWHERE) as worker:
        host = RemoteDevice(Endpoint("a", worker.address)).stage_host()
        host.begin(work, lambda _event: None, Pipeline([]))
        assert cache.asked.wait(60)
        host.close()
        time.sleep(0.3)  # until the worker has heard of it
        others.close()
        assert cache.gave.wait(60)
        until(lambda: cache.available() == wanted)
