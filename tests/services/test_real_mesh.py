"""A mesh of real weights, which `./start` downloads: it writes the model's own text."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from edgellm.engine import ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.errors import ModelNotFound
from edgellm.llm import LLM
from edgellm.llm.mesh_llm import MeshOptions, open_mesh
from edgellm.llm.model_loading import EngineConfig
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.params import ReplyOptions
from edgellm.storage import resolve
from edgellm.storage.layer_store import LayerStore
from edgellm.storage.model_files import SMOLLM2
from tests.services.conftest import ANYWHERE
from tests.spec.real import ids

try:  # before the tests have a home of their own
    MODEL = resolve(SMOLLM2.verifier)
except ModelNotFound as missing:
    pytest.skip(str(missing), allow_module_level=True)

LONG = "Summarise this in one sentence. " + " ".join(
    f"On day {day} it rained for {day % 7} hours." for day in range(70)
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("split", "reproducible"),
    [("{}:1-15,{}:16-30", False), ("here:1-5,{}:6-20,{}:21-30", False), ("{}:1-15,{}:16-30", True)],
)
def test_a_reply_is_the_models_own_wherever_it_is_cut(split: str, reproducible: bool, tmp_path: Path) -> None:
    """Small pieces of a model are computed as the whole is, and activations travel in full. If it is reproducible, also
    where rows of copies are computed with others."""
    file, unit = ModelFile.open(MODEL), ComputeUnit(Hardware(threads=1, reproducible=reproducible))
    with ExitStack() as running:
        addresses = [
            running.enter_context(WorkerServer(WeightCache(WholeModel(file, store), unit=unit), ANYWHERE)).address
            for store in (LayerStore(tmp_path / name, 10**9) for name in "ab")
        ]
        config, options = EngineConfig("none", hardware=unit.hardware), MeshOptions(split.format(*addresses))
        mesh = running.enter_context(open_mesh(file, options, config)).pair
        alone = running.enter_context(LLM.open("none", MODEL, hardware=unit.hardware))
        asked = ReplyOptions(max_tokens=48, temperature=0.0, retrieval="off")
        for question in ("Why is the sky blue?", LONG):
            copies = "auto" if reproducible else "off"
            assert ids(mesh.reply(question, asked, retrieval=copies)) == ids(alone.reply(question, asked)), question
