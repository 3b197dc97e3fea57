"""A model that cannot be cut, over two paired workers by llama.cpp's RPC: its text, and what happens when one is
lost."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Ids, Model, ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.errors import DeviceLost, InvalidOption, MeshBroken, PlanImpossible, VerifierBusy
from edgellm.layer_range import StageShare, read_split
from edgellm.llm import LLM
from edgellm.llm.model_loading import EngineConfig
from edgellm.mesh.layer_sources import SeveralSources
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
from edgellm.rpc.link import Endpoint
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc_engine.model import Planner, RpcModel, RpcVerifier, RpcWork
from edgellm.rpc_engine.opening import open_over_rpc
from edgellm.rpc_engine.service import RpcEngineService
from edgellm.rpc_engine.session import RpcPort
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk, Source
from tests.conftest import Architectures
from tests.decodes import greedy
from tests.engine.logits import some_ids
from tests.rpc.strangers import befriend, device
from tests.rpc_engine.processes import model_processes, rpc_servers
from tests.services.conftest import ANYWHERE
from tests.waiting import until

pytestmark = pytest.mark.rpc

PROMPT = some_ids(40, 2000, 5)
TOKENS = 24
QUESTION = "Where is my mug?"
NOTHING = Chunk()
SPLIT = read_split("here:1,a:2-3,b:4")


@pytest.fixture(scope="module")
def hybrid(architectures: Architectures) -> ModelFile:
    """Its recurrent layers cannot be cut apart from the others."""
    return ModelFile.open(architectures("lfm2"))


@pytest.fixture(scope="module")
def alone(hybrid: ModelFile) -> list[int]:
    with Model.load(hybrid) as model, Context(model, ContextSpec(n_ctx=256, threads=1)) as context:
        return greedy(context, PROMPT, TOKENS)


@pytest.fixture(scope="module")
def trusts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trust, Trust]:
    """A device that serves, and one that may have it compute."""
    folder = tmp_path_factory.mktemp("trust")
    host, guest = device(folder / "host"), device(folder / "guest")
    befriend(host, guest, "compute")
    return host, guest


@pytest.fixture(scope="module")
def workers(trusts: tuple[Trust, Trust], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Endpoint]]:
    """Two workers in this process, as their clients see them: their servers are processes of their own."""
    host, guest = trusts
    with ExitStack() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGELLM_HOME", str(tmp_path_factory.mktemp("home")))
        found = []
        for name in ("a", "b"):
            cache = WeightCache(SeveralSources(), unit=ComputeUnit(Hardware(threads=1)), memory=2**30)
            server = running.enter_context(WorkerServer(cache, ANYWHERE, trust=host, more=(RpcEngineService,)))
            found.append(Endpoint(name, server.address, guest, host.identity.id))
        yield found


def planned(first: Sequence[StageShare], then: str = "here:1-4") -> Planner:
    """Returns the first shares as long as all of their devices are there."""
    names = {share.name for share in first} - {"here"}
    return lambda left: tuple(first) if names.issubset(left) else read_split(then)


class Opened:
    """A model over the workers, and what has been said of it."""

    def __init__(self, file: ModelFile, workers: Sequence[Endpoint], plan: Planner, sessions: int = 1) -> None:
        self.told: list[str] = []
        self.loaded: list[float] = []
        context = ContextSpec(256, sessions, unified=sessions == 1, rolls_back=True)
        self.model = RpcModel(RpcWork(file, context, ComputeUnit(Hardware(threads=1))), workers, plan, self.told.append)
        self.model.open(self.loaded.append)
        self.verifier = RpcVerifier(self.model, lambda _token: False, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.verifier.close()

    def write(self, n: int, at: Callable[[int], None] = lambda _n: None) -> list[int]:
        """`n` tokens, asked for again while the model is away; `at` is called with the number of each."""
        session, text = self.verifier.open(GenerationState()), PROMPT
        for number in range(n):
            at(number)
            text = np.append(text, self.next(session.submit, text)).astype(np.int32)
        session.close()
        return text[len(PROMPT) :].tolist()

    def next(self, submit: Callable[[Ids, Chunk], object], text: Ids) -> int:
        while True:
            try:
                return int(submit(text, NOTHING).result().tokens[0])  # type: ignore[attr-defined]
            except VerifierBusy:
                until(lambda: self.model.ready)


def test_its_text_is_that_of_the_model_alone_also_with_drafts(
    hybrid: ModelFile, workers: list[Endpoint], alone: list[int]
) -> None:
    with Opened(hybrid, workers, planned(SPLIT)) as opened:
        assert opened.loaded == sorted(opened.loaded)
        assert opened.loaded[0] < 0.5 < opened.loaded[-1] <= 1.0  # it says how much is loaded, while it is
        assert len(rpc_servers()) == 2
        assert opened.write(TOKENS) == alone
        session, text = opened.verifier.open(GenerationState()), PROMPT
        while len(text) < len(PROMPT) + TOKENS - 5:
            rest = alone[len(text) - len(PROMPT) :]
            draft = np.array([*rest[:3], (rest[3] + 1) % 2000], np.int32)  # the fourth is wrong
            found = session.submit(text, Chunk(draft, np.ones(4, np.float32))).result()
            assert found.accepted == 3
            text = np.concatenate((text, draft[:3], found.tokens)).astype(np.int32)
        assert text[len(PROMPT) :].tolist() == alone[: len(text) - len(PROMPT)]
    until(lambda: not rpc_servers())


@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.nightly), 9], ids=["prompt", "reply"])
def test_a_peer_that_is_killed_ends_its_client_and_the_text_goes_on(
    hybrid: ModelFile, workers: list[Endpoint], alone: list[int], after: int
) -> None:
    with Opened(hybrid, workers, planned(SPLIT, "here:1-2,b:3-4"), sessions=2) as opened:

        def kill(number: int) -> None:
            if number == after:
                rpc_servers()[0].kill()

        assert opened.write(TOKENS, kill) == alone
        assert [share.name for share in opened.model.shares] == ["here", "b"]
        (told,) = opened.told
        assert "A device was lost (" in told
        assert "here 1-2, b 3-4" in told


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers may be silent for some seconds only."""
    monkeypatch.setattr("edgellm.rpc_engine.model.LEAST_SILENCE", 4.0)
    monkeypatch.setattr("edgellm.spec.verification.VerdictDeadline.first_seconds", 4.0)


