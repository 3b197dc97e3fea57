"""Conversations that are longer than the context: refused, or without their oldest turns where a client asks for it."""

from typing import Any

from edgellm.engine import Message
from edgellm.llm import LLM
from edgellm.llm.messages import without_turns
from edgellm.spec.types import Notice
from tests.http.conftest import QUESTION, Ask

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Answer in one sentence."}
FILE = "The film night is on Friday at 20:00."


def long_conversation(own: LLM, **first: Any) -> list[dict[str, Any]]:
    """A system prompt and twelve turns of which about six fit, with a question behind them."""
    filler = "mug " * (own.context_length // 8)
    said = [{"role": "user", "content": f"{filler}?"}, {"role": "assistant", "content": "A mug."}] * 12
    said[0] = {**said[0], **first}
    return [SYSTEM, *said, {"role": "user", "content": "When is the film night?"}]


def test_nothing_is_left_out_unasked_or_for_a_question_that_is_too_long_alone(ask: Ask, own: LLM) -> None:
    for more in ({}, {"truncation": "disabled"}):
        answer = ask("POST", CHAT, {"messages": long_conversation(own), "max_tokens": 4, **more})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    refused = ask("POST", CHAT, {"messages": long_conversation(own), "truncation": "middle"})
    assert refused.status == 400
    alone = [*long_conversation(own), {"role": "user", "content": "mug " * own.context_length}]
    refused = ask("POST", CHAT, {"messages": alone, "truncation": "auto"})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")


def test_the_oldest_turns_are_left_out_and_the_answer_says_how_many(ask: Ask, own: LLM) -> None:
    messages = long_conversation(own, context=[FILE])
    answer = ask("POST", CHAT, {"messages": messages, "max_tokens": 8, "truncation": "auto"})
    assert answer.status == 200
    count = int(answer.headers["x-edgellm-turns-left-out"])
    assert 0 < count <= 12
    ours = answer.json["edgellm"]
    assert ours["turns_left_out"] == count
    assert f"longer than the context of {own.context_length} tokens" in ours["notices"][0]
    left = messages[1 + 2 * count :]
    kept = [SYSTEM, {**left[0], "content": f"{FILE}\n\n{left[0]['content']}"}, *left[1:]]
    alone = ask("POST", CHAT, {"messages": kept, "max_tokens": 8})
    assert alone.json["choices"][0]["message"] == answer.json["choices"][0]["message"]
    assert alone.json["usage"]["prompt_tokens"] == answer.json["usage"]["prompt_tokens"]
    assert "x-edgellm-turns-left-out" not in alone.headers
    assert "turns_left_out" not in alone.json["edgellm"]


def test_a_stream_says_it_once_before_the_first_token(ask: Ask, own: LLM) -> None:
    body = {"messages": long_conversation(own), "max_tokens": 4, "truncation": "auto", "stream": True}
    ours = [event.get("edgellm", {}) for event in ask("POST", CHAT, body).events]
    said = [number for number, one in enumerate(ours) if one.get("turns_left_out")]
    assert len(said) == 1
    assert "oldest turns" in ours[said[0]]["notice"]
    assert said[0] < next(number for number, one in enumerate(ours) if one.get("tokens"))


def test_responses_take_the_field_of_openai(ask: Ask, own: LLM) -> None:
    messages = [{"role": one["role"], "content": one["content"]} for one in long_conversation(own)]
    refused = ask("POST", "/v1/responses", {"input": messages, "max_output_tokens": 4})
    assert refused.status == 400
    answer = ask("POST", "/v1/responses", {"input": messages, "max_output_tokens": 4, "truncation": "auto"})
    assert answer.status == 200
    assert answer.json["truncation"] == "auto"
    assert int(answer.headers["x-edgellm-turns-left-out"]) > 0


def test_what_fits_is_sent_whole_with_its_context(ask: Ask) -> None:
    question = {"role": "user", "content": "When is the film night?", "context": [f" {FILE}\n", " "]}
    answers = [
        ask("POST", CHAT, {"messages": [one], "max_tokens": 8, "truncation": "auto"})
        for one in (question, {"role": "user", "content": QUESTION})
    ]
    assert answers[0].json["choices"] == answers[1].json["choices"]
    assert "x-edgellm-turns-left-out" not in answers[0].headers
    assert "x-edgellm-ignored" not in answers[0].headers


def test_ever_more_turns_are_left_out(own: LLM) -> None:
    """1, then 2 and 4 more, so that the next request is cut at the same place."""
    long = [Message(one["role"], one["content"]) for one in long_conversation(own)]
    for talk in (long, [*long[:3], *long[1:]]):
        told: list[Notice] = []
        reply = own.reply(talk, max_tokens=2, truncation="auto")
        reply.listen(told.append)
        list(reply)
        assert [notice.turns_left_out for notice in told] == [7]


def test_system_prompts_and_context_stay() -> None:
    messages = [
        Message("system", "Be brief."), Message("user", "One", context=("file",)), Message("assistant", "1"),
        Message("system", "In French."), Message("user", "Two", context=("other",)), Message("assistant", "2"),
        Message("user", "Three"), Message("tool", "4"),
    ]  # fmt: skip
    assert without_turns(messages, 0) == messages
    assert [(one.role, one.content, one.context) for one in without_turns(messages, 6)] == [
        ("system", "Be brief.", ()), ("system", "In French.", ()), ("user", "Three", ("file", "other")),
        ("tool", "4", ()),
    ]  # fmt: skip
    assert Message("user", "Q", context=(" a\n", "", "b")).whole() == Message("user", "a\n\nb\n\nQ")
