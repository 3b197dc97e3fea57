"""Malformed requests to every path of every dialect: refused in plain words, in the form of the dialect."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine.embedding.embedder import Embedder
from edgellm.http.model_host import ServedEmbedder
from edgellm.llm import LLM
from tests.http.conftest import Ask, asker, serving

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