def within(work: Callable[[], list[int]]) -> list[int]:
    """What is written, unless that takes forever: then what hangs is ended."""
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(work)
        try:
            return writing.result(120)
        except TimeoutError:
            for server in rpc_servers():
                server.kill()
            raise


@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_mid_reply_is_given_up_as_if_it_had_died(
    hybrid: ModelFile, workers: list[Endpoint], alone: list[int]
) -> None:
    def plan(names: Collection[str]) -> Sequence[StageShare]:
        return SPLIT if len(names) == 2 else read_split(f"here:1-2,{next(iter(names))}:3-4")

    with Opened(hybrid, workers, plan) as opened:

        def stop(number: int) -> None:
            if number == 9:
                rpc_servers()[0].suspend()  # of either worker

        assert within(lambda: opened.write(TOKENS, stop)) == alone
        (told,) = opened.told
        hung, left = ("a", "b") if "on a hangs" in told else ("b", "a")
        assert f"({hung}: The RPC server on {hung} hangs: no answer for" in told
        assert "restart edgellm there" in told
        assert f"here 1-2, {left} 3-4" in told
    until(lambda: not rpc_servers())


@pytest.mark.usefixtures("impatient")
def test_a_model_process_that_hangs_is_started_again_and_no_device_is_blamed(
    hybrid: ModelFile, workers: list[Endpoint], alone: list[int]
) -> None:
    with Opened(hybrid, workers, planned(SPLIT)) as opened:

        def stop(number: int) -> None:
            if number == 9:
                model_processes()[0].suspend()

        assert within(lambda: opened.write(TOKENS, stop)) == alone
        assert [share.name for share in opened.model.shares] == ["here", "a", "b"]
        (told,) = opened.told
        assert "The process that held the model has ended." in told


