"""Devices draft, and stock servers behind a gateway verify: the text is what the server writes alone, also where one of
several servers fails."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine import Model
from edgellm.errors import EngineFailed, InvalidOption, VerifierBusy, VerifierLost
from edgellm.llm import LLM
from edgellm.services.server.gateway_server import GatewayServer
from edgellm.spec.protocols import Tenant, VerifyRequest
from edgellm.spec.types import GREEDY, Chunk, Explanation, Ids, Notice, Token, Verdict
from edgellm.upstream.gateway.backend import GatewayBackend, PooledServer, families
from edgellm.upstream.gateway.opening import PoolOpening
from edgellm.upstream.verifier import UpstreamOptions
from testkit import retokenized
from testkit.retokenized import PAIRS
from testkit.upstream.engine import Engine
from testkit.upstream.server import Fault, UpstreamServer
from tests.spec.real import case, ids
from tests.upstream.conftest import ANYWHERE, MOST, UNVERIFIED, WAYS, House, drafting, written
from tests.waiting import until

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 11}
PATIENT = UpstreamOptions(least=600.0, retry=0.01, retry_most=0.02)  # what a busy machine delays is not lost


def open_models(
    tokenizer: Path, servers: Sequence[UpstreamServer], options: UpstreamOptions = PATIENT
) -> tuple[GatewayBackend, ...]:
    """The models of some servers, with one tokenizer."""
    return PoolOpening([tokenizer], options).open([server.url for server in servers])


@pytest.fixture(scope="module")
def prompt(served: Model) -> Ids:
    return served.plain_prompt("Where is the mug?")


@pytest.fixture(scope="module")
def houses(engine: Engine, f32_pair: tuple[Path, Path]) -> Iterator[dict[str, House]]:
    """A house for each of some ways to verify, and one with two servers."""
    with ExitStack() as closing:
        draft = closing.enter_context(Model.load(f32_pair[0]))

        def house(*ways: str) -> House:
            servers = tuple(closing.enter_context(UpstreamServer(WAYS[way][0](engine))) for way in ways)
            gateway = GatewayServer(open_models(f32_pair[0], servers), ANYWHERE)
            closing.callback(gateway.close)
            closing.enter_context(gateway)
            return House(servers, gateway, {"": drafting(closing, draft, gateway)})

        yield {
            "vllm-score": house("vllm-score"),
            "llama-server": house("llama-server"),
            "two": house("vllm-score", "vllm-fan-out"),
        }


def test_the_tier_behind_a_gateway_is_told(houses: dict[str, House], f32_pair: tuple[Path, Path]) -> None:
    for way, behind in (("llama-server", "llama-server by continue"), ("two", "vLLM by score, vLLM by fan-out")):
        where = str(houses[way].gateway.address)
        with LLM.open(f32_pair[0], where, threads=1, history=False) as pair:
            told: list[Explanation] = []
            reply = pair.reply(case(2), max_tokens=1)
            reply.listen(on_explain=told.append)
            list(reply)
        assert f"{where} is a gateway to served/verifier, by {behind}" in [one.text for one in told]


def test_a_device_with_another_tokenizer_gets_the_servers_text(
    houses: dict[str, House], f32_pair: tuple[Path, Path], tmp_path: Path, wanted: dict[int, list[int]]
) -> None:
    retokenized.write(f32_pair[0], tmp_path / "draft.gguf", PAIRS["other merges"][0] or retokenized.permuted)
    with LLM.open(tmp_path / "draft.gguf", str(houses["two"].gateway.address), threads=1, history=False) as pair:
        assert "and served/verifier have different tokenizers" in pair.notices[0]
        reply = pair.reply(case(5), max_tokens=MOST, retrieval="off", gate="always", gamma=4)
        assert ids(reply) == wanted[5]
        assert reply.summary.share_verified == 1.0
        assert reply.summary.accepted > 0


def test_log_probabilities_cross_both_links(houses: dict[str, House]) -> None:
    tokens, _ = written(houses["vllm-score"].devices[""], 2, logprobs=3)
    assert tokens
    assert all(token.logprobs is not None and len(token.logprobs.ids) == 3 for token in tokens)


@pytest.mark.parametrize("way", ["vllm-score", "llama-server", "two"])
def test_devices_get_the_servers_text_by_rules(way: str, houses: dict[str, House], f32_pair: tuple[Path, Path]) -> None:
    schema = json.dumps({"type": "object", "properties": {"day": {"enum": ["Friday", "Monday"]}}, "required": ["day"]})
    with LLM.open(None, f32_pair[1], threads=1) as alone:
        for options in ({}, {"presence_penalty": 1.0}, {"json_schema": schema}, {"json_schema": schema} | SAMPLED):
            wanted = ids(alone.reply(case(5), max_tokens=MOST, **options))
            reply = houses[way].devices[""].reply(case(5), max_tokens=MOST, budget=1.0, **options)
            assert ids(reply) == wanted
            assert reply.summary.share_verified == 1.0


def test_devices_are_told_what_servers_cannot_do(houses: dict[str, House]) -> None:
    with pytest.raises(InvalidOption, match="penalties"):
        houses["two"].devices[""].reply("Hello", repeat_penalty=1.1)
    assert ids(houses["two"].devices[""].reply("Hello", min_p=0.1, temperature=1.0, max_tokens=4))


def test_a_server_that_fails_is_replaced_by_another(houses: dict[str, House], wanted: dict[int, list[int]]) -> None:
    """Again and again the server that is used fails: nothing is lost, repeated, or unverified."""
    house = houses["two"]
    backend = house.gateway.models[0]
    moved = backend.figures["moved_requests"]
    tokens: list[Token] = []
    notices: list[Notice] = []
    faults = [Fault.DROPPED, Fault.FAILED, Fault.STRANGE, Fault.BUSY]
    server, asked = house.servers[0], len(house.servers[0].requests)
    reply = house.devices[""].reply(case(5), max_tokens=MOST, budget=1.0)
    reply.listen(on_notice=notices.append)
    for token in reply:
        tokens.append(token)
        if server.fault and len(server.requests) > asked:
            faults.pop(0)
        house.mend()
        if faults:  # a chunk may bring several tokens: a fault stays until a request has met it
            busy = max(backend.servers, key=lambda one: one.figures["sessions"])
            server = house.servers[backend.servers.index(busy)]
            server.fault = faults[0]
            asked = len(server.requests)
    house.mend()
    assert [token.id for token in tokens] == wanted[5]
    assert not {token.source for token in tokens} & UNVERIFIED
    assert not [one for one in notices if "drafts are left out" not in one.text]  # a busy machine may find so
    assert backend.figures["moved_requests"] >= moved + 3


def test_with_no_server_devices_are_told_when_to_return(houses: dict[str, House], wanted: dict[int, list[int]]) -> None:
    house = houses["vllm-score"]
    house.servers[0].fault = Fault.FAILED
    tokens, notices = written(house.devices[""])
    assert {token.source for token in tokens} <= UNVERIFIED
    assert any("The verifier is busy for about" in notice.text for notice in notices)
    house.mend()
    assert house.gateway.models[0].figures["pushed_back_requests"] > 0
    while any(token.source in UNVERIFIED for token in tokens):
        tokens, _ = written(house.devices[""])
    assert [token.id for token in tokens] == wanted[5]


def test_the_metrics_tell_what_was_reused(houses: dict[str, House]) -> None:
    house = houses["vllm-score"]
    for _ in range(2):
        written(house.devices[""])
    found = {name: sum(value for _, value in values) for name, _, _, values in families(house.gateway.models, 0)}
    assert 0 < found["edgellm_upstream_cached_tokens_total"] < found["edgellm_upstream_prefix_tokens_total"]
    assert found["edgellm_gateway_verdicts_total"] == found["edgellm_upstream_answers_total"] > 0
    assert found["edgellm_gateway_verified_tokens_total"] >= 2 * MOST
    assert found["edgellm_upstream_up"] == 1.0


def test_what_is_no_pool(houses: dict[str, House], f32_pair: tuple[Path, Path]) -> None:
    one, other = houses["two"].servers
    with pytest.raises(InvalidOption, match="has no model 'served/other'"):
        PoolOpening([f32_pair[0]]).open([one.url, f"{other.url}#served/other"])
    with pytest.raises(InvalidOption, match="given twice"):
        PoolOpening([f32_pair[0]]).open([one.url, f"{one.url}/v1"])


class Sessions:
    """Sessions at a gateway, without the link between."""

    def __init__(self, backend: GatewayBackend) -> None:
        self.backend = backend
        self.answers: dict[int, Future[Verdict]] = {}

    def ask(self, session: int, prefix: Ids, tenant: Tenant | None = None) -> None:
        """Ask for the next token of a session."""
        request = VerifyRequest(session, GREEDY, 0, prefix, Chunk(), tenant=tenant or Tenant())
        self.answers[session] = self.backend.submit(request)

    def failure(self, session: int) -> BaseException | None:
        """Wait for the answer to the latest request of a session; return its error, if any."""
        return self.answers[session].exception(600)


@pytest.fixture
def sessions(houses: dict[str, House], f32_pair: tuple[Path, Path]) -> Iterator[Sessions]:
    """Sessions at a gateway with a place for one request at each of two servers."""
    house = houses["two"]
    (model,) = open_models(f32_pair[0], house.servers)
    backend = GatewayBackend(model.text, [PooledServer(one.verifier, 1) for one in model.servers])
    yield Sessions(backend)
    house.mend()
    backend.dispose()


def test_sessions_are_spread_and_wait_for_a_place(sessions: Sessions, prompt: Ids, houses: dict[str, House]) -> None:
    """Two requests are in flight, one at each server, and two wait; who leaves makes room."""
    pool, servers = sessions.backend, houses["two"].servers
    asked = sum(len(server.requests) for server in servers)
    houses["two"].fail(Fault.STALLED)
    for session in (1, 2, 3, 4):
        sessions.ask(session, prompt, tenant=Tenant(f"device {session}"))
    assert [server.figures["running"] for server in pool.servers] == [1, 1]
    assert sessions.backend.waiting == 2
    assert sessions.backend.wait_seconds() > 0.0
    sessions.backend.end_session(4)
    assert sessions.backend.waiting == 1
    until(lambda: sum(len(server.requests) for server in servers) == asked + 2)
    houses["two"].fail(None)
    sessions.backend.end_session(1)
    sessions.backend.end_session(2)
    assert sessions.failure(3) is None
    assert [server.figures["running"] for server in pool.servers] == [0, 0]
    assert not any(sessions.answers[session].done() for session in (1, 2, 4))


def test_a_device_keeps_its_server(sessions: Sessions, prompt: Ids) -> None:
    """Its next reply begins with the last one's text, which that server has in its cache."""
    pool = sessions.backend
    for session, device in enumerate(("phone", "laptop", "phone", "laptop")):
        sessions.ask(session, prompt, tenant=Tenant(device))
        assert sessions.failure(session) is None
        sessions.backend.end_session(session)
    assert [server.figures["answers"] for server in pool.servers] == [2, 2]


