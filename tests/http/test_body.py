"""Bodies and their fields: limits before they are parsed, other servers' parameters, one fault."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from pydantic import ValidationError

from edgellm.engine.grammar.json_schema import MAX_SCHEMA
from edgellm.http.dialects.anthropic import AnthropicRequest
from edgellm.http.dialects.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from edgellm.http.dialects.responses import ResponsesRequest
from edgellm.http.schemas import body
from edgellm.http.schemas.body import check_json
from edgellm.http.schemas.errors import ApiError
from edgellm.http.schemas.fields import MAX_TOKENS, NEUTRAL, ReplyRequest
from edgellm.http.schemas.requests import ChatRequest, CompletionRequest
from edgellm.spec.params import ReplyOptions
from tests.http.conftest import QUESTION, Ask, conversation
from tests.http.dialects.test_every_dialect import PATHS

TEXTS = ["", "a", '"', "\\", '\\"', "[{,:", '"]}', "é\n", "\\\\" * 3, "," * 9, "[" * 200]


JSON = st.recursive(
    st.sampled_from([*TEXTS, 1, -0.5, None, True]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=5),
)


def counted(value: Any) -> tuple[int, int, int]:
    """Return how many commas, nodes and levels the JSON of a value has."""
    if not isinstance(value, (dict, list)):
        return 0, 0, 0
    parts = [counted(part) for part in (value.values() if isinstance(value, dict) else value)]
    commas = max(0, len(value) - 1) + sum(part[0] for part in parts)
    nodes = 1 + (len(value) if isinstance(value, dict) else 0) + sum(part[1] for part in parts)
    return commas, nodes, 1 + max((part[2] for part in parts), default=0)


@hypothesis.given(st.lists(JSON), st.booleans())
def test_limits_count_values_and_nothing_in_texts(value: list[Any], escaped: bool) -> None:
    data = json.dumps(value, ensure_ascii=escaped).encode()
    limits = dict(zip(("MAX_VALUES", "MAX_NODES", "MAX_DEPTH"), counted(value), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(body, name, limit)
        check_json(data)
        for name, limit in limits.items():
            patch.setattr(body, name, limit - 1)
            with pytest.raises(ApiError):
                check_json(data)
            patch.setattr(body, name, limit)


def test_the_loop_answers_others_while_a_body_is_read(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def check(data: bytes) -> None:
        if data == b"{}":  # a schema, which is looked at when the fields are
            begun.set()
            assert go.wait(60)

    monkeypatch.setattr(body, "check_json", check)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, "POST", "/v1/chat/completions", conversation(guided_json="{}", max_tokens=1))
        assert begun.wait(60)
        assert ask("GET", "/health").status == 200
        assert not asked.done()
        go.set()
        assert asked.result().status == 200


def lists(count: int) -> list[list[object]]:
    return [[]] * count


def schema(given: object) -> dict[str, object]:
    return conversation(response_format={"type": "json_schema", "json_schema": {"schema": given}})


CALL = {"function": {"name": "f", "arguments": json.dumps({"a": lists(40_000)})}}
MANY = range(300_000)


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        ("chat/completions", schema({"properties": {str(n): True for n in MANY}}), 413),
        ("chat/completions", schema({"enum": ["a" * 2**15]}), 400),
        ("chat/completions", schema({"uniqueItems": True, "items": {"$ref": "#/" + "a/" * 2**14}}), 400),
        ("chat/completions", conversation(guided_json=json.dumps({"enum": lists(40_000)})), 413),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, 413),
        ("chat/completions", conversation(**{f"x{n}": 1 for n in MANY}), 413),
        ("completions", {"prompt": [5.5] * 10_000}, 400),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_long_work_is_refused_with_its_first_fault(ask: Ask, path: str, asked: dict[str, object], status: int) -> None:
    answer = ask("POST", f"/v1/{path}", asked)
    assert answer.status == status
    assert len(answer.error["message"]) < 300
    if status == 413:
        assert answer.error["code"] == "request_too_large"


def test_a_schema_names_its_limit(ask: Ask) -> None:
    answer = ask("POST", "/v1/chat/completions", schema({"$comment": "a" * MAX_SCHEMA}))
    assert f"at most {MAX_SCHEMA} are allowed" in answer.error["message"]


@pytest.mark.parametrize("coding", ["utf-16", "utf-32", "latin-1"])
def test_a_body_is_utf_8(ask: Ask, coding: str) -> None:
    answer = ask("POST", "/v1/chat/completions", json.dumps({"messages": "é"}, ensure_ascii=False).encode(coding))
    assert (answer.status, "UTF-8" in answer.error["message"]) == (400, True)


# --- fields -----------------------------------------------------------------------------------------------------------


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
        ("temperature", 3, 3.0), ("temperature", 0, 0.0), ("top_p", 0, sys.float_info.min),
        ("top_p", -1, sys.float_info.min), ("top_p", 1.5, 1.0), ("top_k", -1, 0), ("top_k", -100, 0),
        ("top_k", 40.0, 40), ("top_k", 2**31, MAX_TOKENS),
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


def test_what_zero_means() -> None:
    for given, expected in ((4.0, 4), (0, MAX_TOKENS), (0.0, MAX_TOKENS)):
        assert OllamaOptions.model_validate({"num_predict": given}).named() == {"max_tokens": expected}
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


def options(form: type[ReplyRequest], **more: object) -> ReplyOptions:
    """Return the options of a reply to a request of any API."""
    asked: Any = form.model_validate({**VALID[form], **more})
    if form is AnthropicRequest:
        asked = asked.completion()
    elif form is ResponsesRequest:
        asked = asked.chat(asked.turns())
    elif form in (OllamaChatRequest, OllamaGenerateRequest):
        asked = asked.request()
    found: ReplyOptions = asked.options(ReplyOptions(), CONTEXT)
    return found


@pytest.mark.parametrize("form", VALID, ids=lambda form: form.__name__)
def test_a_request_without_a_temperature_leaves_it_to_the_model(form: type[ReplyRequest]) -> None:
    assert options(form).temperature is None


def test_a_schema_is_kept_in_every_api() -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    for form, named in (
        (AnthropicRequest, {"output_format": config["format"]}), (AnthropicRequest, {"output_config": config}),
        (OllamaChatRequest, {"format": SCHEMA}), (ResponsesRequest, {"text": config}),
    ):  # fmt: skip
        assert json.loads(options(form, **named).json_schema or "") == SCHEMA


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
        (CompletionRequest, {"prompt": [{}] * 4000}), (ResponsesRequest, {"input": [[]] * 4000}),
        (OllamaGenerateRequest, {"prompt": "a", "model": "m", "images": [object()] * 4000}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_lists_tell_their_first_fault(form: type[ReplyRequest], given: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as raised:
        form.model_validate(given)
    assert raised.value.error_count() < 20


@pytest.mark.parametrize("role", ["USER", "User"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/messages", "/v1/responses"])
def test_roles_may_be_in_capitals(ask: Ask, path: str, role: str) -> None:
    turn = {"role": role, "content": QUESTION}
    asked = {**PATHS.get(path, {}), "messages": [turn], "max_tokens": 1}
    asked = {"input": [turn], "max_output_tokens": 1} if path == "/v1/responses" else asked
    assert ask("POST", path, asked).status == 200
