"""The JSON of answers, and the server does what its description says. A whole reply, a stream of texts and an error are
in `docs/guide/http.md`, where tests compare them with what the server writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from edgellm.llm import LLM
from tests.http.conftest import Ask, asker, conversation, serving

KEY = "k" * 43
CHAT = "/v1/chat/completions"


def test_a_stream_has_the_parts_of_a_whole_reply(ask: Ask) -> None:
    asked = conversation(max_tokens=4, logprobs=True, top_logprobs=2)
    whole = ask("POST", CHAT, asked).json
    answer = ask("POST", CHAT, asked | {"stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.body.endswith(b"data: [DONE]\n\n")
    # A busy machine may give notice.
    events = [event for event in answer.events if "notice" not in event.get("edgellm", {})]
    assert all(whole.keys() - event.keys() <= {"timings", "edgellm"} for event in events)
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    begin, *words, end, usage = events
    empty: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
    assert begin["choices"] == [empty | {"delta": {"role": "assistant", "content": ""}}]
    written = [event["choices"][0] for event in words]
    message, logprobs = whole["choices"][0]["message"], whole["choices"][0]["logprobs"]
    assert "".join(one["delta"].pop("content") for one in written) == message["content"]
    assert [one["token"] for choice in written for one in choice.pop("logprobs")["content"]] == [
        one["token"] for one in logprobs["content"]
    ]
    assert all(choice == {"index": 0, "delta": {}, "finish_reason": None} for choice in written)
    tokens = [token for event in words for token in event["edgellm"]["tokens"]]
    assert [(one.keys(), one["id"]) for one in tokens] == [
        (one.keys(), one["id"]) for one in whole["edgellm"]["tokens"]
    ]
    assert end["choices"] == [empty | {"delta": {}, "finish_reason": "length"}]
    assert end["timings"].keys() == whole["timings"].keys()
    assert end["edgellm"]["summary"].keys() == whole["edgellm"]["summary"].keys()
    assert (usage["choices"], usage["usage"].keys()) == ([], whole["usage"].keys())


def test_a_model_and_the_status(ask: Ask) -> None:
    assert ask("GET", "/v1/models/edgellm-verifier").json.keys() == {
        "id", "object", "created", "owned_by", "context_length", "loaded", "device", "embeds",
    }  # fmt: skip
    status = ask("GET", "/status").json
    assert status.keys() == {"model", "requests", "devices", "anonymous", "models", "loading", "mesh"}
    (model,) = status["models"]
    assert model.keys() == {
        "name", "draft", "verifier", "context_length", "sampling", "link", "memory", "users", "idle_s", "expires_s",
    }  # fmt: skip
    assert model["sampling"].keys() == {
        "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "origin",
    }  # fmt: skip


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
