"""The page over a mesh: what each device did for the last reply, beside what was planned."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from edgellm.coldstart.plan import predict
from edgellm.engine import ModelFile
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm.mesh_llm import OpenedMesh, Workload, open_mesh, place_described
from edgellm.llm.mesh_timeline import MeshRecorder
from edgellm.llm.model_loading import EngineConfig
from edgellm.mesh.fleet_file import read_fleet
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.stats import Summary
from testkit.browser.page_states import SIZES
from tests.cli.test_mesh_run import worker
from tests.http.conftest import HOME, QUESTION, asker, conversation
from tests.http.test_page import context, page, talk
from tests.mesh.test_fleet_file import DESKTOP, LAPTOP
from tests.waiting import until

__all__ = ["context", "page", "worker"]


@pytest.fixture
def opened(verifier_path: Path, draft_path: Path, tmp_path: Path, worker: WorkerServer) -> Iterator[OpenedMesh]:
    """Two devices that are described in a file, whatever they can really do."""
    home = tmp_path / "home.toml"
    home.write_text((DESKTOP + LAPTOP).replace('"desktop"', '"here"'), encoding="utf-8")
    file = ModelFile.open(verifier_path)
    placed = place_described(file, read_fleet(home), Workload(256, 128))
    option = predict(placed.home, ((0, 5), (1, 7)))
    plan = replace(placed.plan, option=option, best_single=None)
    placed = replace(placed, shares=option.shares, plan=plan, phases=None)
    config = EngineConfig(draft_path, peers=[f"laptop={worker.address}"], replies=2)
    with open_mesh(file, placed, config) as mesh:
        yield mesh


@pytest.fixture
def recorder(opened: OpenedMesh) -> MeshRecorder:
    return MeshRecorder(opened)


@pytest.fixture
def server(opened: OpenedMesh, recorder: MeshRecorder) -> Iterator[HttpServer]:
    with HttpServer(HOME) as made:
        made.open(ServedModel(opened.pair, "edgellm-verifier", recorder=recorder))
        yield made


def test_the_status_has_what_each_device_did_for_the_last_reply(server: HttpServer, opened: OpenedMesh) -> None:
    ask = asker(server)
    before = ask("GET", "/status").json["mesh"]
    assert (before["last"]["ttft_s"], before["last"]["planned_ttft_s"] > 0.0) == (None, True)
    assert all(stage["planned"] and stage["measured"] is None for stage in before["last"]["stages"])
    held = [(one["device"], one["first_layer"], one["last_layer"]) for one in before["holders"]]
    assert held == [(share.name, share.layers.start + 1, share.layers.stop) for share in opened.verifier.mesh.shares]
    ttft: list[float] = []
    for _ in range(2):
        assert ask("POST", "/v1/chat/completions", conversation(max_tokens=8)).status == 200
        until(lambda: (ask("GET", "/status").json["mesh"]["last"] or {}).get("ttft_s") not in (None, *ttft))
        last = ask("GET", "/status").json["mesh"]["last"]
        ttft.append(last["ttft_s"])
        assert last["token_s"] > 0.0
        assert last["planned_ttft_s"] > 0.0
        assert all(stage["planned"]["finish_s"] > 0.0 for stage in last["stages"])
        assert all(0.0 < stage["measured"]["compute_s"] < last["ttft_s"] for stage in last["stages"])
    assert last["stages"][0]["measured"]["load_s"] == 0.0  # the second one found everything loaded


def test_replies_that_share_the_devices_are_left_out(server: HttpServer, recorder: MeshRecorder) -> None:
    ask = asker(server)

    def write() -> None:
        assert ask("POST", "/v1/chat/completions", conversation(max_tokens=2)).status == 200

    write()
    until(lambda: (ask("GET", "/status").json["mesh"]["last"] or {}).get("ttft_s") is not None)
    before = ask("GET", "/status").json["mesh"]["last"]
    recorder.reply_started()  # another client's, which lasts longer
    write()
    until(lambda: ask("GET", "/status").json["requests"]["running"] == 0)
    recorder.reply_finished(Summary())
    assert ask("GET", "/status").json["mesh"]["last"] == before
    write()
    until(lambda: ask("GET", "/status").json["mesh"]["last"] != before)


def test_the_page_draws_both(server: HttpServer, page: Page) -> None:
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready", timeout=60_000)
    expect(page.locator("#plan-advice")).to_contain_text("Planned: first token after")
    for number in (1, 2):
        talk(page, QUESTION, number)
        expect(page.locator("#plan-title")).to_have_text("Mesh: the last reply")
        page.locator("#gantt").scroll_into_view_if_needed()
    expect(page.locator("#plan-advice")).to_contain_text("the plan is in brackets")
    lanes = page.locator("#gantt svg text").all_text_contents()
    assert [lanes.count("plan"), lanes.count("run")] == [2, 2]
    kinds = page.locator("#gantt rect").evaluate_all("all => all.map(one => one.getAttribute('class'))")
    assert kinds.count("compute") >= 5  # two devices, planned and measured, and the legend
    expect(page.locator("#gantt p.small")).to_have_count(2)
    expect(page.locator("#devices")).to_contain_text("holds layers")
    page.set_viewport_size(SIZES["narrow"])
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["narrow"]["width"]
