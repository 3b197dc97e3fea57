"""`mesh run`, `chat --mesh` and `serve --role worker`: as a user would."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgellm.mesh.holding import WholeModel
from edgellm.mesh.shelf import Shelf
from edgellm.serve.worker import WorkerServer
from tests.cli.conftest import Done
from tests.cli.test_serve_command import Served
from tests.mesh.test_fleet import DESKTOP, LAPTOP
from tests.serve.conftest import ANYWHERE

Edge = Callable[..., Done]
QUESTION = "Where is my mug?"


@pytest.fixture
def worker(verifier_path: Path, tmp_path: Path) -> Iterator[WorkerServer]:
    shelf = Shelf(WholeModel(verifier_path, tmp_path / "layers"))
    with WorkerServer(shelf, ANYWHERE, threads=1) as running:
        yield running


def run(edge: Edge, worker: WorkerServer, *more: str) -> Done:
    split = f"here:1-5,{worker.address}:6-12"
    return edge("mesh", "run", "edgellm-verifier", QUESTION, "--split", split, "--max-tokens", "12", *more)


def test_a_reply_over_two_devices_is_that_of_one(edge: Edge, worker: WorkerServer) -> None:
    alone = edge("chat", QUESTION, "--draft", "none", "--max-tokens", "12")
    done = run(edge, worker, "--f32", "--explain")
    assert (done.code, done.out) == (0, alone.out)
    assert "no device is described" in done.err
    lines = done.err.splitlines()
    assert any(re.match(r"here +1-5 ", line) for line in lines)
    assert any(line.startswith("first token") for line in lines)
    assert any(line.startswith(str(worker.address)) and "run " in line and "█" in line for line in lines)


def test_the_stages_as_json_with_drafts_in_blocks(edge: Edge, worker: WorkerServer) -> None:
    done = run(edge, worker, "--json", "--draft", "edgellm-draft")
    assert done.code == 0
    *tokens, summary, mesh = done.lines
    alone = edge("chat", QUESTION, "--json", "--max-tokens", "12").lines
    assert [row["id"] for row in tokens] == [row["id"] for row in alone[:-1]]
    assert summary["summary"]["verifier_passes_per_token"] < 1.0
    stages = mesh["mesh"]["stages"]
    assert [(one["first_layer"], one["last_layer"]) for one in stages] == [(1, 5), (6, 12)]
    for one in stages:
        measured = one["measured"]
        assert 0.0 < measured["load_s"] <= measured["finish_s"] <= mesh["mesh"]["ttft_s"]
        assert one["planned"] is None


def test_a_plan_is_shown_beside_what_was_measured(edge: Edge, worker: WorkerServer, tmp_path: Path) -> None:
    home = tmp_path / "home.toml"
    home.write_text((DESKTOP + LAPTOP).replace('"desktop"', '"here"'), encoding="utf-8")
    words = ("mesh", "run", "edgellm-verifier", QUESTION, "--devices", str(home), "--max-tokens", "6")
    done = edge(*words, "--peer", f"laptop={worker.address}")
    assert done.code == 0
    assert "measured (planned)" in done.err
    assert "plan  " in done.err


def test_a_conversation_over_devices(edge: Edge, worker: WorkerServer) -> None:
    words = ("chat", QUESTION, "--max-tokens", "12")
    done = edge(*words, "--mesh", f"{worker.address}:1-12")
    assert (done.code, done.out) == (0, edge(*words).out)
    assert "first token" in done.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--split", "here:1-6"), 1, "ends with layer 6, and the model has 12"),
        (("--split", "here:1-6,nobody"), 2, "'nobody' is no part of a split"),
        (("--split", "here:6-1"), 2, "layers that do not exist"),
        (("--split", "here:1-12", "--devices", "x.toml"), 2, "Both --split and --devices"),
        ((), 2, "Nothing says which device"),
        (("--split", "here:1-12", "--peer", "somewhere"), 2, "is not an address"),
    ],
)
def test_what_cannot_be_run(edge: Edge, words: tuple[str, ...], code: int, says: str) -> None:
    done = edge("mesh", "run", "edgellm-verifier", QUESTION, *words)
    assert (done.code, done.out) == (code, "")
    assert says in done.err


def test_where_nobody_is_left_it_says_so(edge: Edge, tmp_path: Path) -> None:
    done = edge("mesh", "run", "edgellm-verifier", QUESTION, "--split", "127.0.0.1:9:1-12", "--max-tokens", "3")
    assert done.code == 0  # this device holds the model, too
    assert "A device is lost" in done.err


def test_a_worker_that_is_served_by_the_command(edge: Edge) -> None:
    served = Served("--role", "worker", "-m", "edgellm-verifier")
    try:
        done = edge(
            "mesh", "run", "edgellm-verifier", QUESTION, "--split", f"{served.address}:1-12", "--max-tokens", "5"
        )
        assert done.code == 0
        served.wait_for("Done with layers 1-12")
        served.process.send_signal(signal.SIGTERM)
        assert served.end() == (0, "")
        said = "".join(served.said)
        assert "has stopped" in said
        assert "mug" not in said
        assert "Traceback" not in said
    finally:
        served.close()
