"""`mesh plan`, `peers`, `deploy` and `layers`, as a user has them with two workers; and the chart of a run."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from edgellm.cli.views.mesh_view import measured_chart, print_timeline
from edgellm.coldstart.plan import PlannedStage, PlanOption
from edgellm.layer_range import HERE, LayerRange, StageShare
from edgellm.llm.mesh_timeline import comparison
from edgellm.mesh import deploy as deploying
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.servers import WorkerServer
from edgellm.storage.layer_store import LayerStore
from tests.cli.conftest import Edge
from tests.mesh.test_fleet_file import DESKTOP, LAPTOP
from tests.mesh.test_fleet_file import MODEL as DESCRIBED
from tests.rpc.strangers import befriend, device
from tests.services.conftest import ANYWHERE

MODEL = "edgellm-verifier"
PLAN = ("mesh", "plan", MODEL, "--tokens-in", "16", "--tokens-out", "4")

# --- plans for described devices ----------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home.toml"
    path.write_text(DESKTOP + LAPTOP, encoding="utf-8")
    return path


def test_the_papers_setting_as_json(edge: Edge) -> None:
    """On the screen it is that of `docs/guide/mesh.md`."""
    answer = edge("mesh", "plan", "--preset", "csgo", "--overlap", "paper", "--tokens-in", "256", "--json").answer
    assert answer["ttft_s"] == pytest.approx(2.562, abs=1e-3)
    assert answer["optimal"] is True
    assert answer["planner_ms"] > 0
    first, *_, last = answer["stages"]
    assert (first["device"], first["first_layer"], last["last_layer"]) == ("Device 3", 1, 40)
    assert set(first) >= {"load_s", "wait_s", "network_s", "compute_s", "finish_s"}
    assert last["finish_s"] == answer["ttft_s"]
    found = {name: answer["baselines"][name] for name in ("best_single", "even", "ideal_single")}
    assert found == {
        "best_single": None, "even": pytest.approx(3.612, abs=1e-3), "ideal_single": pytest.approx(6.129, abs=1e-3)
    }  # fmt: skip
    assert answer["advice"]


def test_a_model_that_is_here_on_devices_from_a_file(edge: Edge, home: Path) -> None:
    words = ("mesh", "plan", MODEL, "--devices", str(home))
    answer = edge(*words, "--json").answer
    assert answer["stages"][-1]["last_layer"] == 12
    assert re.match("Use .* alone", answer["advice"])
    edge(*words).told("holds everything")
    home.write_text(DESKTOP.replace("desktop", "a\\u001b[2Jb") + DESCRIBED, encoding="utf-8")
    shown = edge("mesh", "plan", "--devices", str(home))
    assert "\x1b" not in shown.out + shown.err, "a name cannot command the terminal"


def test_the_memory_of_the_context_decides_the_plan_and_the_run(edge: Edge, home: Path) -> None:
    small = DESKTOP.replace("memory_gb = 16", "memory_gb = 0.025")
    home.write_text(small + small.replace("desktop", "laptop"), encoding="utf-8")
    words = (*PLAN, "--devices", str(home))
    short, long = edge(*words, "--ctx-size", "256", "--json").answer, edge(*words, "--json").answer
    assert (short["context_length"], long["context_length"]) == (256, 1024)  # as many as it was trained for
    assert short["baselines"]["best_single"] is not None
    assert long["baselines"]["best_single"] is None
    assert len(long["stages"]) == 2
    assert edge(*words, "--ctx-size", "1024", "--json").answer["baselines"] == long["baselines"]
    edge(*words, "--ctx-size", "1024", "--cache-type", "f32").told("The model needs", code=1)
    edge(*words, "--ctx-size", "256").told("a context of 256 tokens; change it with --ctx-size")
    home.write_text(small.replace("desktop", "here"), encoding="utf-8")
    run = ("mesh", "run", MODEL, "Hi", "--devices", str(home), "--max-tokens", "2", "--ctx-size")
    edge(*run, "256").told()
    assert edge(*run, "1024") == edge(*words).told(code=1)


def test_a_plan_that_ran_out_of_time_says_so(edge: Edge, home: Path) -> None:
    large = DESCRIBED.replace("layers = 4", "layers = 48").replace("d_ff = 128", "d_ff = 4000000")
    device = LAPTOP.replace("memory_gb = 16", "memory_gb = 1.7").replace("tflops = 20", "tflops = {}")
    device = device.replace("laptop", "device {}").replace("= 2000", "= {}")
    home.write_text(large + "".join(device.format(at, 40 - at, 300 * at) for at in range(1, 17)), encoding="utf-8")
    asked = ("mesh", "plan", "--devices", str(home), "--objective", "reply", "--time-limit", "0")
    edge(*asked).told("within ", "faster may exist")
    answer = edge(*asked, "--json").answer
    assert answer["optimal"] is False
    assert 0.0 < answer["gap"] < 1.0


# --- layers on paired devices -------------------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path: Path, quick_figures: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, LayerStore]]:
    """Of two workers that this user is paired with."""
    monkeypatch.setattr(deploying, "PAUSE_SECONDS", 0.01)
    owner, stores = Trust.load(), {}
    with ExitStack() as running:
        for name in ("desk", "phone"):
            trust = device(tmp_path / name)
            befriend(trust, owner, "files compute", name)
            stores[name] = LayerStore(tmp_path / name / "layers", 10**9)
            stored = StoredLayers(stores[name])
            worker = WorkerServer(WeightCache(stored), ANYWHERE, trust=trust, stored=stored)
            owner.peers.record_seen(trust.identity.id, running.enter_context(worker).address)
        yield stores


def test_layers_are_deployed_listed_and_removed(
    edge: Edge, stores: dict[str, LayerStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.storage.layer_pieces.PIECE_BYTES", 1)  # each layer alone, as those of a large model
    done = edge("mesh", "deploy", MODEL, "--split", "here:1-2,desk:3-8,phone:9-12").told()
    lines = done.out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["here", "1-2"], ["desk", "3-8"], ["phone", "9-12"]]
    assert all(line.rstrip().endswith("complete") for line in lines[1:])
    rows = edge("mesh", "deploy", MODEL, "--split", "desk:1-8,phone:9-12", "--json").answer
    assert [row["sent"] > 0 for row in rows] == [True, False]
    assert rows[0]["already"] + rows[0]["sent"] == rows[0]["bytes"]
    assert rows[1] == rows[1] | {"first_layer": 9, "last_layer": 12, "attempts": 1, "error": None}

    listed = edge("mesh", "layers", "--json").answer
    assert {row["device"]: row["layers"] for row in listed} == {"here": "1-2", "desk": "1-8", "phone": "9-12"}
    edge("mesh", "layers", "--on", "desk").told("1-8 of 12", "desk:", "of 1.0 GB")
    edge("mesh", "layers", "clean", "--on", "desk").told("Add --yes", code=2)
    gone = edge("mesh", "layers", "clean", "--on", "desk", "--model", MODEL, "--yes", "--json").answer
    assert (gone["pieces"], gone["in_use"]) == (8, 0)
    assert stores["desk"].size == 0
    edge("mesh", "layers", "clean", "--on", "desk", "-m", MODEL, "--yes").told("0 B")
    assert edge("mesh", "layers", "clean", "--on", "here", "-y", "--json").answer["pieces"] == 2
    edge("mesh", "layers", "--on", "here").told("There are no layers")


def test_the_devices_are_measured_planned_for_and_shown(edge: Edge, stores: dict[str, LayerStore]) -> None:
    rows = edge("mesh", "peers", "--json").answer
    assert [row["name"] for row in rows] == ["here", "desk", "phone"]
    assert all(row["speed"] is None for row in rows)
    answer = edge("mesh", "plan", MODEL, "--tokens-in", "64", "--json").answer
    assert answer["stages"][-1]["last_layer"] == 12
    assert {one["device"] for one in answer["move"]} == {stage["device"] for stage in answer["stages"]}
    here, desk, _phone = edge("mesh", "peers", "--json").answer
    assert here["may_here"] is None
    assert (desk["may_here"], desk["may_there"]) == (["compute", "files"], ["compute", "files"])
    assert (desk["speed"]["tokens"], desk["speed"]["disk_mb_s"] > 0) == ([1, 8], True)
    assert (desk["line"]["up_mbps"] > 0, desk["line"]["age_s"] < 60) == (True, True)
    edge("mesh", "deploy", MODEL, "--split", "desk:1-12")
    edge("mesh", "peers").told("GFLOP/s", "just now", "edgellm verifier 1-12")
    edge("mesh", "plan", MODEL, "--tokens-in", "64", "--measure").told()
    again = edge("mesh", "peers", "--json").answer
    assert {row["speed"]["reason"] for row in again} == {"asked for"}


def test_a_plan_is_deployed_and_then_nothing_is_left_to_move(
    edge: Edge, stores: dict[str, LayerStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This device has no memory to spare, so the plan must split."""
    monkeypatch.setattr("edgellm.mesh.weight_cache.free_memory", lambda: 25_000_000)
    edge("mesh", "plan", MODEL)  # both workers measure at once, and keep it in one place, which is this user's
    done = edge("mesh", "deploy", *PLAN[2:], "--json").told("Split it over")
    assert all(row["error"] is None for row in done.answer)
    names = {row["device"] for row in done.answer}
    moves = edge(*PLAN, "--json").answer["move"]
    assert [one["bytes"] for one in moves if one["device"] in names] == [0] * len(moves)
    edge(*PLAN).told("nothing has to be deployed first")


