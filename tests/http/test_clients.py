"""Requests as clients send them: with fields that are unknown here, and turns that they have kept."""

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from edgellm.engine import Model
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from tests.http.conftest import QUESTION, Ask, asker, conversation, serving

CHAT = "/v1/chat/completions"


def test_unknown_fields_are_named_and_change_nothing(ask: Ask) -> None:
    plain = ask("POST", CHAT, conversation(max_tokens=4))
    assert "x-edgellm-ignored" not in plain.headers
    turns: Any = [{"role": "user", "content": QUESTION, "cache_control": {}, "evil, \r\nx-name": 1}]
    answer = ask("POST", CHAT, {"messages": turns, "max_tokens": 4, "mirostat": 2, "metadata": {}, "store": True})
    assert answer.json["choices"] == plain.json["choices"]
    assert answer.headers["x-edgellm-ignored"].split(", ") == [
        "messages.0.cache_control", "messages.0.evil????x-name", "metadata", "mirostat", "store",
    ]  # fmt: skip
    many = ask("POST", CHAT, conversation(max_tokens=1, stream=True, **{f"field{n:03}" * 20: n for n in range(50)}))
    assert many.status == 200
    assert len(many.headers["x-edgellm-ignored"]) < 2000


def test_a_strict_server_refuses_them(own: LLM) -> None:
    with serving(own, "edgellm-verifier", strict=True) as server:
        ask = asker(server)
        more: tuple[tuple[str, object], ...]
        more = ("mirostat", 2), ("tools", [{"type": "custom"}]), ("reasoning_effort", "high"), ("think", True), ("", 1)
        for name, value in more:
            for stream in (False, True):
                answer = ask("POST", CHAT, conversation(**{name: value}, stream=stream))
                assert (answer.status, answer.error["code"]) == (400, "unknown_parameter")
                assert answer.error["message"].startswith(f"'{answer.error['param']}' has no effect here.")
        assert ask("POST", CHAT, conversation(max_tokens=1)).status == 200
        thinking = {"messages": conversation()["messages"], "thinking": {"type": "enabled", "budget_tokens": 9}}
        assert ask("POST", "/v1/messages/count_tokens", thinking).status == 400


def test_a_second_turn_as_clients_send_it(ask: Ask) -> None:
    """With nulls, with litellm's own fields, and in parts."""
    first, again = {"role": "user", "content": QUESTION}, {"role": "user", "content": "And where?"}
    kept: dict[str, Any] = {"role": "assistant", "content": "On Friday."}
    nulls = {"tool_calls": None, "function_call": None, "reasoning_content": None}
    own = {"provider_specific_fields": {"refusal": None}, "annotations": []}
    parts = {"role": "user", "content": [{"type": "text", "text": text} for text in QUESTION.partition("\n\n")]}
    wanted, *found = (
        ask("POST", CHAT, {"messages": turns, "max_tokens": 8}).json["choices"]
        for turns in ([first, kept, again], [first, {**kept, **nulls, **own}, again], [parts, kept, again])
    )
    assert found == [wanted, wanted]
    silent = [first, {"role": "assistant", "content": None}, again]
    assert ask("POST", CHAT, {"messages": silent, "max_tokens": 1}).status == 200


def test_a_message_without_text_is_refused_in_plain_words(ask: Ask) -> None:
    answer = ask("POST", CHAT, {"messages": [{"role": "user", "content": None}]})
    assert answer.error["message"] == "A message of the role user has no content. Give it a text."
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    answer = ask("POST", CHAT, {"messages": [{"role": "user", "content": image}]})
    assert answer.error["message"].startswith("The question has a part of type 'image_url', and the models here read")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": "5"}, "max_tokens is '5'. It should be a valid integer."),
        ({"max_tokens": 0}, "max_tokens is 0. It should be greater than or equal to 1."),
        ({"stream": "yes"}, "stream is 'yes'. It should be a valid boolean."),
        ({"stop": ["a"] * 17}, "stop has a wrong value. List should have at most 16 items."),
        ({"messages": "Hello"}, "messages is 'Hello'. It should be a valid list."),
        ({"messages": []}, "messages is []. List should have at least 1 item."),
        ({"messages": [{"role": "me", "content": "x"}]}, "messages.0.role is 'me'. It should be 'system', 'dev"),
        ({"messages": [5]}, "messages.0 is 5. It should be a valid dictionary."),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"retrieval": "dreams"}, "retrieval is 'dreams', and 'dreams' is not a source. Choose auto"),
    ],
    ids=str,
)
def test_errors_say_what_to_send(ask: Ask, more: dict[str, object], said: str) -> None:
    answer = ask("POST", CHAT, conversation() | more)
    assert (answer.status, answer.error["param"]) == (400, answer.error["message"].partition(" ")[0])
    assert answer.error["message"].startswith(said)
    assert not any(word in answer.error["message"] for word in ("Input should", "pydantic", "validation"))


