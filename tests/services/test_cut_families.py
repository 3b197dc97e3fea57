"""Models of further families over workers and real sockets: the text is the whole model's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Model, ModelFile
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.messages import StageSpec
from edgellm.mesh.verifier import MeshVerifier
from edgellm.mesh.weight_cache import WeightCache
from edgellm.services.client.link import Endpoint
from edgellm.services.client.stage_client import RemoteDevice
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.protocols import GenerationState, Session
from edgellm.spec.types import Chunk
from edgellm.storage import fingerprint
from testkit.gguf.architectures import WINDOW
from tests.conftest import Architectures
from tests.engine.logits import some_ids
from tests.mesh.household import Whole
from tests.services.conftest import ANYWHERE

PROMPT = some_ids(2 * WINDOW + 9, 2000, 5)
TOKENS = 24


def stage_spec(path: Path) -> StageSpec:
    with Model.load(path) as model:
        n, embd, vocab = model.n_layer, model.n_embd, model.n_vocab
    return StageSpec(fingerprint(path), path.stem, LayerRange(0, n), n, embd, vocab, 256, 2)


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
    work, whole, told = stage_spec(path), Whole(path), list[str]()
    own = whole.text(PROMPT, TOKENS)
    whole.close()
    with ExitStack() as running:
        file, places = ModelFile.open(path), []
        for device in "abc":
            server = WorkerServer(WeightCache(WholeModel(file)), ANYWHERE)
            worker = running.enter_context(server)
            places.append((worker, RemoteDevice(Endpoint(device, worker.address))))
        ends = [*cuts[1:], work.n_layers]
        shares = [
            StageShare(device, LayerRange(first, end))
            for device, first, end in zip("abc", cuts, ends, strict=True)
            if first < end
        ]
        mesh = Mesh([device for _, device in places], shares, work, notify=told.append)
        verifier = MeshVerifier(mesh, lambda _token: False, rows=16)
        running.callback(verifier.close)
        session = verifier.open(GenerationState())
        write(session, own, 0, TOKENS // 2)
        places[0][0].stop()
        write(session, own, TOKENS // 2, TOKENS)
        assert "a" not in [share.name for share in mesh.shares]
        assert mesh.recoveries == 1


def test_workers_tell_where_stages_of_a_whole_model_may_begin(architectures: Architectures) -> None:
    for name, begins, ends in (
        ("smollm3 of 8 layers", frozenset({0, 4}), frozenset({3, 7})),
        ("cohere2", frozenset({0, 1, 2}), frozenset({0, 1, 3})),
        ("gemma3", None, None),
    ):
        file = ModelFile.open(architectures(name))
        with WorkerServer(WeightCache(WholeModel(file)), ANYWHERE) as worker:
            able = RemoteDevice(Endpoint("a", worker.address)).describe(fingerprint(file.path)).layers
            assert (able.begins, able.ends) == (begins, ends)
