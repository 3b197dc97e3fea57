"""Models that are split over several files, from the command line: everything is as with the unsplit file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine import ModelFile
from edgellm.storage import fingerprint
from testkit.gguf.split_file import split
from tests.cli.conftest import Done
from tests.cli.test_serve_command import Served

Edge = Callable[..., Done]
QUESTION = "Where is my mug?"
PLAIN = ("--max-tokens", "12", "--retrieval", "off", "--json", "--no-history")


@pytest.fixture(scope="module")
def halves(draft_path: Path, verifier_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundled pair, split: the first parts."""
    folder = tmp_path_factory.mktemp("split")
    return split(draft_path, folder, 2), split(verifier_path, folder, 3)


def ids(done: Done) -> list[int]:
    assert done.code == 0, done.err
    return [line["id"] for line in done.lines if "id" in line]


def test_chat_writes_the_same_with_a_split_pair(edge: Edge, halves: tuple[Path, Path]) -> None:
    draft, verifier = map(str, halves)
    alone = ids(edge("chat", QUESTION, "--draft", "none", *PLAIN))
    assert ids(edge("chat", QUESTION, "--draft", "none", "--verifier", verifier, *PLAIN)) == alone
    pair = ids(edge("chat", QUESTION, "--gate", "always", *PLAIN))
    assert ids(edge("chat", QUESTION, "--gate", "always", "--draft", draft, "--verifier", verifier, *PLAIN)) == pair


def test_show_counts_all_parts(edge: Edge, halves: tuple[Path, Path], verifier_path: Path) -> None:
    paths = ModelFile.open(halves[1]).paths
    whole, facts = edge("show", str(verifier_path), "--json").answer, edge("show", str(halves[1]), "--json").answer
    parts = facts.pop("parts")
    assert [part["sha256"] for part in parts] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert [part["size"] for part in parts] == [path.stat().st_size for path in paths]
    assert facts["size"] == sum(part["size"] for part in parts)
    assert facts["sha256"] == fingerprint(halves[1])
    assert "parts" not in whole
    changed = ("path", "size", "sha256", "abilities")  # which models are drafts for it goes by their sizes
    assert {key: facts[key] for key in facts if key not in changed} == {
        key: whole[key] for key in whole if key not in changed
    }
    assert edge("show", str(halves[1])).out.count("-of-00003.gguf") == 4


@pytest.fixture
def worker(halves: tuple[Path, Path]) -> Iterator[Served]:
    """The process of a worker that has the split model."""
    served = Served("--role", "worker", "-m", str(halves[1]))
    yield served
    served.close()


MESH = ("--max-tokens", "12", "--f32", "--json", "--retrieval", "off")


@pytest.mark.usefixtures("quick_figures")
def test_a_mesh_over_a_split_model_writes_the_same(edge: Edge, halves: tuple[Path, Path], worker: Served) -> None:
    alone = ids(edge("mesh", "run", "edgellm-verifier", QUESTION, "--split", "here:1-12", *MESH))
    over = f"here:1-5,{worker.address}:6-12"
    assert ids(edge("mesh", "run", str(halves[1]), QUESTION, "--split", over, *MESH)) == alone
    plan = edge("mesh", "plan", str(halves[1]), "--json").answer
    assert plan["stages"]


def test_layers_of_a_split_model_are_deployed_to_a_worker_and_are_those_of_the_whole(
    edge: Edge, halves: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ids(edge("mesh", "run", "edgellm-verifier", QUESTION, "--split", "here:1-12", *MESH))
    with monkeypatch.context() as there:
        there.setenv("EDGELLM_HOME", str(tmp_path / "there"))
        served = Served("--role", "worker")
    try:
        over = f"here:1-5,{served.address}:6-12"
        rows: list[dict[str, Any]] = edge("mesh", "deploy", str(halves[1]), "--split", over, "--json").answer
        assert [row["error"] for row in rows] == [None, None]
        assert rows[1]["sent"] == rows[1]["bytes"]
        assert ids(edge("mesh", "run", str(halves[1]), QUESTION, "--split", over, *MESH)) == alone
        again = edge("mesh", "deploy", "edgellm-verifier", "--split", over, "--json").answer  # the unsplit file
        assert [row["sent"] for row in again] == [0, 0]
    finally:
        served.close()
