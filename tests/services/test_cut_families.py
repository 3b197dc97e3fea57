"""Models of further families over workers and real sockets: the text is the whole model's."""

from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.errors import ModelNotFound
from edgellm.layer_range import LayerRange, StageShare
from edgellm.llm import LLM
from edgellm.llm.mesh_llm import Workload, open_mesh, place_described
from edgellm.llm.mesh_timeline import MeshRecorder
from edgellm.llm.model_loading import EngineConfig
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.fleet_file import read_fleet
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
from edgellm.rpc.link import Endpoint
from edgellm.services.client.stage_client import RemoteDevice
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import Session
from edgellm.spec.types import Chunk
from edgellm.storage.layer_store import LayerStore
from edgellm.storage.model_files import SMOLLM2, resolve
from testkit.gguf.architectures import WINDOW
from tests.conftest import Architectures
from tests.engine.logits import some_ids
from tests.mesh.household import Whole, stage_spec
from tests.services.conftest import ANYWHERE
from tests.services.meshing import replying
from tests.spec.real import ids
from tests.waiting import until

PROMPT = some_ids(2 * WINDOW + 9, 2000, 5)
TOKENS = 24


def write(session: Session, own: list[int], at: int, stop: int) -> None:
    """Have tokens verified in chunks, of which one is wrong: it is rolled back, on every device."""
    while at < stop:
        draft = [*own[at : at + 2], (own[min(at + 2, TOKENS - 1)] + 1) % 2000, own[at]][:4]
        text = np.concatenate([PROMPT, own[:at]]).astype(np.int32)
        verdict = session.submit(text, Chunk(np.array(draft, dtype=np.int32))).result()
        tokens = [*draft[: verdict.accepted], *verdict.tokens.tolist()]
        assert tokens == own[at : at + len(tokens)]
        assert len(tokens) == min(3, TOKENS - at)
        at += len(tokens)


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("gemma3", (0, 1, 5)),  # within the period of its windows, and a stage of a full layer alone
        ("gpt-oss", (0, 1, 2)),
        ("smollm3 of 8 layers", (0, 4, 8)),
        ("qwen3vl", (0, 2, 3)),
        ("gemma", (0, 1, 2)),
    ],
)
def test_a_reply_is_the_whole_models_also_when_a_worker_is_lost(
    architectures: Architectures, name: str, cuts: tuple[int, ...]
) -> None:
    path = architectures(name)
    work, whole = stage_spec(path), Whole(path)
    own = whole.text(PROMPT, TOKENS)
    whole.close()
    with ExitStack() as running:
        source = WholeModel(ModelFile.open(path))
        workers = [running.enter_context(WorkerServer(WeightCache(source), ANYWHERE)) for _ in "abc"]
        devices = [RemoteDevice(Endpoint(name, one.address)) for name, one in zip("abc", workers, strict=True)]
        ranges = [LayerRange(*pair) for pair in pairwise([*cuts, work.n_layers])]
        shares = [StageShare(name, layers) for name, layers in zip("abc", ranges, strict=True) if len(layers)]
        mesh, session = running.enter_context(replying(devices, work, shares=shares))
        write(session, own, 0, TOKENS // 2)
        workers[0].stop()
        write(session, own, TOKENS // 2, TOKENS)
        assert "a" not in [share.name for share in mesh.shares]
        assert mesh.recoveries == 1


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


def _settle(mesh: Mesh, first: object) -> None:
    """Wait until the next pipeline has loaded and read what it was given, or has taken over from the `first` shares."""
    until(lambda: mesh.shares != first or ((coming := mesh.coming()) is not None and not coming.busy))


def test_the_laptop_takes_over_behind_the_reply(verifier_path: Path, tmp_path: Path) -> None:
    home = tmp_path / "home.toml"
    home.write_text(SLOW + SLOW.replace('"here"', '"laptop"'), encoding="utf-8")
    file, words = ModelFile.open(verifier_path), ReplyOptions(max_tokens=60, retrieval="off")
    with LLM.open(verifier_path) as whole:
        expected = [token.id for token in whole.reply(QUESTION, words)]
    weights = WeightCache(WholeModel(file, LayerStore(tmp_path / "layers", 10**9)))
    with WorkerServer(weights, ANYWHERE) as worker:
        placed = place_described(file, read_fleet(home), Workload(20, 2000))
        with open_mesh(file, placed, EngineConfig(None, peers=[f"laptop={worker.address}"])) as opened:
            assert opened.phases is not None
            mesh, recorder, written = opened.verifier.mesh, MeshRecorder(opened), list[int]()
            first, following = placed.shares, opened.phases.following
            assert len(first) == 2
            assert mesh.shares == first
            recorder.reply_started()
            reply = opened.pair.reply(QUESTION, words)
            for token in reply:
                written.append(token.id)
                if len(written) in (2, 4):
                    _settle(mesh, first)
            assert written == expected
            assert mesh.shares == following
            numbers = recorder.reply_finished(reply.summary)
    assert numbers is not None
    (move,) = numbers["moves"]
    assert move["stages"] == [share.to_json() for share in following]
    assert 2 < move["after_token"] <= 6
    assert 0.0 < move["loaded_s"] <= move["ready_s"] <= move["at_s"]
    assert numbers["planned_reply_s"] > numbers["planned_ttft_s"]


try:  # before the tests have a home of their own
    MODEL: Path | None = resolve(SMOLLM2.verifier)
except ModelNotFound:
    MODEL = None

LONG = "Summarise this in one sentence. " + " ".join(
    f"On day {day} it rained for {day % 7} hours." for day in range(70)
)


@pytest.mark.nightly
@pytest.mark.skipif(MODEL is None, reason="the model is not downloaded")
@pytest.mark.parametrize(
    ("split", "reproducible"),
    [("{}:1-15,{}:16-30", False), ("here:1-5,{}:6-20,{}:21-30", False), ("{}:1-15,{}:16-30", True)],
)
def test_a_reply_is_the_models_own_wherever_it_is_cut(split: str, reproducible: bool, tmp_path: Path) -> None:
    """Small pieces of a model are computed as the whole is, and activations travel in full. If it is reproducible, also
    where rows of copies are computed with others."""
    assert MODEL is not None
    file, unit = ModelFile.open(MODEL), ComputeUnit(Hardware(threads=1, reproducible=reproducible))
    with ExitStack() as running:
        addresses = [
            running.enter_context(WorkerServer(WeightCache(WholeModel(file, store), unit=unit), ANYWHERE)).address
            for store in (LayerStore(tmp_path / name, 10**9) for name in "ab")
        ]
        config = EngineConfig("none", hardware=unit.hardware)
        mesh = running.enter_context(open_mesh(file, split.format(*addresses), config=config)).pair
        alone = running.enter_context(LLM.open("none", MODEL, hardware=unit.hardware))
        asked = ReplyOptions(max_tokens=48, temperature=0.0, retrieval="off")
        for question in ("Why is the sky blue?", LONG):
            copies = "auto" if reproducible else "off"
            assert ids(mesh.reply(question, asked, retrieval=copies)) == ids(alone.reply(question, asked)), question
