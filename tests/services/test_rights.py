"""Every call with every set of rights."""

from __future__ import annotations

from pathlib import Path

from edgellm.engine import Model
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.servers import VerifierServer, WorkerServer
from edgellm.storage.layers.store import LayerStore
from tests.services.conftest import ANYWHERE
from tests.services.guarded_calls import SUBSETS, VERIFIER, WORKER, broken


def test_a_worker_answers_a_call_with_its_right_alone(host: Trust, guest: Trust, tmp_path: Path) -> None:
    stored = StoredLayers(LayerStore(tmp_path / "store", 10**9))
    with WorkerServer(WeightCache(stored), ANYWHERE, trust=host, stored=stored) as worker:
        tried, wrong = broken(host, guest, worker.address, WORKER)
    assert (tried, wrong) == (len(SUBSETS) * 9, [])


def test_a_verifier_answers_with_the_right_to_verify_alone(host: Trust, guest: Trust, exact: Model) -> None:
    with VerifierServer(exact, ANYWHERE, sessions=1, context=64, threads=1, trust=host) as server:
        tried, wrong = broken(host, guest, server.address, VERIFIER)
    assert (tried, wrong) == (len(SUBSETS) * len(VERIFIER), [])