def test_a_cache_is_shared_within_a_device_alone(sessions: Sessions, prompt: Ids, houses: dict[str, House]) -> None:
    asked = [server.requests for server in houses["two"].servers]
    before = [len(requests) for requests in asked]
    for session, salt in enumerate(("phone", "phone", "laptop", "")):
        sessions.ask(session, prompt, tenant=Tenant(salt, salt))
        assert sessions.failure(session) is None
    salts = [
        body.get("cache_salt", "")
        for requests, start in zip(asked, before, strict=True)
        for _, body, _ in requests[start:]
    ]
    assert sorted(map(salts.count, set(salts))) == [1, 1, 2]
    assert not {"phone", "laptop"} & set(salts)


def test_a_full_server_says_when_there_is_room(sessions: Sessions, prompt: Ids, houses: dict[str, House]) -> None:
    houses["two"].fail(Fault.BUSY)
    sessions.ask(1, prompt)
    answer = sessions.failure(1)
    assert isinstance(answer, VerifierBusy)
    assert 0.0 < answer.seconds <= 1.25


def test_a_refused_request_says_nothing_of_servers(sessions: Sessions, prompt: Ids, houses: dict[str, House]) -> None:
    """It is this request alone that they do not answer: another device's is not pushed back."""
    houses["two"].fail(Fault.REFUSED)
    sessions.ask(1, prompt)
    answer = sessions.failure(1)
    assert isinstance(answer, VerifierLost)
    assert "too many tokens" in answer.what
    assert sessions.backend.ready()
    assert [server.figures["refusals"] for server in sessions.backend.servers] == [1, 1]
    houses["two"].mend()
    sessions.ask(2, prompt)
    assert sessions.failure(2) is None


