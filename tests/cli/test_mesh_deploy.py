"""`mesh peers`, `plan` over measured devices, `deploy` and `layers`, as a user has them with two workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgellm.mesh import deploy as deploying
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.servers import WorkerServer
from edgellm.storage.layers.store import LayerStore
from tests.cli.conftest import Done
from tests.rpc.strangers import befriend, device

Edge = Callable[..., Done]
MODEL = "edgellm-verifier"


@pytest.fixture(autouse=True)
def _quick(quick_figures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploying, "FIRST_PAUSE", 0.01)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[dict[str, LayerStore]]:
    """Of two workers that this user is paired with."""
    owner = Trust.load()
    stores = {}
    with ExitStack() as running:
        for name in ("desk", "phone"):
            trust = device(tmp_path / name)
            befriend(trust, owner, "files compute")
            owner.peers.rename(trust.identity.id, name)
            stores[name] = LayerStore(tmp_path / name / "layers", 10**9)
            stored = StoredLayers(stores[name])
            worker = WorkerServer(WeightCache(stored), Address("127.0.0.1", 0), trust=trust, stored=stored)
            owner.peers.record_seen(trust.identity.id, running.enter_context(worker).address)
        yield stores


def test_layers_are_deployed_listed_and_removed(
    edge: Edge, stores: dict[str, LayerStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.storage.layers.manifest.PIECE_BYTES", 1)  # each layer alone, as those of a large model
    done = edge("mesh", "deploy", MODEL, "--split", "here:1-2,desk:3-8,phone:9-12")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["here", "1-2"], ["desk", "3-8"], ["phone", "9-12"]]
    assert all(line.rstrip().endswith("complete") for line in lines[1:])
    rows = edge("mesh", "deploy", MODEL, "--split", "desk:1-8,phone:9-12", "--json").answer
    assert [row["sent"] > 0 for row in rows] == [True, False]
    assert rows[0]["already"] + rows[0]["sent"] == rows[0]["bytes"]
    assert rows[1] == rows[1] | {"first_layer": 9, "last_layer": 12, "attempts": 1, "error": None}

    listed = edge("mesh", "layers", "--json").answer
    assert {row["device"]: row["layers"] for row in listed} == {"here": "1-2", "desk": "1-8", "phone": "9-12"}
    shown = edge("mesh", "layers", "--on", "desk")
    assert "1-8 of 12" in shown.out
    assert "desk:" in shown.err
    assert "of 1.0 GB" in shown.err
    refused = edge("mesh", "layers", "clean", "--on", "desk")
    assert (refused.code, "Add --yes" in refused.err) == (2, True)
    gone = edge("mesh", "layers", "clean", "--on", "desk", "--model", MODEL, "--yes", "--json").answer
    assert (gone["pieces"], gone["in_use"]) == (8, 0)
    assert stores["desk"].size == 0
    assert "0 B" in edge("mesh", "layers", "clean", "--on", "desk", "-m", MODEL, "--yes").err
    assert edge("mesh", "layers", "clean", "--on", "here", "-y", "--json").answer["pieces"] == 2
    assert "There are no layers" in edge("mesh", "layers", "--on", "here").err


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
    assert desk["speed"]["tokens"] == [1, 8]
    assert desk["speed"]["disk_mb_s"] > 0
    assert desk["line"]["up_mbps"] > 0
    assert desk["line"]["age_s"] < 60
    shown = edge("mesh", "peers")
    assert shown.code == 0
    assert "GFLOP/s" in shown.out
    assert "just now" in shown.out
    edge("mesh", "deploy", MODEL, "--split", "desk:1-12")
    assert "edgellm verifier 1-12" in edge("mesh", "peers").out
    again = edge("mesh", "peers", "--measure", MODEL, "--json").answer
    assert {row["speed"]["reason"] for row in again} == {"asked for"}


def test_a_plan_is_deployed_and_then_nothing_is_left_to_move(
    edge: Edge, stores: dict[str, LayerStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This device has no memory to spare, so the plan must split."""
    monkeypatch.setattr("edgellm.mesh.weight_cache.free_memory", lambda: (25_000_000, "a test"))
    edge("mesh", "plan", MODEL)  # both workers measure at once, and keep it in one place, which is this user's
    done = edge("mesh", "deploy", MODEL, "--tokens-in", "16", "--tokens-out", "4", "--json")
    assert done.code == 0, done.err
    assert "Split it over" in done.err
    assert all(row["error"] is None for row in done.answer)
    plan = edge("mesh", "plan", MODEL, "--tokens-in", "16", "--tokens-out", "4", "--json").answer
    names = {row["device"] for row in done.answer}
    assert [one["bytes"] for one in plan["move"] if one["device"] in names] == [0] * len(plan["move"])
    shown = edge("mesh", "plan", MODEL, "--tokens-in", "16", "--tokens-out", "4")
    assert "nothing has to be deployed first" in shown.out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("deploy", MODEL, "--split", "attic:1-12"), 1, "No paired device is called 'attic'"),
        (("deploy", MODEL, "--split", "desk"), 2, "'desk' is not a part of a split"),
        (("deploy", MODEL, "--split", "desk:2-1"), 2, "an invalid range of layers"),
        (("deploy", MODEL, "--split", "desk:0-1"), 2, "an invalid range of layers"),
        (("deploy", MODEL, "--split", "desk:11-13"), 2, "Its layers run from 1 to 12"),
        (("deploy", MODEL, "--split", "desk:1-2,desk:3-4"), 2, "desk is named twice"),
        (("deploy", MODEL, "--split", "192.0.2.1:50151:1-2"), 1, "is not a loopback address"),
        (("deploy", MODEL, "--split", "127.0.0.1:1:1-2"), 1, "connection to 127.0.0.1:1 was lost"),
        (("deploy", "nothing.gguf", "--split", "here:1-2"), 1, "nothing.gguf"),
        (
            ("deploy", MODEL, "--split", "desk:1-12", "--ctx-size", "64"),
            2,
            "--ctx-size is for a plan, and --split says",
        ),
        (("deploy", MODEL, "--batch-size", "8"), 2, "--batch-size does not change which layers a device needs"),
        (("deploy", MODEL, "--cache-type", "draft=f16"), 2, "--cache-type draft=f16 is for a draft model"),
        (("deploy", MODEL, "--ctx-size", "64"), 2, "1152 tokens in all do not fit into a context of 64"),
        (("layers", "clean"), 2, "needs a device"),
        (("layers", "--on", "attic"), 1, "No paired device is called 'attic'"),
    ],
)
def test_what_is_wrong_is_said(
    edge: Edge, stores: dict[str, LayerStore], words: tuple[str, ...], code: int, said: str
) -> None:
    done = edge("mesh", *words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_a_device_that_refuses_is_said_and_the_others_go_on(edge: Edge, stores: dict[str, LayerStore]) -> None:
    stores["desk"].limit = 1000
    done = edge("mesh", "deploy", MODEL, "--split", "desk:1-6,phone:7-12")
    assert done.code == 1
    assert "desk: desk: " not in done.err
    assert "layers 1-6 of edgellm verifier would take" in done.err
    assert "0 B arrived" in done.out
    owner = Trust.load()
    owner.peers.revoke(owner.peers.find("phone").id, [Right.FILES])
    refused = edge("mesh", "deploy", MODEL, "--split", "phone:7-12")
    assert refused.code == 1
    assert "no right to copy models from here" in refused.err
