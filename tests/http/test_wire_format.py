"""The JSON of every answer: its keys and their types; and the server does what its description says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from edgellm.http.model_host import ServedModel
from edgellm.llm import LLM
from edgellm.rpc.trust.trust import Peer
from tests.http.conftest import Answer, Ask, asker, configured, conversation, serving
from tests.http.test_middleware import peer
from tests.http.test_streaming import Scripted, failing

__all__ = ["peer"]

KEY = "k" * 43
MAYBE = "float or null"
MEASURED = {
    "confidence", "tokens_per_round", "share_verified", "acceptance_rate", "mean_acceptance_length",
    "verifier_passes_per_token", "share_offloaded", "rtt_ms_p50",
}  # fmt: skip
"""Numbers that are null or not depending on what the machine finds to be fast."""

TIMINGS = {
    "cache_n": "int", "prompt_n": "int", "prompt_ms": "float", "prompt_per_token_ms": "float",
    "prompt_per_second": "float", "predicted_n": "int", "predicted_ms": "float", "predicted_per_token_ms": "float",
    "predicted_per_second": "float", "draft_n": "int", "draft_n_accepted": "int",
}  # fmt: skip
SUMMARY = {
    "finish_reason": "str", "stopped_by": "null", "seed": "int", "rounds": "int", "tokens_per_round": MAYBE,
    "drafted": "int", "share_verified": MAYBE, "share_verified_thinking": "null", "acceptance_rate": MAYBE,
    "mean_acceptance_length": MAYBE,
    "verifier_passes_per_token": MAYBE, "share_offloaded": MAYBE, "retrieved": "int", "rtt_ms_p50": MAYBE,
    "bytes_up": "int", "bytes_down": "int",
}  # fmt: skip
USAGE = {
    "prompt_tokens": "int", "completion_tokens": "int", "total_tokens": "int",
    "prompt_tokens_details": {"cached_tokens": "int"}, "completion_tokens_details": {"reasoning_tokens": "int"},
}  # fmt: skip
TOKENS = [{"id": "int", "text": "str", "source": "str", "channel": "str", "confidence": MAYBE, "round": "int"}]
HEAD = {"id": "str", "object": "str", "created": "int", "model": "str", "system_fingerprint": "str"}
OURS = {"tokens": TOKENS, "notices": [], "summary": SUMMARY}
MESSAGE = {"role": "str", "content": "str", "reasoning_content": "null", "refusal": "null"}
TOP = {"token": "str", "logprob": "float", "bytes": ["int"]}
CHAT_LOGPROBS = {"content": [TOP | {"top_logprobs": [TOP]}], "refusal": "null"}
TEXT_LOGPROBS = {
    "tokens": ["str"], "token_logprobs": ["float"], "top_logprobs": ["a float for each token"], "text_offset": ["int"],
}  # fmt: skip
MODEL = {"id": "str", "object": "str", "created": "int", "owned_by": "str", "context_length": "int",
         "loaded": "bool", "device": "null", "embeds": "bool"}  # fmt: skip

Shape = Any


def shape(value: Any, key: str = "") -> Shape:
    """Return a JSON value with the names of types in place of its scalars, and each kind of a list's elements once."""
    if isinstance(value, dict):
        return {name: shape(one, name) for name, one in value.items()}
    if isinstance(value, list) and key == "top_logprobs" and value and set(value[0]) != set(TOP):
        assert all(isinstance(one, float) for chances in value for one in chances.values())
        return ["a float for each token"]
    if isinstance(value, list):
        kinds = [shape(one) for one in value]
        return [kind for number, kind in enumerate(kinds) if kind not in kinds[:number]]
    if key in MEASURED and isinstance(value, float | None):
        return MAYBE
    return {type(None): "null"}.get(type(value), type(value).__name__)


def same(value: Any, expected: Shape) -> None:
    assert shape(value) == expected


def whole(choice: Shape) -> Shape:
    return HEAD | {"choices": [choice], "usage": USAGE, "timings": TIMINGS, "edgellm": OURS}


def chat_choice(logprobs: Shape = "null") -> Shape:
    return {"index": "int", "message": MESSAGE, "logprobs": logprobs, "finish_reason": "str"}