def test_a_server_that_hangs_while_the_model_is_loaded_ends_that(
    hybrid: ModelFile, workers: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.rpc_engine.model.LOAD_SILENCE", 3.0)
    opening = RpcPort.open

    def open_and_stop(session: RpcPort, process: int) -> int:
        port = opening(session, process)
        rpc_servers()[0].suspend()
        return port

    def load() -> list[int]:
        with pytest.raises(DeviceLost, match="The RPC server on a hangs"):
            Opened(hybrid, workers, lambda _names: read_split("here:1,a:2-4"))
        return []

    monkeypatch.setattr(RpcPort, "open", open_and_stop)
    assert within(load) == []
    until(lambda: not rpc_servers())


def test_where_the_rest_cannot_hold_it_it_says_so_and_comes_back_with_the_device(
    hybrid: ModelFile, workers: list[Endpoint], alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.rpc_engine.model._RETRY_SECONDS", 0.05)
    impossible = [False]

    def plan(names: object) -> Sequence[StageShare]:
        if impossible[0]:
            raise PlanImpossible("The rest is too small.", "Reconnect it.")
        return SPLIT

    with Opened(hybrid, workers, plan) as opened:
        assert opened.write(3) == alone[:3]
        impossible[0] = True
        rpc_servers()[0].kill()
        session = opened.verifier.open(GenerationState())
        until(lambda: not opened.model.ready)

        def broken() -> bool:
            try:
                session.submit(PROMPT, NOTHING).result()
            except MeshBroken as error:
                return "The rest is too small." in error.what
            except VerifierBusy:
                return False
            return False

        until(broken)
        impossible[0] = False
        until(lambda: opened.model.ready)
        assert opened.write(3) == alone[:3]


def test_layers_that_llama_cpp_cannot_lay_out_like_that_are_refused(hybrid: ModelFile, workers: list[Endpoint]) -> None:
    with pytest.raises(InvalidOption, match="only have the first ones"):
        Opened(hybrid, workers, lambda _names: read_split("a:1,here:2-4"))
    with pytest.raises(PlanImpossible, match="ends with layer 3"):
        Opened(hybrid, workers, lambda _names: read_split("here:1,a:2-3"))


def test_a_pair_writes_what_its_model_writes_and_goes_on_when_a_device_is_lost(architectures: Architectures) -> None:
    """Over two workers of this machine, which need not be paired."""
    path, hardware, peers = architectures("qwen35"), Hardware(threads=1, n_ctx=512), list[str]()
    with LLM.open(None, path, hardware=hardware, history=False) as alone:
        expected = [token.id for token in alone.reply(QUESTION, max_tokens=40)]
    with ExitStack() as running:
        for name in "ab":
            cache = WeightCache(SeveralSources(), unit=ComputeUnit(Hardware(threads=1)), memory=2**30)
            server = running.enter_context(WorkerServer(cache, ANYWHERE, more=(RpcEngineService,)))
            peers.append(f"{name}={server.address}")
        config = EngineConfig(architectures("qwen35", 0.12), hardware=hardware, peers=peers, history=False)
        opened = running.enter_context(open_over_rpc(ModelFile.open(path), "here:1,a:2-3,b:4", config))
        reply = opened.reply(QUESTION, max_tokens=40)
        assert [token.id for token in reply] == expected
        assert reply.summary.accepted > 0

        told: list[str] = []
        broken = opened.reply(QUESTION, max_tokens=40, retrieval="off")
        broken.listen(on_notice=lambda notice: told.append(notice.text))
        written = []
        for token in broken:
            written.append(token)
            if len(written) == 8:
                rpc_servers()[0].kill()
    assert [token.id for token in written[:8]] == expected[:8]
    assert any(token.source is Source.DRAFT for token in written[8:])
    assert any("The draft model continues alone, unverified" in text for text in told)
