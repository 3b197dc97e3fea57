"""One gateway to servers of two models with different tokenizers: each device gets the text of the model that it
names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from edgellm.engine import Model
from edgellm.errors import InvalidOption, ModelNotFound, VerifierUnreachable, VocabularyMismatch
from edgellm.http.metrics import GatewayCollector
from edgellm.llm import LLM
from edgellm.rpc.address import Address, ModelAddress
from edgellm.services.client.connection import Timing
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.client.verifier_selection import choose_verifier
from edgellm.services.server.gateway_server import GatewayServer
from edgellm.spec.types import Source, Token
from edgellm.upstream.gateway.opening import PoolOpening
from edgellm.upstream.opening import UpstreamOptions
from edgellm.upstream.verifier import UpstreamTiming
from testkit.retokenized import permuted, write
from testkit.upstream.dialects import Dialect, LlamaServer, Vllm
from testkit.upstream.engine import Engine
from testkit.upstream.server import Fault, UpstreamServer
from testkit.upstream.text_dialects import LmStudio
from tests.cli.test_serve_command import Served
from tests.once import once
from tests.rpc.strangers import befriend, device
from tests.spec.real import case, ids
from tests.upstream.conftest import MOST

ANYWHERE = Address("127.0.0.1", 0)
ONE, OTHER = "served/verifier", "served/other"
UNVERIFIED = {Source.DRAFT, Source.PARALLEL}
OPTIONS = UpstreamOptions(timing=UpstreamTiming(least=600.0, retry=0.01, retry_most=0.02))
DEVICE = Timing(least=600.0, silent_beats=2400)
NUMBER = 5


class OtherVllm(Vllm):
    model_name = OTHER


class OtherLlamaServer(LlamaServer):
    model_name = OTHER


class OtherLmStudio(LmStudio):
    model_name = OTHER


class Router(Dialect):
    """A server with two models, which answers by the one that a request names."""

    def __init__(self, *dialects: Dialect) -> None:
        super().__init__(dialects[0].engine)
        self.dialects = {dialect.model_name: dialect for dialect in dialects}

    def get(self, path: str) -> Any:
        found = [dialect.get(path) for dialect in self.dialects.values()]
        return {"data": [one for each in found for one in each["data"]]} if path == "/v1/models" else found[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.dialects[body["model"]].post(path, body)


@pytest.fixture(scope="module")
def other_pair(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The pair with another tokenizer."""

    def made(folder: Path) -> None:
        for source in f32_pair:
            write(source, folder / source.name, permuted)

    folder = once(tmp_path_factory, "other-pair", made)
    return folder / f32_pair[0].name, folder / f32_pair[1].name


@pytest.fixture(scope="module")
def other_engine(other_pair: tuple[Path, Path]) -> Iterator[Engine]:
    with Model.load(other_pair[1]) as model:
        engine = Engine(model)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def drafts(f32_pair: tuple[Path, Path], other_pair: tuple[Path, Path]) -> dict[str, Path]:
    """The draft model, which has the tokenizer, of each served one."""
    return {ONE: f32_pair[0], OTHER: other_pair[0]}


@pytest.fixture(scope="module")
def texts(f32_pair: tuple[Path, Path], other_pair: tuple[Path, Path]) -> dict[str, list[int]]:
    """What each model writes alone."""
    found = {}
    for name, path in ((ONE, f32_pair[1]), (OTHER, other_pair[1])):
        with LLM.open("none", path, threads=1) as alone:
            found[name] = ids(alone.reply(case(NUMBER), max_tokens=MOST))
    return found


@dataclass(frozen=True, slots=True)
class House:
    """Two servers of one model, one of another, a gateway to them, and a device for each model."""

    servers: tuple[UpstreamServer, ...]
    gateway: GatewayServer
    devices: dict[str, LLM]

    def mend(self) -> None:
        """End all faults, and wait until every server is used again."""
        for server in self.servers:
            server.heal()
        while not all(one.up() for backend in self.gateway.backends for one in backend.pool.servers):
            sleep(0.005)


@pytest.fixture(scope="module")
def house(engine: Engine, other_engine: Engine, drafts: dict[str, Path]) -> Iterator[House]:
    with ExitStack() as closing:
        dialects = (Vllm(engine, scores=True, counts=True), OtherLlamaServer(other_engine), Vllm(engine))
        servers = tuple(closing.enter_context(UpstreamServer(dialect)) for dialect in dialects)
        models = PoolOpening(list(drafts.values()), OPTIONS).open([server.url for server in servers])
        gateway = GatewayServer(models, ANYWHERE)
        closing.callback(gateway.close)
        closing.enter_context(gateway)
        devices = {}
        for name, path in drafts.items():
            draft = closing.enter_context(Model.load(path))
            remote = RemoteVerifier(ModelAddress(gateway.address, name), draft.vocabulary, timing=DEVICE)
            closing.callback(remote.close)
            devices[name] = LLM(draft, draft=draft, verifier=remote, model_hash=_hash_of(remote), history=False)
        yield House(servers, gateway, devices)


