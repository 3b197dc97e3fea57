"""`mesh run`, `chat --mesh` and `serve --role worker`: as a user would, also with a model in several files."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from edgellm.cli.commands.mesh import over_devices
from edgellm.cli.options import HardwareOptions, PairOptions
from edgellm.cli.views.mesh_view import Reports
from edgellm.engine import Context, ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.errors import PlanImpossible
from edgellm.layer_range import HERE, LayerRange
from edgellm.llm.mesh_llm import OpenedMesh
from edgellm.mesh.layer_sources import SeveralSources, StoredLayers, WholeModel
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc_engine.service import RpcEngineService
from edgellm.services.server.servers import WorkerServer
from edgellm.storage.layer_store import LayerStore
from testkit.gguf.split_file import split
from tests.cli.conftest import Done, Edge, ids
from tests.cli.serving import Served
from tests.conftest import Architectures
from tests.rpc.strangers import befriend, device
from tests.services.conftest import ANYWHERE
from tests.storage.pieces import cut_singly

MODEL, QUESTION = "edgellm-verifier", "Where is my mug?"
RUN = ("mesh", "run", MODEL, QUESTION, "--retrieval", "off", "--max-tokens", "4")
ALONE = ("--split", "here:1-12")
SMALL = (*RUN, "--ctx-size", "256")


@pytest.fixture
def worker(verifier_path: Path, tmp_path: Path) -> Iterator[WorkerServer]:
    cache = WeightCache(WholeModel(ModelFile.open(verifier_path), LayerStore(tmp_path / "layers", 10**9)))
    with WorkerServer(cache, ANYWHERE) as running:
        yield running


def run(edge: Edge, worker: WorkerServer, *more: str) -> Done:
    split = f"here:1-5,{worker.address}:6-12"
    return edge("mesh", "run", MODEL, QUESTION, "--split", split, "--max-tokens", "12", *more)


def test_a_reply_over_two_devices_is_that_of_one(edge: Edge, worker: WorkerServer) -> None:
    words = ("chat", QUESTION, "--draft", "none", "--max-tokens", "12")
    alone, done = edge(*words), run(edge, worker, "--explain").told()
    assert done.out == alone.out
    lines = done.err.splitlines()
    assert any(re.match(r"here +1-5 ", line) for line in lines)
    assert any(line.startswith("first token") for line in lines)
    bars = [line for line in lines if line.startswith(str(worker.address)) and "run " in line]
    assert any(mark in line for line in bars for mark in "█▓░"), bars
    assert edge(*words, "--mesh", f"{worker.address}:1-12").told("first token").out == alone.out


def test_the_stages_as_json_with_drafts_in_blocks_and_the_time_before_the_reply(
    edge: Edge, worker: WorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Reports):
        def __init__(self, opened: OpenedMesh, *, asked: bool, as_json: bool) -> None:
            super().__init__(opened, asked=asked, as_json=as_json)
            sleep(0.3)

    monkeypatch.setattr("edgellm.cli.views.mesh_view.Reports", Late)
    done = run(edge, worker, "--json", "--draft", "edgellm-draft", "--retrieval", "off")
    assert ids(done) == ids(edge("chat", QUESTION, "--json", "--max-tokens", "12"))
    *_, summary, mesh = done.lines
    assert summary["summary"]["drafted"] > 0  # until both ways are measured
    assert mesh["mesh"]["ttft_s"] > 0.3
    assert stages(done) == {"here": (1, 5), str(worker.address): (6, 12)}
    for one in mesh["mesh"]["stages"]:
        assert 0.0 < one["measured"]["load_s"] <= one["measured"]["finish_s"]
        assert one["planned"] is None
        assert one["measured"]["compute_s"] > 0.0


def test_where_nobody_is_left_it_says_so(edge: Edge) -> None:
    """But this device holds the model, too."""
    edge("mesh", "run", MODEL, QUESTION, "--split", "127.0.0.1:9:1-12", "--max-tokens", "3").told("A device was lost")


@pytest.fixture
def measurable(verifier_path: Path, tmp_path: Path, quick_figures: None) -> Iterator[WorkerServer]:
    """A worker with the layers 7 to 12 in its store, that can be measured."""
    store = LayerStore(tmp_path / "store", 10**9)
    cut_singly(verifier_path, store, layers=LayerRange(6, 12))
    stored = StoredLayers(store)
    with WorkerServer(WeightCache(stored), ANYWHERE, stored=stored) as running:
        yield running


WITH_A_CARD = """
import sys
from edgellm.cli import main
from edgellm.engine.gguf import synthetic_layers
from testkit.processes.rpc_device import add_rpc_device
synthetic_layers.ROWS = 1, 8
synthetic_layers._SPELL, synthetic_layers._ROUNDS = 0.0, 1
add_rpc_device()
sys.argv = ["edgellm", *sys.argv[1:]]
main()
"""


@pytest.mark.rpc
def test_a_workers_card_is_measured_planned_for_and_computes(edge: Edge, quick_figures: None, tmp_path: Path) -> None:
    alone = edge(*RUN, *ALONE)
    served = Served("--role", "worker", "-m", MODEL, program=("-c", WITH_A_CARD))
    try:
        served.wait_for("Memory for layers and caches: .*")
        assert "Layers are computed on RPC0" in served.said
        planned = ("mesh", "plan", MODEL, "--tokens-in", "16", "--tokens-out", "4")
        plan = edge(*planned, "--peer", f"desk={served.address}", "--json").answer
        assert [(one["device"], one["unit"]) for one in plan["units"]] == [("here", None), ("desk", "RPC0")]
        kept = [path.name for path in tmp_path.rglob("figures/*-all-*.json")]
        assert sorted("RPC0" in name for name in kept) == [False, True]
        assert edge(*RUN, "--split", f"here:1-5,{served.address}:6-12").told().out == alone.out
    finally:
        served.close()


def test_this_device_computes_its_part_as_the_options_say(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[int, bool]] = []
    init = Context.__init__

    def noted(self: Context, *given: Any, **more: Any) -> None:
        init(self, *given, **more)
        opened.append((self.native.threads, self.native_spec.flash))

    monkeypatch.setattr(Context, "__init__", noted)
    hardware = ("--threads", "verifier=2", "--threads", "draft=3", "--flash-attn", "verifier=on", "--batch-size", "8")
    edge(*SMALL, *ALONE, "--draft", "edgellm-draft", *hardware).told()
    assert {(2, True), (3, False)} == set(opened)


def stages(done: Done) -> dict[str, tuple[int, int]]:
    found = done.lines[-1]["mesh"]["stages"]
    return {one["device"]: (one["first_layer"], one["last_layer"]) for one in found}


def test_without_a_split_the_home_is_measured_and_the_layers_that_are_there_are_run(
    edge: Edge, measurable: WorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device has the memory for all layers, and the worker has some of them."""
    alone = edge(*SMALL, *ALONE)
    monkeypatch.setattr("edgellm.mesh.weight_cache.free_memory", lambda: 10_000_000)
    home = (*SMALL, "--peer", f"desk={measurable.address}")
    done = edge(*home, "--explain")
    done.told("Split it over here and desk", "No single device has the memory for it")
    done.told("Once before that, layers are cut out of the model's file (here ")
    assert done.out == alone.out
    assert re.search(r"^desk: \d+-12: ", done.err, re.MULTILINE)
    again = edge(*home, "--json")
    assert "layers are cut out" not in again.err
    found = stages(again)
    assert found["desk"][0] >= 7
    assert found["here"] == (1, found["desk"][0] - 1)
    edge(*home, "--peer", f"desk={measurable.address}").told("Two devices are called 'desk'", code=2)