class Plan(pydantic.BaseModel):
    day: Literal["Monday", "Friday"]
    hours: list[int] = pydantic.Field(min_length=1, max_length=3)
    note: str | None
    share: float = pydantic.Field(ge=0, lt=1)
    code: str = pydantic.Field(pattern=r"^[A-Z]{2}\d{2}$")
    on: date


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_openai_client_parses_a_reply_by_its_model(client: openai.OpenAI, temperature: float) -> None:
    asked: Any = [{"role": "user", "content": QUESTION}]
    done = client.chat.completions.parse(
        model="edgellm-verifier", messages=asked, response_format=Plan, temperature=temperature, seed=1, max_tokens=400
    )
    assert done.choices[0].finish_reason == "stop"
    assert isinstance(done.choices[0].message.parsed, Plan)


def test_json_objects_and_formats_that_are_refused(ask: Ask) -> None:
    answer = ask("POST", CHAT, conversation(response_format={"type": "json_object"}, max_tokens=4)).json
    assert answer["choices"][0]["message"]["content"].startswith("{")
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}
    refused = ask("POST", CHAT, conversation(response_format=form))
    assert (refused.status, "The JSON schema cannot be used" in refused.error["message"]) == (400, True)


def test_keywords_that_a_reply_may_break_are_named(ask: Ask) -> None:
    names = {"type": "array", "items": {"type": "string", "format": "path", "maxLength": 9}, "maxItems": 2}
    schema = {"type": "object", "properties": {"names": {**names, "uniqueItems": True}}, "required": ["names"]}
    form = {"type": "json_schema", "json_schema": {"name": "names", "schema": schema}}
    answer = ask("POST", CHAT, conversation(response_format=form, max_tokens=100))
    assert answer.status == 200
    assert answer.headers["x-edgellm-ignored"] == "format.path, uniqueItems"
    assert isinstance(json.loads(answer.json["choices"][0]["message"]["content"])["names"], list)


def test_head_answers_where_get_does(ask: Ask) -> None:
    for path in ("/", "/health", "/api/version", "/api/tags"):
        answer = ask("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")


@pytest.fixture(scope="module")
def leaving(f32_pair: tuple[Path, Path]) -> Iterator[tuple[Ask, VerifierServer]]:
    """A pair whose verifier can leave."""
    with (
        Model.load(f32_pair[1]) as big,
        VerifierServer(big, Address("127.0.0.1", 0), context=512, sessions=2, threads=1) as verifier,
        LLM.open(f32_pair[0], str(verifier.address), threads=1) as pair,
        serving(pair, "edgellm-verifier") as server,
    ):
        yield asker(server), verifier


def test_unverified_text_can_be_refused(leaving: tuple[Ask, VerifierServer]) -> None:
    ask, verifier = leaving
    header = {"X-EdgeLLM-Require-Verified": "true"}
    for more, headers in (({"require_verified": True}, {}), ({}, header)):
        answer = ask("POST", CHAT, conversation(max_tokens=8, **more), headers)
        assert (answer.status, answer.headers["x-edgellm-verified"]) == (200, "1.0000")
        refused = ask("POST", CHAT, conversation(budget=0.5, **more), headers)
        assert (refused.status, refused.error["param"]) == (400, "require_verified")
    verifier.stop(0)
    for more, headers in (({"require_verified": True}, {}), ({}, header)):
        answer = ask("POST", CHAT, conversation(max_tokens=8, **more), headers)
        assert (answer.status, answer.error["code"]) == (503, "not_verified")
        events = ask("POST", CHAT, conversation(max_tokens=8, stream=True, **more), headers).events
        assert events[-1]["error"]["code"] == "not_verified"
    answer = ask("POST", CHAT, conversation(max_tokens=8))
    assert (answer.status, answer.headers["x-edgellm-verified"]) == (200, "0.0000")
