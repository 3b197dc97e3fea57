"""One gateway to servers of two models with different tokenizers: each device gets the text of the model that it
names."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from edgellm.engine import Model
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import InvalidOption, ModelCorrupt, ModelNotFound, VocabularyMismatch
from edgellm.llm import LLM
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.client.verifier_selection import choose_verifier
from edgellm.services.server.gateway_server import GatewayServer, serve_gateway
from edgellm.services.server.listener import Listening
from edgellm.upstream.gateway.backend import families
from edgellm.upstream.gateway.opening import PoolOpening
from edgellm.upstream.verifier import UpstreamOptions
from testkit import free_port
from testkit.retokenized import permuted, write
from testkit.upstream.dialects import Dialect, LlamaServer, Vllm
from testkit.upstream.engine import Engine
from testkit.upstream.server import Fault, UpstreamServer
from testkit.upstream.text_dialects import LmStudio
from tests.cli.serving import Served
from tests.once import once
from tests.rpc.strangers import befriend, device
from tests.spec.real import case, ids
from tests.upstream.conftest import ANYWHERE, MOST, UNVERIFIED, House, drafting, written
from tests.waiting import until

ONE, OTHER = "served/verifier", "served/other"
OPTIONS = UpstreamOptions(least=600.0, retry=0.01, retry_most=0.02)


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
            found[name] = ids(alone.reply(case(5), max_tokens=MOST))
    return found


@pytest.fixture(scope="module")
def house(engine: Engine, other_engine: Engine, drafts: dict[str, Path]) -> Iterator[House]:
    with ExitStack() as closing:
        dialects = (Vllm(engine, scores=True, counts=True), OtherLlamaServer(other_engine), Vllm(engine))
        servers = tuple(closing.enter_context(UpstreamServer(dialect)) for dialect in dialects)
        models = PoolOpening(list(drafts.values()), OPTIONS).open([server.url for server in servers])
        gateway = GatewayServer(models, ANYWHERE)
        closing.callback(gateway.close)
        closing.enter_context(gateway)
        loaded = {name: closing.enter_context(Model.load(path)) for name, path in drafts.items()}
        devices = {name: drafting(closing, draft, gateway, name) for name, draft in loaded.items()}
        yield House(servers, gateway, devices)


def test_a_failing_server_is_replaced_by_one_with_its_model_alone(house: House, texts: dict[str, list[int]]) -> None:
    first, other, second = house.servers
    asked = len(other.requests)
    for server, fault in ((first, Fault.FAILED), (second, Fault.DROPPED)):
        server.fault = fault
        tokens, _ = written(house.devices[ONE])
        assert [token.id for token in tokens] == texts[ONE]
        assert not {token.source for token in tokens} & UNVERIFIED
        house.mend()
    assert len(other.requests) == asked
    other.fault = Fault.FAILED
    alone, _ = written(house.devices[OTHER])
    assert {token.source for token in alone} <= UNVERIFIED
    assert [token.id for token in written(house.devices[ONE])[0]] == texts[ONE]
    house.mend()


def test_a_device_that_names_none_or_a_wrong_one_is_told_which_there_are(house: House, drafts: dict[str, Path]) -> None:
    where = house.gateway.address
    with Model.load(drafts[ONE], TEXT_ONLY) as text:
        with pytest.raises(ModelNotFound, match=f"serves several models: {ONE}, {OTHER}") as raised:
            RemoteVerifier(where, text.vocabulary)
        assert f"{where}#MODEL" in raised.value.next_step
        with pytest.raises(ModelNotFound, match=f"does not serve 'served/third', but {ONE}, {OTHER}"):
            RemoteVerifier(f"{where}#served/third", text.vocabulary)
        with pytest.raises(VocabularyMismatch, match="differ in their vocabularies"):
            RemoteVerifier(f"{where}#{OTHER}", text.vocabulary)


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
        with Model.load(path, TEXT_ONLY) as text:
            chosen = choose_verifier(guest, text.vocabulary, [str(address)], hosts=[])
            assert str(chosen.where) == f"{address}#{name}"
            remote = RemoteVerifier(chosen.where, text.vocabulary)
            assert remote.capabilities.name == name
            remote.close()
    with Model.load(drafts[ONE], TEXT_ONLY) as text:
        other = choose_verifier(guest, text.vocabulary, [f"{address}#{OTHER}"], hosts=[])
    assert str(other.where) == f"{address}#{OTHER}"
    assert ", with another tokenizer" in other.reason


def test_one_server_may_have_several_of_the_models(
    engine: Engine, other_engine: Engine, drafts: dict[str, Path], closing: ExitStack
) -> None:
    """Without a name it is used for a model before it, if it has that, and else for its first."""
    router = closing.enter_context(UpstreamServer(Router(OtherVllm(other_engine), Vllm(engine))))
    plain = closing.enter_context(UpstreamServer(Vllm(engine)))

    def opened(*addresses: str) -> list[tuple[str, list[str]]]:
        models = PoolOpening(list(drafts.values()), OPTIONS).open(addresses)
        for model in models:
            closing.callback(model.dispose)
        return [(model.name, [one.verifier.elsewhere.address for one in model.servers]) for model in models]

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


def metrics_of(gateway: GatewayServer) -> dict[str, dict[str, float]]:
    return {
        name: {" ".join(labels): value for labels, value in values}
        for name, _, _, values in families(gateway.models, len(gateway.opening.away))
    }


def test_a_model_is_served_as_soon_as_its_first_server_comes(
    engine: Engine, other_engine: Engine, drafts: dict[str, Path], texts: dict[str, list[int]], closing: ExitStack
) -> None:
    """None is there at the start. A device that named no model stays with the one that it got. A further server of a
    model joins it."""
    one, other, more = (free_port() for _ in range(3))
    urls = [f"http://127.0.0.1:{one}", f"http://127.0.0.1:{other}#{OTHER}", f"http://127.0.0.1:{more}"]
    events: list[str] = []
    gateway = serve_gateway(urls, list(drafts.values()), Listening(port=0, on_event=events.append), OPTIONS)
    closing.callback(gateway.close)
    closing.callback(gateway.stop)
    watched: list[str] = []
    gateway.watch(lambda *_: None, lambda model, _verifier: watched.append(model.name))

    def wait_for(*names: str) -> None:
        until(lambda: tuple(watched) == names)

    def written_by(name: str, wanted: str) -> LLM:
        pair = drafting(closing, closing.enter_context(Model.load(drafts[name])), gateway, wanted)
        assert [token.id for token in written(pair)[0]] == texts[name]
        return pair

    assert not list(gateway.models)
    assert metrics_of(gateway)["edgellm_gateway_servers_awaited"] == {"": 3}
    with (
        Model.load(drafts[ONE], TEXT_ONLY) as text,
        pytest.raises(ModelNotFound, match="None of its servers has answered yet"),
    ):
        RemoteVerifier(gateway.address, text.vocabulary)
    closing.enter_context(UpstreamServer(Vllm(engine), port=one))
    wait_for(ONE)
    unnamed = written_by(ONE, "")
    closing.enter_context(UpstreamServer(OtherVllm(other_engine), port=other))
    wait_for(ONE, OTHER)
    written_by(OTHER, OTHER)
    assert [token.id for token in written(unnamed)[0]] == texts[ONE]
    closing.enter_context(UpstreamServer(Vllm(engine), port=more))
    until(lambda: metrics_of(gateway)["edgellm_gateway_servers_awaited"] == {"": 0})
    assert [len(backend.servers) for backend in gateway.models] == [2, 1]
    assert OTHER in metrics_of(gateway)["edgellm_gateway_verdicts_total"]
    assert sum("It is used as soon as it answers." in event for event in events) == 3
    assert f"http://127.0.0.1:{other} is used now: {OTHER} is served from now on." in events
    assert f"{OTHER} verifies at {gateway.address}." in events


def test_a_model_that_comes_too_late_is_closed(engine: Engine, drafts: dict[str, Path], closing: ExitStack) -> None:
    server = closing.enter_context(UpstreamServer(Vllm(engine)))
    (model,) = PoolOpening([drafts[ONE]], OPTIONS).open([server.url])
    gateway = GatewayServer((), ANYWHERE)
    with gateway:
        pass
    gateway.close()
    gateway.add(model)
    assert not list(gateway.models)
    assert not model.add(model.servers[0])  # it is closed


def test_a_late_server_with_a_tokenizer_that_nobody_gave_is_not_used(
    engine: Engine, other_engine: Engine, drafts: dict[str, Path], closing: ExitStack
) -> None:
    port, news = free_port(), list[str]()
    one = closing.enter_context(UpstreamServer(Vllm(engine)))
    opening = PoolOpening([drafts[ONE]], OPTIONS, news.append)
    (model,) = opening.open([one.url, f"http://127.0.0.1:{port}"])
    closing.callback(model.dispose)
    closing.callback(opening.close)
    added: list[str] = []
    opening.look(lambda late: added.append(late.name))
    with UpstreamServer(OtherVllm(other_engine), port=port):
        until(lambda: not opening.away)
    assert added == []
    assert f"http://127.0.0.1:{port} is not used. The vocabulary here and that of {OTHER}" in news[-1]


def test_tokenizers_are_read_although_no_server_answers(tmp_path: Path) -> None:
    (wrong := tmp_path / "wrong.gguf").write_bytes(b"no model")
    with pytest.raises(ModelCorrupt):
        PoolOpening([wrong], OPTIONS).open([f"http://127.0.0.1:{free_port()}"])


def test_a_gateway_from_the_command_line_begins_without_any_server(
    engine: Engine, other_engine: Engine, drafts: dict[str, Path], closing: ExitStack
) -> None:
    """Over HTTP, too, requests name the model; its health is that of its servers."""
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    tokenizers = [word for path in drafts.values() for word in ("-m", str(path))]
    gateway = Served("--upstream", f"{urls[0]}#{ONE}", "--upstream", f"{urls[1]}#{OTHER}", *tokenizers)
    closing.callback(gateway.close)
    web = gateway.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")

    def read(path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(f"{web}{path}", data, {"Content-Type": "application/json"})) as answer:
            return str(answer.read().decode())

    assert json.loads(read("/health")) == {"status": "ok"}
    assert json.loads(read("/v1/models"))["data"] == []
    assert "edgellm_gateway_servers_awaited 2.0" in read("/metrics")
    closing.enter_context(UpstreamServer(Vllm(engine), port=ports[0]))
    gateway.wait_for(f"{urls[0]} is used now: {ONE} is served from now on.")
    other = closing.enter_context(UpstreamServer(OtherLlamaServer(other_engine), port=ports[1]))
    gateway.wait_for(f"{OTHER}: llama-server at {other.url} verifies by continue")
    gateway.wait_for(rf"edgellm chat --verifier {gateway.address}#{OTHER}")
    until(lambda: json.loads(read("/health")) == {"status": "ok", "models": {ONE: "ok", OTHER: "ok"}})
    assert [one["id"] for one in json.loads(read("/v1/models"))["data"]] == [ONE, OTHER]
    assert f'edgellm_upstream_up{{model="{ONE}",server="{urls[0]}"' in read("/metrics")
    question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    for name in (ONE, OTHER):
        assert json.loads(read("/v1/chat/completions", {**question, "model": name}))["model"] == name
    other.key = "another one"  # it answers nobody from now on
    with LLM.open(drafts[OTHER], f"{gateway.address}#{OTHER}", threads=1, history=False) as pair:
        ids(pair.reply(case(2), max_tokens=2, budget=1.0))
    until(lambda: json.loads(read("/health"))["models"] == {ONE: "ok", OTHER: "away"})