def text_choice(logprobs: Shape = "null", end: str = "str") -> Shape:
    return {"index": "int", "text": "str", "logprobs": logprobs, "finish_reason": end}


def chunk_choice(delta: Shape, logprobs: Shape = "null", end: str = "null") -> Shape:
    return {"index": "int", "delta": delta, "logprobs": logprobs, "finish_reason": end}


def test_whole_replies(ask: Ask) -> None:
    answer = ask("POST", "/v1/chat/completions", conversation(max_tokens=4))
    assert answer.headers["content-type"] == "application/json"
    same(answer.json, whole(chat_choice()))
    answer = ask("POST", "/v1/chat/completions", conversation(max_tokens=4, logprobs=True, top_logprobs=2))
    same(answer.json, whole(chat_choice(CHAT_LOGPROBS)))
    same(ask("POST", "/v1/completions", {"prompt": "The film", "max_tokens": 4}).json, whole(text_choice()))
    answer = ask("POST", "/v1/completions", {"prompt": "The film", "max_tokens": 4, "logprobs": 2})
    same(answer.json, whole(text_choice(TEXT_LOGPROBS)))


def chunks(answer: Answer) -> list[Shape]:
    """Return the shapes of a stream's events but a busy machine's notices, several alike in a row once."""
    shapes = [shape(event) for event in answer.events if "notice" not in event.get("edgellm", {})]
    return [one for number, one in enumerate(shapes) if number == 0 or one != shapes[number - 1]]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_streams(ask: Ask, usage: bool, logprobs: bool) -> None:
    more = {"stream": True, "max_tokens": 4, **({"stream_options": {"include_usage": True}} if usage else {})}
    none = {"usage": "null"} if usage else {}
    last = [HEAD | {"choices": [], "usage": USAGE}] if usage else []
    end = {"timings": TIMINGS, "edgellm": {"summary": SUMMARY}}

    answer = ask("POST", "/v1/chat/completions", conversation(**more, **({"logprobs": True} if logprobs else {})))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.body.endswith(b"data: [DONE]\n\n")
    chat_logprobs = {"content": [TOP | {"top_logprobs": []}], "refusal": "null"} if logprobs else "null"
    expected = [
        HEAD | {"choices": [chunk_choice({"role": "str", "content": "str"})]} | none,
        HEAD | {"choices": [chunk_choice({"content": "str"}, chat_logprobs)], "edgellm": {"tokens": TOKENS}} | none,
        HEAD | {"choices": [chunk_choice({}, "null", "str")]} | end | none, *last,
    ]  # fmt: skip
    assert chunks(answer) == expected

    answer = ask("POST", "/v1/completions", {"prompt": "The film"} | more | ({"logprobs": 2} if logprobs else {}))
    expected = [
        HEAD | {"choices": [text_choice(TEXT_LOGPROBS if logprobs else "null", "null")], "edgellm": {"tokens": TOKENS}}
        | none,
        HEAD | {"choices": [text_choice()]} | end | none, *last,
    ]  # fmt: skip
    assert chunks(answer) == expected


@pytest.fixture
def troubled(peer: Peer) -> Iterator[Ask]:
    """A server with a key and a paired device, whose replies fail behind a notice."""
    with configured(key=KEY) as server:
        server.open(ServedModel(cast(LLM, Scripted(failing)), "made-up"))
        yield asker(server)


SIGNED = {"Authorization": f"Bearer {KEY}"}
ERROR = {"message": "str", "type": "str", "param": "null", "code": "null"}
CODED = ERROR | {"code": "str"}


def test_errors(ask: Ask, troubled: Ask) -> None:
    for answer, error in (
        (ask("GET", "/nothing"), ERROR),
        (ask("GET", "/v1/completions"), ERROR),
        (ask("POST", "/v1/completions", b"{"), ERROR),
        (ask("POST", "/v1/completions", {"prompt": "a", "best_of": 2}), ERROR | {"param": "str"}),
        (ask("POST", "/v1/completions", {"prompt": "a", "model": "other"}), CODED | {"param": "str"}),
        (ask("GET", "/health", headers={"Host": "evil.example"}), CODED),
        (troubled("GET", "/status"), CODED),
        (troubled("POST", "/v1/chat/completions", conversation(), SIGNED), CODED),
    ):
        assert answer.headers["content-type"] == "application/json"
        same(answer.json, {"error": error})
    events = troubled("POST", "/v1/chat/completions", conversation(stream=True), SIGNED).events
    same(events[2], HEAD | {"choices": [chunk_choice({})], "edgellm": {"notice": "str"}})
    same(events[-1], {"error": CODED})


