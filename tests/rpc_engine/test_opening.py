"""Replies from a pair whose verifier is over llama.cpp's RPC, and which engine a model gets."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgellm.engine import ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.errors import EngineFailed, ModelUnsupported
from edgellm.llm import LLM
from edgellm.llm.mesh_llm import MeshOptions, choose_engine
from edgellm.llm.model_loading import EngineConfig
from edgellm.mesh.layer_sources import SeveralSources
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc_engine import backend
from edgellm.rpc_engine.opening import open_over_rpc
from edgellm.rpc_engine.service import RpcEngineService
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.types import Source
from tests.conftest import Architectures, Heads
from tests.rpc_engine.processes import rpc_servers

QUESTION = "Where is my mug?"
TOKENS = 40


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[str, ...]]:
    """Two workers of this machine."""
    with ExitStack() as running:
        found = []
        for name in "ab":
            cache = WeightCache(SeveralSources(), unit=ComputeUnit(Hardware(threads=1)), memory=2**30)
            server = running.enter_context(WorkerServer(cache, Address.parse("127.0.0.1:0"), more=(RpcEngineService,)))
            found.append(f"{name}={server.address}")
        yield tuple(found)


@pytest.fixture(scope="module")
def hybrid(architectures: Architectures) -> Path:
    return architectures("qwen35")


@pytest.fixture
def opened(peers: tuple[str, ...], hybrid: Path, architectures: Architectures) -> Iterator[LLM]:
    with open_over_rpc(
        ModelFile.open(hybrid), "here:1,a:2-3,b:4", MeshOptions(peers),
        EngineConfig(architectures("qwen35", 0.12), hardware=Hardware(threads=1, n_ctx=512), history=False),
    ) as found:  # fmt: skip
        yield found


@pytest.mark.rpc
def test_a_pair_writes_what_its_model_writes_alone_and_goes_on_when_a_device_is_lost(opened: LLM, hybrid: Path) -> None:
    with LLM.open(None, hybrid, threads=1, n_ctx=512, history=False) as alone:
        expected = [token.id for token in alone.reply(QUESTION, max_tokens=TOKENS)]
    reply = opened.reply(QUESTION, max_tokens=TOKENS)
    assert [token.id for token in reply] == expected
    assert reply.summary.accepted > 0

    told: list[str] = []
    broken = opened.reply(QUESTION, max_tokens=TOKENS, retrieval="off")
    broken.listen(on_notice=lambda notice: told.append(notice.text))
    written = []
    for token in broken:
        written.append(token)
        if len(written) == 8:
            rpc_servers()[0].kill()
    assert [token.id for token in written[:8]] == expected[:8]
    assert any(token.source is Source.DRAFT for token in written[8:])
    assert any("The draft model continues alone, unverified" in text for text in told)


@pytest.mark.rpc
@pytest.mark.nightly
def test_an_eagle3_head_is_refused(peers: tuple[str, ...], architectures: Architectures, heads: Heads) -> None:
    with pytest.raises(ModelUnsupported, match="in one process and on no mesh"):
        open_over_rpc(
            ModelFile.open(architectures("qwen3")), "a:1-2,b:3-4", MeshOptions(peers), EngineConfig(heads("qwen3"))
        )


def test_stages_for_what_they_can_cut_and_rpc_for_the_rest(
    architectures: Architectures, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, uncut = ModelFile.open(architectures("llama")), ModelFile.open(hybrid)
    monkeypatch.setattr(backend, "is_compiled_in", lambda: True)
    assert (choose_engine(plain).engine, choose_engine(uncut).engine) == ("stages", "rpc")
    assert "recurrent state cannot be rolled back" in choose_engine(uncut).reason
    assert choose_engine(plain, "rpc").over_rpc
    assert not choose_engine(uncut, "stages").over_rpc
    monkeypatch.setattr(backend, "is_compiled_in", lambda: False)
    assert choose_engine(plain).engine == "stages"
    with pytest.raises(ModelUnsupported, match="RPC"):
        choose_engine(uncut)
    with pytest.raises(EngineFailed, match="RPC"):
        choose_engine(plain, "rpc")