def test_a_stalling_server_is_replaced(prompt: Ids, houses: dict[str, House], f32_pair: tuple[Path, Path]) -> None:
    house = houses["two"]
    hasty = UpstreamOptions(least=0.2, retry=0.01, retry_most=0.02)
    (backend,) = open_models(f32_pair[0], house.servers, hasty)
    sessions = Sessions(backend)
    for session in (1, 2):  # how long they take is known then
        sessions.ask(session, prompt)
        assert sessions.failure(session) is None
    house.servers[0].fault = Fault.STALLED
    for _ in range(100):
        for session in (1, 2):
            sessions.ask(session, prompt)
        if [sessions.failure(session) for session in (1, 2)] == [None, None]:
            break  # else a busy machine was late, too
    assert backend.figures["moved_requests"] > 0
    house.mend()
    backend.dispose()


def test_a_gateway_that_ends_says_so(sessions: Sessions, prompt: Ids, houses: dict[str, House]) -> None:
    houses["two"].fail(Fault.STALLED)
    for session in (1, 2, 3):
        sessions.ask(session, prompt)
    sessions.backend.close()
    with pytest.raises(EngineFailed):
        sessions.ask(4, prompt)
    assert all(isinstance(sessions.failure(session), EngineFailed) for session in (1, 2, 3))