def test_models_and_health(ask: Ask) -> None:
    same(ask("GET", "/v1/models").json, {"object": "str", "data": [MODEL]})
    same(ask("GET", "/v1/models/edgellm-verifier").json, MODEL)
    same(ask("GET", "/health").json, {"status": "str", "models": {"edgellm-verifier": "str"}})


def test_the_status(ask: Ask, troubled: Ask) -> None:
    sampling: dict[str, Any] = {"temperature": "float", "top_k": "int", "top_p": "float", "min_p": "float"}
    sampling |= {"repeat_penalty": "float", "origin": "str"}
    names: dict[str, Any] = {"draft": "str", "verifier": "str", "context_length": "int", "sampling": sampling}
    names |= {"link": "null"}
    counts = {"running": "int", "waiting": "int", "places": "int"}
    model = {"name": "str"} | names | {"memory": {"CPU": "int"}, "users": "int", "idle_s": "float", "expires_s": "null"}
    status = {"model": "str", "requests": counts, "devices": [], "anonymous": "bool", "models": [model], "loading": []}
    status |= {"mesh": "null"}
    same(ask("GET", "/status").json, status)
    device = {"name": "str", "short": "str", "addresses": ["str"], "may_here": ["str"], "may_there": []}
    found = troubled("GET", "/status", headers=SIGNED).json
    models = [model | {"draft": "null"}]
    same(found, status | {"devices": [device], "models": models})


@pytest.fixture(scope="module")
def described(f32_pair: tuple[Path, Path]) -> Iterator[Any]:
    """The description of a server whose replies are short."""
    with (
        LLM.open(*f32_pair, threads=1, n_ctx=48) as pair,
        serving(pair, "edgellm-verifier", replies=1, page_key=KEY) as server,
    ):
        asker(server)("GET", "/openapi.json")  # put together when first asked for, within no time-out of schemathesis
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


ONE = "/conversations/{conversation_id}"
REPLIES = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat",
    "/api/generate", "/v1/responses", "/v1/embeddings", "/api/embed", "/api/embeddings",
)  # fmt: skip
OLLAMA = ("/api/tags", "/api/ps", "/api/version")
PATHS = {
    "GET": ("/health", "/status", "/metrics", "/v1/models", "/v1/models/{model}", "/conversations", ONE, *OLLAMA),
    "POST": (*REPLIES, "/api/show", "/models/unload", "/conversations"),
    **dict.fromkeys(("PUT", "PATCH", "DELETE"), (ONE,)),
}

NESTED = {*REPLIES[2:]}  # each request takes long to make up

# A request may be as described and yet refused: an empty prompt, one that does not fit, a gate without a budget.
NOT_PROMISED: list[Any] = [positive_data_acceptance]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(method, path, mode) for method in PATHS for path in PATHS[method] for mode in GenerationMode
     if mode is GenerationMode.POSITIVE or method not in ("GET", "DELETE")],
)  # fmt: skip
def test_answers_are_as_described(described: Any, method: str, path: str, mode: GenerationMode) -> None:
    strategy, most = described[path][method].as_strategy(generation_mode=mode), 3 if path in NESTED else 5

    @given(case=strategy)
    @settings(database=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=most)
    def check(case: schemathesis.Case[Any]) -> None:
        key = {"Authorization": f"Bearer {KEY}"}
        answer = case.call(headers=key)
        too_large = answer.status_code == 413  # a refusal like others, which this check does not know
        case.validate_response(answer, excluded_checks=[*NOT_PROMISED, *[negative_data_rejection] * too_large])
        assert answer.status_code < 500

    check()


def test_the_description_has_every_error(ask: Ask) -> None:
    described = ask("GET", "/openapi.json").json
    assert set(described["paths"]) == {path for paths in PATHS.values() for path in paths}
    for path in REPLIES:
        answers = described["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "403", "404", "413", "415", "429", "503"} <= set(answers)
        assert "422" not in answers