def _hash_of(remote: RemoteVerifier) -> Any:
    return lambda: remote.model_hash


def written(pair: LLM) -> list[Token]:
    return list(pair.reply(case(NUMBER), max_tokens=MOST, budget=1.0))


def test_each_device_gets_the_text_of_the_model_that_it_names(house: House, texts: dict[str, list[int]]) -> None:
    assert texts[ONE] != texts[OTHER]  # ids of other tokens
    for name, pair in house.devices.items():
        assert [token.id for token in written(pair)] == texts[name]
    assert [(model.name, len(model.pool.servers)) for model in house.gateway.models] == [(ONE, 2), (OTHER, 1)]


def test_a_failing_server_is_replaced_by_one_with_the_same_model_alone(
    house: House, texts: dict[str, list[int]]
) -> None:
    first, other, second = house.servers
    asked = len(other.requests)
    for server, fault in ((first, Fault.FAILED), (second, Fault.DROPPED)):
        server.fault = fault
        tokens = written(house.devices[ONE])
        assert [token.id for token in tokens] == texts[ONE]
        assert not {token.source for token in tokens} & UNVERIFIED
        house.mend()
    assert len(other.requests) == asked
    other.fault = Fault.FAILED
    alone = written(house.devices[OTHER])
    assert {token.source for token in alone} <= UNVERIFIED
    assert [token.id for token in written(house.devices[ONE])] == texts[ONE]
    house.mend()


def test_a_device_that_names_none_or_a_wrong_one_is_told_which_there_are(house: House, drafts: dict[str, Path]) -> None:
    where = house.gateway.address
    with Model.load(drafts[ONE], text_only=True) as text:
        with pytest.raises(ModelNotFound, match=f"serves several models: {ONE}, {OTHER}") as raised:
            RemoteVerifier(where, text.vocabulary)
        assert f"{where}#MODEL" in raised.value.next_step
        with pytest.raises(ModelNotFound, match=f"does not serve 'served/third', but {ONE}, {OTHER}"):
            RemoteVerifier(f"{where}#served/third", text.vocabulary)
        with pytest.raises(VocabularyMismatch, match="differ in their vocabularies"):
            RemoteVerifier(f"{where}#{OTHER}", text.vocabulary)


def test_a_pair_names_the_model_behind_the_address(
    house: House, drafts: dict[str, Path], texts: dict[str, list[int]]
) -> None:
    with LLM.open(drafts[OTHER], f"{house.gateway.address}#{OTHER}", threads=1, history=False) as pair:
        assert pair.verifier_name == OTHER
        tokens = written(pair)
        while any(token.source in UNVERIFIED for token in tokens):  # a busy machine may be late once
            tokens = written(pair)
        assert [token.id for token in tokens] == texts[OTHER]


def test_the_best_paired_verifier_is_one_of_several_models(
    engine: Engine, other_engine: Engine, drafts: dict[str, Path], tmp_path: Path, closing: ExitStack
) -> None:
    host, guest = device(tmp_path / "host"), device(tmp_path / "guest")
    befriend(host, guest, "verify")
    servers = [closing.enter_context(UpstreamServer(one)) for one in (Vllm(engine), OtherVllm(other_engine))]
    models = PoolOpening(list(drafts.values()), OPTIONS).open([server.url for server in servers])
    gateway = GatewayServer(models, ANYWHERE, trust=host)
    closing.callback(gateway.close)
    address = closing.enter_context(gateway).address
    for name, path in drafts.items():
        with Model.load(path, text_only=True) as text:
            chosen = choose_verifier(guest, text.vocabulary.fingerprint, [str(address)], hosts=[])
            assert chosen.address == ModelAddress(address, name)
            remote = RemoteVerifier(chosen.address, text.vocabulary, trust=guest, device=chosen.device)
            assert remote.name == name
            remote.close()
    with (
        Model.load(drafts[ONE], text_only=True) as text,
        pytest.raises(VerifierUnreachable, match=f"serves {OTHER}, which has a different tokenizer"),
    ):
        choose_verifier(guest, text.vocabulary.fingerprint, [f"{address}#{OTHER}"], hosts=[])