def test_the_layers_that_it_names_make_it_run_over_a_paired_device(
    edge: Edge, tmp_path: Path, quick_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither device has the memory for all layers, and the paired one has none of them yet."""
    owner, trust = Trust.load(), device(tmp_path / "desk")
    befriend(trust, owner, "files compute", "desk")
    monkeypatch.setattr("edgellm.mesh.weight_cache.free_memory", lambda: 10_000_000)
    stored = StoredLayers(LayerStore(tmp_path / "store", 10**9))
    with WorkerServer(WeightCache(stored), ANYWHERE, trust=trust, stored=stored) as worker:
        owner.peers.record_seen(trust.identity.id, worker.address)
        refused = edge(*SMALL).told(code=1)
        command = re.search(r"edgellm (mesh deploy MODEL --split \S+:\d+-\d+)", refused.err)
        assert command is not None, refused.err
        edge(*command[1].replace("MODEL", MODEL).split()).told()
        done = edge(*SMALL, "--json").told()
        assert set(stages(done)) == {"here", "desk"}
        assert command[1].replace("MODEL", MODEL) not in done.err


def test_nobody_else_means_this_device_alone_and_no_measuring(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.cli.commands.mesh.survey_workers", None)
    done = edge(*RUN, "--json").told("No other device can be used, so this one holds all layers")
    assert stages(done) == {"here": (1, 12)}


def test_a_conversation_over_the_measured_home(edge: Edge, measurable: WorkerServer) -> None:
    words = ("chat", QUESTION, "--max-tokens", "3", "--draft", "none", "--retrieval", "off", "--mesh", "auto", "--peer")
    done = edge(*words, f"desk={measurable.address}", "--peer", "attic=127.0.0.1:9")
    done.told("left out: attic: No answer from 127.0.0.1:9", "first token")
    assert re.search(r"For a prompt of \d\d? tokens", done.err), "of those that are asked, not of a usual number"


def test_a_served_mesh_has_memory_for_all_replies_at_once(
    measurable: WorkerServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the devices are given work for, which refuse what does not fit."""
    monkeypatch.setattr("edgellm.mesh.weight_cache.free_memory", lambda: 25_000_000)
    models = PairOptions(draft="none", verifier=MODEL, peer=(f"desk={measurable.address}",), mesh="auto")
    opened = partial(over_devices, models, 4, HardwareOptions(ctx_size=("1024",)))
    pair, mesh = opened(sessions=1)
    with pair:
        assert mesh is not None
        assert {share.name for share in mesh.verifier.mesh.shares} <= {HERE, "desk"}
    assert "No prompt is known yet: 1024 tokens are assumed" in capsys.readouterr().err
    with pytest.raises(PlanImpossible):
        opened(sessions=8)


@pytest.mark.rpc
def test_a_model_that_cannot_be_cut_runs_over_rpc(
    edge: Edge, quick_figures: None, architectures: Architectures, tmp_path: Path
) -> None:
    model, cache = str(architectures("lfm2")), WeightCache(SeveralSources(), unit=ComputeUnit(), memory=2**30)
    stored = StoredLayers(LayerStore(tmp_path / "layers", 10**9))
    question = ("--max-tokens", "12", "--retrieval", "off")
    alone = edge("chat", QUESTION, "--draft", "none", "--verifier", model, *question)
    with WorkerServer(cache, ANYWHERE, stored=stored, more=(RpcEngineService,)) as worker:
        peer = ("--peer", f"desk={worker.address}")
        run = ("mesh", "run", model, QUESTION, *question, *peer)
        done = edge(*run, "--split", "here:1-2,desk:3-4")
        assert done.told("engine: rpc. The layers of this lfm2 model cannot be cut").out == alone.out
        edge(*run, "--f16").told("--f16 is for stages only", code=2)
        planned = ("mesh", "plan", model, *peer)
        plan = edge(*planned, "--json").answer
        assert plan["engine"] == "rpc"
        assert plan["plan"]["shares"][-1]["last_layer"] == 4
        assert plan["one_model_each"]["shares"] == [{"device": "desk", "first_layer": 1, "last_layer": 4}]
        edge(*planned).told("this device alone")
        assert edge(*run).out == alone.out
        over = ("chat", QUESTION, "--draft", "none", "--verifier", model, "--mesh", "desk:1-4", *peer, *question)
        assert edge(*over).out == alone.out
    edge("mesh", "run", model, QUESTION, "--engine", "stages").told("cannot be cut", code=1)


class Roomy(ComputeUnit):
    """A processor with a gigabyte of memory, whatever this device has."""

    def available(self) -> int:
        return 2**30


@pytest.mark.rpc
def test_layers_that_can_be_cut_go_over_rpc_only_if_asked(
    edge: Edge, quick_figures: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device has both the layers and the memory for them, but the worker serves llama.cpp's RPC, too."""
    stored = StoredLayers(LayerStore(tmp_path / "layers", 10**9))
    cache = WeightCache(stored, unit=Roomy(Hardware(threads=1)))
    alone = edge(*SMALL, *ALONE)
    assert "engine:" not in alone.err
    monkeypatch.setattr("edgellm.mesh.weight_cache.free_memory", lambda: 10_000_000)
    with WorkerServer(cache, ANYWHERE, stored=stored, more=(RpcEngineService,)) as worker:
        peer = ("--peer", f"desk={worker.address}")
        edge(*SMALL, *peer).told("Deploy them: edgellm mesh deploy", "Or add --engine rpc.", code=1)
        assert edge(*SMALL, *peer, "--engine", "rpc").told().out == alone.out


@pytest.mark.usefixtures("quick_figures")
def test_a_model_in_several_files_writes_what_the_whole_writes(
    edge: Edge, draft_path: Path, verifier_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, verifier = str(split(draft_path, tmp_path, 2)), str(split(verifier_path, tmp_path, 3))
    plain = ("chat", QUESTION, "--max-tokens", "12", "--retrieval", "off", "--json", "--no-history", "--gate", "always")
    assert ids(edge(*plain, "--draft", draft, "--verifier", verifier)) == ids(edge(*plain))
    with monkeypatch.context() as there:
        there.setenv("EDGELLM_HOME", str(tmp_path / "there"))
        served = Served("--role", "worker")
    try:
        over = f"here:1-5,{served.address}:6-12"
        assert edge("mesh", "plan", verifier, "--json").answer["stages"]
        deploy = ("mesh", "deploy", "--split", over, "--json")
        rows: list[dict[str, Any]] = edge(*deploy, verifier).answer
        assert [row["error"] for row in rows] == [None, None]
        assert rows[1]["sent"] == rows[1]["bytes"]
        exact = ("--json", "--retrieval", "off", "--max-tokens", "12")
        alone = edge("mesh", "run", MODEL, QUESTION, *exact, *ALONE)
        assert ids(edge("mesh", "run", verifier, QUESTION, *exact, "--split", over)) == ids(alone)
        assert [row["sent"] for row in edge(*deploy, MODEL).answer] == [0, 0]  # the unsplit file
    finally:
        served.close()
