"""Fields that requests have in common: limits that mean none, other servers' parameters, and the first fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from edgellm.http.dialects.anthropic import AnthropicRequest
from edgellm.http.dialects.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from edgellm.http.dialects.responses import ResponsesRequest
from edgellm.http.schemas.errors import ApiError
from edgellm.http.schemas.fields import MAX_TOKENS, NEUTRAL, ReplyRequest
from edgellm.http.schemas.requests import ChatRequest, CompletionRequest
from edgellm.spec.params import ReplyOptions
from tests.http.conftest import QUESTION, Ask, conversation
from tests.http.dialects.test_malformed import PATHS

CONTEXT = 4096
SAID = {"messages": [{"role": "user", "content": "Hi"}]}
VALID: dict[type[ReplyRequest], dict[str, Any]] = {
    ChatRequest: SAID, CompletionRequest: {"prompt": "Hi"}, AnthropicRequest: {**SAID, "max_tokens": 5},
    ResponsesRequest: {"input": "Hi"}, OllamaChatRequest: {**SAID, "model": "m"},
    OllamaGenerateRequest: {"prompt": "Hi", "model": "m"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("temperature", 3, 3.0), ("temperature", 0, 0.0), ("top_p", 0, 1e-9), ("top_p", 0.0, 1e-9), ("top_p", -1, 1e-9),
        ("top_p", 1.5, 1.0), ("top_k", -1, 0), ("top_k", -100, 0), ("top_k", 40.0, 40), ("top_k", 2**31, MAX_TOKENS),
        ("min_p", -0.5, 0.0), ("min_p", 2, 1.0), ("repeat_penalty", 0, 1.0), ("repeat_penalty", -1, 1.0),
        ("repeat_penalty", 0.001, 0.01), ("repeat_penalty", 1000, 100.0), ("frequency_penalty", 2.5, 2.5),
        ("seed", 1.0, 1), ("seed", -1, None), ("seed", -1.0, None), ("seed", -2, 2**64 - 2),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("stop", "", ()), ("stop", [""], ()), ("stop", [], ()), ("stop", ["", "a", ""], ("a",)), ("stop", "a", ("a",)),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_peers_take(name: str, given: Any, expected: Any) -> None:
    chat = ChatRequest.model_validate({**SAID, name: given})
    by_ollama = OllamaChatRequest.model_validate({**SAID, "model": "m", "options": {name: given}}).request()
    for asked in (chat, by_ollama):
        assert getattr(asked.options(ReplyOptions(), CONTEXT), name) == expected


@pytest.mark.parametrize("given", [-1, -2, -1.0, 2_000_000, 2**31 - 1, 2**63 - 1, 10**30, 1e9, MAX_TOKENS])
def test_a_longest_reply_without_end_is_what_fits(given: float) -> None:
    for form, name in (
        (ChatRequest, "max_tokens"), (ChatRequest, "max_completion_tokens"), (CompletionRequest, "max_tokens"),
    ):  # fmt: skip
        asked: Any = form.model_validate({**VALID[form], name: given})
        assert asked.options(ReplyOptions(), CONTEXT).max_tokens >= CONTEXT
    assert AnthropicRequest.model_validate({**VALID[AnthropicRequest], "max_tokens": given}).max_tokens == MAX_TOKENS
    assert ResponsesRequest.model_validate({"input": "a", "max_output_tokens": given}).max_output_tokens == MAX_TOKENS
    assert OllamaOptions.model_validate({"num_predict": given}).named() == {"max_tokens": MAX_TOKENS}


@pytest.mark.parametrize(("given", "expected"), [(4.0, 4), (0, MAX_TOKENS), (0.0, MAX_TOKENS), (7, 7)])
def test_num_predict(given: float, expected: int) -> None:
    assert OllamaOptions.model_validate({"num_predict": given}).named() == {"max_tokens": expected}


def test_logprobs_of_no_other_token_need_no_logprobs() -> None:
    assert ChatRequest.model_validate({**SAID, "top_logprobs": 0}).options(ReplyOptions(), CONTEXT).logprobs is None


SCHEMA = {"enum": ["yes", "no"]}


@pytest.mark.parametrize("form", [ChatRequest, CompletionRequest], ids=lambda form: form.__name__)
@pytest.mark.parametrize(
    "named",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "text", "schema": SCHEMA}},
        {"json_schema": SCHEMA}, {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_is_kept_by_every_name(form: type[ChatRequest], named: dict[str, Any]) -> None:
    asked = form.model_validate({**VALID[form], **named})
    assert json.loads(asked.options(ReplyOptions(), CONTEXT).json_schema or "") == SCHEMA
    assert list(asked.unknown()) == []


def test_a_schema_is_kept_in_every_api() -> None:
    asked = AnthropicRequest.model_validate({**VALID[AnthropicRequest], "output_format": {"type": "json_schema",
                                             "schema": SCHEMA}}).completion()  # fmt: skip
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    newer = AnthropicRequest.model_validate({**VALID[AnthropicRequest], "output_config": config}).completion()
    by_ollama = OllamaChatRequest.model_validate({**VALID[OllamaChatRequest], "format": SCHEMA}).request()
    response = ResponsesRequest.model_validate({"input": "Hi", "text": config})
    for one in (asked, newer, by_ollama, response.chat(response.turns())):
        assert json.loads(one.options(ReplyOptions(), CONTEXT).json_schema or "") == SCHEMA


CONSTRAINTS = [name for name in NEUTRAL if name not in ("best_of", "functions", "function_call", "modalities", "echo")]


@pytest.mark.parametrize("form", VALID, ids=lambda form: form.__name__)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_what_would_change_a_reply_is_kept_or_refused(form: type[ReplyRequest], name: str) -> None:
    kept = name in form.model_fields or (
        form in (ChatRequest, CompletionRequest) and name in ("json_schema", "guided_json")
    )
    empty: tuple[Any, ...] = ("", {}, [], None, False)
    for nothing in empty:
        if not kept:
            assert list(form.model_validate({**VALID[form], name: nothing}).unknown()) == []
    if kept:
        return
    for given in ("root ::= 'a'", {"choice": ["yes"]}, ["yes"]):
        with pytest.raises(ApiError, match=f"{name} (is|has)"):
            form.model_validate({**VALID[form], name: given})


@pytest.mark.parametrize(
    "more",
    [
        {"guided_json": "{"}, {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
        {"guided_json": SCHEMA, "json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "regex", "pattern": "a"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_single_schema_is_refused(ask: Ask, more: dict[str, object]) -> None:
    answer = ask("POST", "/v1/chat/completions", conversation(**more))
    assert (answer.status, len(answer.error["message"]) < 300) == (400, True)


@pytest.mark.parametrize(
    ("form", "given"),
    [
        (ChatRequest, {"messages": [{}] * 4000}), (ChatRequest, {**SAID, "stop": [5] * 4000}),
        (ChatRequest, {**SAID, "logit_bias": {f"x{n}": "a" for n in range(4000)}}),
        (CompletionRequest, {"prompt": [{}] * 4000}), (ResponsesRequest, {"input": [[]] * 4000}),
        (ResponsesRequest, {"input": "a", "metadata": {str(n): n for n in range(4000)}}),
        (OllamaGenerateRequest, {"prompt": "a", "model": "m", "images": [object()] * 4000}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_lists_tell_their_first_fault(form: type[ReplyRequest], given: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as raised:
        form.model_validate(given)
    assert raised.value.error_count() < 20


@pytest.mark.parametrize("role", ["USER", "User", "user"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages", "/v1/responses"])
def test_roles_may_be_in_capitals(ask: Ask, path: str, role: str) -> None:
    turn = {"role": role, "content": QUESTION}
    asked = {**PATHS.get(path, {}), "messages": [turn], "max_tokens": 1}
    asked = {"input": [turn], "max_output_tokens": 1} if path == "/v1/responses" else asked
    assert ask("POST", path, asked).status == 200
