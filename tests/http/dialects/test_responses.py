"""OpenAI's Responses API, by its own client."""

from typing import Any

import openai
import pytest

from edgellm.http.dialects.responses import ConversationStore
from edgellm.http.schemas.errors import ApiError
from edgellm.http.server import HttpServer
from tests.http.conftest import QUESTION, Ask, client_of
from tests.http.test_tools import CALLS, FUNCTIONS, Writer, writing

__all__ = ["writing"]

ASKED: Any = {"model": "edgellm-verifier", "input": QUESTION}
TOOLS: Any = [{"type": "function", **one} for one in FUNCTIONS]
WEATHER: Any = [{"role": "user", "content": "How is the weather in Zürich?"}]


def test_streams_add_up_to_the_whole_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, max_output_tokens=5)
    with client.responses.stream(**ASKED, max_output_tokens=5) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output[0].to_dict()["status"] == "incomplete"
    assert text == last.response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert last.response.to_dict()["edgellm"]["summary"]["share_verified"] == 1.0  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_can_be_continued(client: openai.OpenAI, ask: Ask, stream: bool) -> None:
    first = {"role": "user", "content": QUESTION}
    if stream:
        with client.responses.stream(**ASKED, instructions="Be short.") as streamed:
            done: Any = streamed.get_final_response()
    else:
        done = client.responses.create(**ASKED, instructions="Be short.")
    more = client.responses.create(model="edgellm-verifier", input="And where?", previous_response_id=done.id)
    turns = [first, {"role": "assistant", "content": done.output_text}, {"role": "user", "content": "And where?"}]
    wanted = ask("POST", "/v1/chat/completions", {"messages": turns}).json
    assert more.output_text == wanted["choices"][0]["message"]["content"]
    assert more.usage is not None
    assert more.usage.input_tokens == wanted["usage"]["prompt_tokens"]  # without the instructions
    assert more.previous_response_id == done.id
    by_hand: Any = [first, *done.output, {"role": "user", "content": "And where?"}]
    again = client.responses.create(model="edgellm-verifier", input=by_hand)
    assert again.output_text == more.output_text


def test_a_response_that_is_not_kept_cannot_be_continued(client: openai.OpenAI) -> None:
    done = client.responses.create(**ASKED, max_output_tokens=1, store=False)
    with pytest.raises(openai.BadRequestError, match="is not kept here") as raised:
        client.responses.create(**ASKED, previous_response_id=done.id)
    assert raised.value.code == "previous_response_not_found"


def test_few_conversations_are_kept() -> None:
    store = ConversationStore(most_characters=1000)
    turn = {"role": "user", "content": "x" * 400}
    for name in "abc":
        store.keep(name, [turn])
        store.turns("a" if name == "b" else None)  # used later than b
    assert store.turns("a") == store.turns("c") == [turn]
    with pytest.raises(ApiError):
        store.turns("b")
    store.keep("long", [{"role": "user", "content": "x" * 1001}])
    for name in ("a", "c", "long"):
        with pytest.raises(ApiError):
            store.turns(name)


def test_what_is_refused(client: openai.OpenAI, ask: Ask) -> None:
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
    for more, said in (
        ({"input": image}, "read only text"),
        ({"input": []}, "The prompt is empty. Write a question."),
        ({"background": True}, "background is True"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "has no schema"),
        ({"model": "other"}, "is not served here"),
    ):
        with pytest.raises(openai.APIStatusError, match=said):
            client.responses.create(**{**ASKED, **more})
    assert ask("POST", "/v1/responses", {**ASKED, "prompt": {"id": "x"}}).status == 400
    answer = ask("POST", "/v1/responses", {**ASKED, "max_output_tokens": 1, "include": [], "service_tier": "auto"})
    assert answer.headers["x-edgellm-ignored"] == "include, service_tier"
    assert answer.headers["x-edgellm-verified"] == "1.0000"


def test_calls_are_kept_for_their_results(writing: tuple[Writer, HttpServer]) -> None:
    writer, server = writing
    client = client_of(server)
    writer.says(CALLS)
    done = client.responses.create(model="writer", input=WEATHER, tools=TOOLS)
    assert [item.type for item in done.output] == ["message", "function_call", "function_call"]
    writer.says("It rains.")
    call: Any = done.output[1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client.responses.create(model="writer", tools=TOOLS, input=[result], previous_response_id=done.id)
    assert again.output_text == "It rains."
    order = [writer.prompt.rindex(part) for part in ("Zürich?", "Wait.", "get_weather", "rain")]
    assert order == sorted(order)