def test_a_device_that_refuses_is_said_and_the_others_go_on(edge: Edge, stores: dict[str, LayerStore]) -> None:
    stores["desk"].limit = 1000
    done = edge("mesh", "deploy", MODEL, "--split", "desk:1-6,phone:7-12")
    done.told("layers 1-6 of edgellm verifier would take", "0 B arrived", code=1)
    assert "desk: desk: " not in done.err
    for words in (("deploy", MODEL, "--split", "attic:1-12"), ("layers", "--on", "attic")):
        edge("mesh", *words).told("No paired device is called 'attic'", code=1)


@pytest.mark.parametrize("begin", [0.96, 0.97, 0.975, 0.99])
def test_a_short_computation_at_the_end_is_drawn(begin: float) -> None:
    end = begin + 0.001
    stage = PlannedStage(LayerRange(0, 12), 0.1, 0.8, 0.0, 0.9, 0.001, end, "desktop", 1.0, "")
    line, _legend = measured_chart(comparison(PlanOption((stage,), 1.0, 0.01, 1.0), None), 20)
    assert line.plain.startswith("desktop  run   ░")
    assert "█" in line.plain


def test_a_reply_in_phases_shows_its_moves_beside_the_plan() -> None:
    planned = {"after_token": 40, "at_s": 2.6, "loaded_s": 2.0, "ready_s": 2.5}
    stage = StageShare(HERE, LayerRange(0, 12)).to_json()
    move = {"after_token": 43, "at_s": 3.0, "loaded_s": 2.25, "ready_s": 2.75, "stages": [stage], "planned": planned}
    console = Console(width=100, record=True, file=StringIO())
    plan = PlanOption((), 1.0, 0.02, 5.0)
    print_timeline(console, comparison(PlanOption((), 1.5, 0.02, 6.0), plan, [move]))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "44 (41) here 1-12 2.25 s (2.00 s) 2.75 s (2.50 s) 3.00 s (2.60 s)" in lines
    assert "last token 6.00 s (5.00 s)" in lines
