"""What holds in every dialect: plain words about malformed requests and errors in the form of the dialect, the key,
verified text that is insisted on, and the model's own sampling."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine.embedding.embedder import Embedder
from edgellm.http.model_host import ServedEmbedder
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from testkit.gguf.changed import with_sampling
from tests.http.conftest import QUESTION, Answer, Ask, asker, serving
from tests.http.test_streaming import failing, opened

SAID: Any = {"role": "user", "content": "Where is my mug?"}
TOOL: Any = {"name": "clock", "input_schema": {}}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [SAID], "max_tokens": 1, "stream": False, "temperature": 0.5, "top_p": 0.5, "top_k": 5,
        "min_p": 0.1, "n": 1, "seed": 1, "stop": ["."], "repeat_penalty": 1.1, "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 1, "tools": [{"function": {"name": "clock"}}],
        "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "think": False, "budget": 1.0,
    },
    "/v1/completions": {
        "prompt": "The film", "max_tokens": 1, "stream": False, "temperature": 0.5, "logprobs": 1,
    },
    "/v1/messages": {
        "max_tokens": 1, "messages": [SAID], "system": "Be short.", "tools": [TOOL], "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"}, "stream": False, "temperature": 0.5, "top_p": 0.5, "top_k": 5,
        "stop_sequences": ["."], "metadata": {"user_id": "me"}, "model": "edgellm-verifier", "require_verified": True,
    },
    "/v1/messages/count_tokens": {
        "messages": [SAID], "system": [{"type": "text", "text": "Be short."}], "tools": [TOOL],
        "tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}, "model": "edgellm-verifier",
    },
    "/v1/responses": {
        "model": "edgellm-verifier", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello."}]}],
        "instructions": "Be short.", "store": False, "stream": False, "max_output_tokens": 1, "temperature": 0.5,
        "top_p": 0.5, "tools": [{"type": "function", "name": "clock"}], "tool_choice": "none", "metadata": {"a": "b"},
        "parallel_tool_calls": False, "text": {"format": {"type": "text"}}, "reasoning": {"effort": "none"},
        "truncation": "auto", "user": "me", "background": False, "previous_response_id": None,
    },
    "/v1/embeddings": {
        "model": "bert", "input": ["Hello."], "encoding_format": "float", "dimensions": 64, "user": "me",
    },
    "/api/embed": {
        "model": "bert", "input": "Hello.", "truncate": True, "dimensions": 64, "keep_alive": "5m",
    },
    "/api/embeddings": {"model": "bert", "prompt": "Hello.", "keep_alive": 5},
    "/api/chat": {
        "model": "edgellm-verifier", "messages": [SAID | {"tool_calls": [], "images": [], "thinking": ""}],
        "stream": False, "options": {"num_predict": 1, "temperature": 0.5, "top_k": 3, "stop": ["."], "seed": 1},
        "think": False, "tools": [{"type": "function", "function": {"name": "clock"}}], "format": "",
        "keep_alive": "5m", "require_verified": True,
    },
    "/api/generate": {
        "model": "edgellm-verifier", "prompt": "Where is my mug?", "system": "Be short.", "raw": False,
        "options": {"num_predict": 1, "min_p": 0.5, "top_p": 0.5, "repeat_penalty": 1.1}, "stream": True,
        "think": False, "suffix": "", "template": "", "context": [], "images": [], "keep_alive": 5,
    },
    "/api/show": {"model": "edgellm-verifier", "name": ""},
}  # fmt: skip
"""A valid request for each path, with every one of its parameters."""

BODIES = (
    b"", b"{", b"null", b"[]", b'"text"', b"5", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"messages": ' + b"[" * 100_000,
    b'{"model": NaN}', b'{"stream": Infinity, "model": 5}', b'{"": 1}',
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    -1, 10**400, 1e300, "", "\ud800", "x" * 600, [5], [[]], {"a": {}}, [{"type": "image"}], True, {"a": "\ud800"},
)  # fmt: skip
JARGON = ("Input should", "pydantic", "alidation", "no parameter .", "Traceback", "model_", "type=")


def message(path: str, answer: Any) -> str:
    """Return the message of an error, whose form must be that of the dialect."""
    if path.startswith("/api/"):
        assert set(answer) == {"error"}
        return answer["error"]
    if not path.startswith("/v1/messages"):
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return answer["error"]["message"]
    assert set(answer) == {"type", "error"}
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
    return answer["error"]["message"]


@pytest.fixture(scope="module")
def short(f32_pair: tuple[Path, Path], embedder: Embedder) -> Iterator[Ask]:
    """A server with little context, whose replies are therefore short, and which nothing may surprise."""
    surprises: list[str] = []
    with (
        LLM.open(*f32_pair, threads=1, n_ctx=200) as pair,
        serving(pair, "edgellm-verifier", on_event=surprises.append) as server,
    ):
        server.models.open_embedder(ServedEmbedder("bert", embedder))
        yield asker(server)
    assert surprises == []


def check(path: str, ask: Ask, body: bytes) -> int:
    answer = ask("POST", path, body)
    if answer.status >= 400:
        said = message(path, answer.json)
        assert answer.status < 500, said
        assert 10 < len(said) < 400
        assert not [word for word in JARGON if word in said], said
    return answer.status


@pytest.mark.parametrize("path", PATHS)
def test_the_request_without_a_flaw_is_answered(path: str, short: Ask) -> None:
    assert short("POST", path, PATHS[path]).status == 200


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_no_request(path: str, short: Ask) -> None:
    empty = {b"{}": {200}, b'{"": 1}': {200}} if path == "/api/show" else {}  # the default model
    for body in BODIES:
        assert check(path, short, body) in empty.get(body, {400, 415})


@pytest.mark.nightly
@pytest.mark.parametrize("path", PATHS)
def test_each_parameter_with_values_that_are_not_meant(path: str, short: Ask) -> None:
    """At least 79 requests for each path that has many parameters."""
    whole = PATHS[path]
    requests = [whole | {name: value} for name in whole for value in VALUES]
    for name, value in whole.items():
        nested = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        for inner in nested if isinstance(nested, dict) else ():
            changed = [nested | {inner: wrong} for wrong in (5, "", [7], {"b": 1}, None)]
            requests += [whole | {name: [one] if isinstance(value, list) else one} for one in changed]
    statuses = [check(path, short, json.dumps(request).encode()) for request in requests]
    assert len(statuses) >= (79 if len(whole) > 5 else 22)
    assert sum(status in (400, 404) for status in statuses) > 0.5 * len(statuses)


@pytest.mark.parametrize("path", PATHS)
def test_other_methods_and_types_have_the_form_of_the_dialect(path: str, short: Ask) -> None:
    answer = short("DELETE", path)
    assert answer.status == 405
    assert "method" in message(path, answer.json)
    missing = short("POST", f"{path}/nothing", {})
    assert missing.status == 404
    assert message(path, missing.json)


# --- what is well-formed ----------------------------------------------------------------------------------------------


REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [SAID], "max_tokens": 4},
    "/v1/responses": {"input": "Where is my mug?", "max_output_tokens": 4},
    "/api/chat": {"model": "edgellm-draft", "messages": [SAID]},
    "/api/generate": {"model": "edgellm-draft", "prompt": "Where is my mug?"},
}
every = pytest.mark.parametrize("path", REQUESTS)
KEY = "k" * 43


def said(answer: Answer) -> str:
    """Return the message of a refusal."""
    error = answer.json["error"]
    return str(error if isinstance(error, str) else error["message"])


@every
def test_an_error_in_the_middle_of_a_stream_ends_it_in_the_form_of_the_dialect(path: str) -> None:
    with opened(failing) as server:
        answer = asker(server)("POST", path, {**REQUESTS[path], "model": "made-up", "stream": True})
    assert answer.status == 200
    last: Any = json.loads(answer.body.split(b"data: ")[-1].strip().splitlines()[-1])
    if path == "/v1/messages":
        assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
        error = last["error"]["message"]
    elif path == "/v1/responses":
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        error = last["response"]["error"]["message"]
    else:
        error = last["error"]
    assert "The verifier is gone." in error


@pytest.mark.parametrize("path", [*REQUESTS, "/v1/chat/completions"])
def test_without_a_verifier_none_can_be_required(path: str, f32_pair: tuple[Path, Path]) -> None:
    with LLM.open(f32_pair[0], "none", threads=1) as pair, serving(pair, "edgellm-draft") as server:
        ask = asker(server)
        for more, headers in (({"require_verified": True}, {}), ({}, {"X-EdgeLLM-Require-Verified": "true"})):
            answer = ask("POST", path, {**REQUESTS.get(path, {"messages": [SAID]}), "stream": False, **more}, headers)
            assert (answer.status, "no verifier is open here" in said(answer)) == (400, True)


def test_a_request_without_a_temperature_is_sampled_as_the_model_wants(
    f32_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """The summary tells the seed, which repeats the text."""
    path = with_sampling(f32_pair[1], tmp_path / "verifier.gguf", temp=5.0, top_k=0)
    with LLM.open("none", path, threads=1) as pair, serving(pair, "sampled") as server:

        def written(**more: object) -> tuple[str, int]:
            found = asker(server)("POST", "/v1/chat/completions", {"messages": [SAID], "max_tokens": 16, **more}).json
            return found["choices"][0]["message"]["content"], found["edgellm"]["summary"]["seed"]

        text, seed = written()
        assert text != written()[0]
        assert written(seed=seed) == (text, seed)


def refusal(ask: Ask, path: str, headers: dict[str, str]) -> tuple[int, str]:
    answer = ask("POST", path, REQUESTS[path], headers)
    return answer.status, said(answer)


@every
def test_the_key_is_taken_from_either_header(path: str) -> None:
    with opened(failing, key=KEY) as server:
        ask = asker(server)
        wrong: tuple[dict[str, str], ...] = ({}, {"X-Api-Key": KEY[1:]}, {"Authorization": f"Bearer {KEY}x"})
        for headers in (*wrong, {"X-Api-Key": KEY, "Authorization": "Bearer other"}):
            status, message = refusal(ask, path, headers)
            assert (status, "API key" in message) == (401, True)
        for headers in ({"X-Api-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            status, message = refusal(ask, path, {**headers, "Host": "example.org"})
            assert (status, "not a name of this server" in message) == (403, True)
            answer = ask("POST", path, {**REQUESTS[path], "model": "other"}, headers)
            assert (answer.status, "not served here" in said(answer)) == (404, True)


ASKED: Any = {"model": "edgellm-verifier", "messages": [{"role": "user", "content": QUESTION}]}


def test_system_prompts_stop_sequences_and_blocks(server: HttpServer, ask: Ask) -> None:
    import anthropic

    blocks: Any = [
        {"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in QUESTION.partition("\n\n")
    ]
    system: Any = [{"type": "text", "text": "You are at home."}]
    with anthropic.Anthropic(base_url=server.url, api_key="none is needed", max_retries=0) as client:
        stopped = client.messages.create(
            model="edgellm-verifier", max_tokens=40, messages=[{"role": "user", "content": blocks}],
            stop_sequences=[" is"],
        )  # fmt: skip
        counted = [
            client.messages.count_tokens(**ASKED, system=one).input_tokens for one in ("", "You are at home.", system)
        ]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert counted[0] < counted[1] == counted[2]
    raw = ask("POST", "/v1/messages", {**ASKED, "max_tokens": 1, "service_tier": "auto", "system": system})
    assert raw.headers["x-edgellm-ignored"] == "service_tier"
    assert raw.headers["x-edgellm-verified"] == "1.0000"
    usage = raw.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted[1]