def test_one_server_may_have_several_of_the_models(
    engine: Engine, other_engine: Engine, drafts: dict[str, Path], closing: ExitStack
) -> None:
    """Without a name it is used for a model before it, if it has that, and else for its first."""
    router = closing.enter_context(UpstreamServer(Router(OtherVllm(other_engine), Vllm(engine))))
    plain = closing.enter_context(UpstreamServer(Vllm(engine)))

    def opened(*addresses: str) -> list[tuple[str, list[str]]]:
        models = PoolOpening(list(drafts.values()), OPTIONS).open(addresses)
        for model in models:
            closing.callback(model.close)
        return [(model.name, [str(one.url) for one in model.pool.servers]) for model in models]

    both = [(ONE, [router.url]), (OTHER, [router.url])]
    assert opened(f"{router.url}#{ONE}", f"{router.url}#{OTHER}") == both
    assert opened(plain.url, router.url) == [(ONE, [plain.url, router.url])]
    assert opened(router.url, plain.url) == [(OTHER, [router.url]), (ONE, [plain.url])]


def test_each_model_needs_a_tokenizer_that_is_proved_to_be_its_own(
    engine: Engine, other_engine: Engine, drafts: dict[str, Path], closing: ExitStack
) -> None:
    one = closing.enter_context(UpstreamServer(Vllm(engine)))
    other = closing.enter_context(UpstreamServer(OtherVllm(other_engine)))
    with pytest.raises(VocabularyMismatch, match=f"that of {OTHER} at") as raised:
        PoolOpening([drafts[ONE]], OPTIONS).open([one.url, other.url])
    assert "with -m" in raised.value.next_step
    with pytest.raises(VocabularyMismatch, match=f"None of the 2 tokenizers is that of {OTHER}"):
        PoolOpening([drafts[ONE], drafts[ONE]], OPTIONS).open([one.url, other.url])
    quiet = closing.enter_context(UpstreamServer(OtherLmStudio(other_engine)))
    with pytest.raises(InvalidOption, match="which of the 2 tokenizers it has cannot be told"):
        PoolOpening(list(drafts.values()), OPTIONS).open([one.url, quiet.url])


def test_a_server_that_comes_late_with_another_model_is_not_used(
    engine: Engine, other_engine: Engine, drafts: dict[str, Path], closing: ExitStack
) -> None:
    late = UpstreamServer(OtherVllm(other_engine))
    late.close()
    one = closing.enter_context(UpstreamServer(Vllm(engine)))
    news: list[str] = []
    opening = PoolOpening(list(drafts.values()), OPTIONS, news.append)
    (model,) = opening.open([one.url, late.url])
    closing.callback(model.close)
    closing.callback(opening.close)
    with UpstreamServer(OtherVllm(other_engine), port=late.port):
        while not any("has begun without" in text for text in news):
            sleep(0.005)
    assert f"this gateway has begun without {OTHER}. Restart it" in news[-1]


def test_the_metrics_are_those_of_each_model(house: House) -> None:
    for pair in house.devices.values():
        written(pair)
    registry = CollectorRegistry()
    registry.register(GatewayCollector(house.gateway.backends))
    text = generate_latest(registry).decode()
    for name, servers in ((ONE, 2), (OTHER, 1)):
        figures = [line for line in text.splitlines() if f'model="{name}"' in line]
        assert sum(line.startswith("edgellm_upstream_up{") for line in figures) == servers
        (verdicts,) = (line for line in figures if line.startswith("edgellm_gateway_verdicts_total{"))
        assert float(verdicts.rpartition(" ")[2]) > 0


def test_a_gateway_to_two_models_from_the_command_line(
    engine: Engine, other_engine: Engine, drafts: dict[str, Path], closing: ExitStack
) -> None:
    """Over HTTP, too, requests name the model; its health is that of its servers."""
    first = closing.enter_context(UpstreamServer(Vllm(engine)))
    other = closing.enter_context(UpstreamServer(OtherLlamaServer(other_engine)))
    tokenizers = [word for path in drafts.values() for word in ("-m", str(path))]
    gateway = Served("--upstream", first.url, "--upstream", other.url, *tokenizers)
    try:
        gateway.wait_for(f"{OTHER}: llama-server at {other.url} verifies by continue")
        gateway.wait_for(rf"edgellm chat --verifier {gateway.address}#{OTHER}")
        web = gateway.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")

        def read(path: str, body: dict[str, Any] | None = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            with urlopen(Request(f"{web}{path}", data, {"Content-Type": "application/json"})) as answer:
                return json.load(answer)

        assert [one["id"] for one in read("/v1/models")["data"]] == [ONE, OTHER]
        question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        for name in (ONE, OTHER):
            assert read("/v1/chat/completions", {**question, "model": name})["model"] == name
        assert read("/health") == {"status": "ok", "models": {ONE: "ok", OTHER: "ok"}}
        with LLM.open(drafts[OTHER], f"{gateway.address}#{OTHER}", threads=1, history=False) as pair:
            ids(pair.reply(case(2), max_tokens=2, budget=1.0))
            other.key = "another one"  # it answers nobody from now on
            ids(pair.reply(case(2), max_tokens=2, budget=1.0))
        while read("/health")["models"] != {ONE: "ok", OTHER: "away"}:
            sleep(0.02)
    finally:
        gateway.close()
