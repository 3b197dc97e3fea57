"""A reply in phases over a worker: the plan is carried out, reported beside what was measured, and changes no text."""

from __future__ import annotations

import time
from pathlib import Path

from edgellm.engine import ModelFile
from edgellm.llm import LLM
from edgellm.llm.mesh_llm import MeshOptions, Workload, open_mesh, place_described
from edgellm.llm.mesh_timeline import Replies, comparison
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.fleet_file import read_fleet
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.weight_cache import WeightCache
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.params import ReplyOptions
from edgellm.storage.layer_store import LayerStore
from tests.services.conftest import ANYWHERE

SLOW = """\
[[device]]
name = "here"
tflops = 0.1
util_a = 1.0
util_b = 0.1
disk_mb_s = 0.1
memory_gb = 16
uplink_mbps = 100
downlink_mbps = 100
memory_gb_s = 1
latency_ms = 20
"""
QUESTION = "Where is the ladder, and who has the drill?"


def _text(pair: LLM, words: ReplyOptions) -> list[int]:
    return [token.id for token in pair.reply(QUESTION, words)]


def _settle(mesh: Mesh, first: object) -> None:
    """Wait until the next pipeline has loaded and read what it was given, or has taken over from the `first` shares."""
    until = time.monotonic() + 120.0
    while mesh.shares == first and ((coming := mesh.coming()) is None or coming.busy):
        assert time.monotonic() < until
        time.sleep(0.005)


def test_the_laptop_takes_over_behind_the_reply(verifier_path: Path, tmp_path: Path) -> None:
    home = tmp_path / "home.toml"
    home.write_text(SLOW + SLOW.replace('"here"', '"laptop"'), encoding="utf-8")
    file, words = ModelFile.open(verifier_path), ReplyOptions(max_tokens=60, retrieval="off")
    with LLM.open(verifier_path) as whole:
        expected = _text(whole, words)
    weights = WeightCache(WholeModel(file, LayerStore(tmp_path / "layers", 10**9)))
    with WorkerServer(weights, ANYWHERE) as worker:
        placed = place_described(file, read_fleet(home), Workload(20, 2000))
        options = MeshOptions(placed=placed, peers=(f"laptop={worker.address}",), sessions=1)
        with open_mesh(file, options) as opened:
            assert opened.phases is not None
            mesh, replies, written = opened.verifier.mesh, Replies(opened), list[int]()
            first, following = placed.shares, opened.phases.following
            assert len(first) == 2
            assert mesh.shares == first
            reply = opened.pair.reply(QUESTION, words)
            for token in reply:
                written.append(token.id)
                if len(written) in (2, 4):
                    _settle(mesh, first)
            assert written == expected
            assert mesh.shares == following
            report = replies.on_reply(reply.summary)
    assert report is not None
    (move,) = report[0].moves
    assert move.shares == following
    assert 2 < move.token <= 6
    assert 0.0 < move.loaded <= move.ready <= move.at
    numbers = comparison(*report)
    assert numbers["moves"][0]["after_token"] == move.token
    assert numbers["planned_reply_s"] > numbers["planned_ttft_s"]
