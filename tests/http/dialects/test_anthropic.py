"""Anthropic's Messages API, by its own client: imported by the tests alone, as that takes two seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from testkit.thinking_templates import ALWAYS, with_template
from tests.http.conftest import QUESTION, Ask, asker, conversation, serving
from tests.http.test_tools import CALLS, TEMPLATE, Writer, writing_over

if TYPE_CHECKING:
    import anthropic

USER: Any = {"role": "user", "content": "How is the weather in Zürich, and how late is it?"}
TOOLS: Any = [
    {"name": "get_weather", "description": "The weather", "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
    {"name": "clock", "description": "The time", "input_schema": {"type": "object"}},
]  # fmt: skip
KEY = "k" * 43
ASKED: Any = {"model": "edgellm-verifier", "messages": [{"role": "user", "content": QUESTION}]}

Connect: TypeAlias = Callable[..., "anthropic.Anthropic"]


@pytest.fixture(scope="module")
def connect() -> Iterator[Connect]:
    """Clients of a server, which are closed in the end."""
    import anthropic

    with ExitStack() as closing:

        def made(server: HttpServer, key: str = "none is needed") -> anthropic.Anthropic:
            return closing.enter_context(anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0))

        yield made


def test_a_message_is_the_text_of_a_chat_completion(connect: Connect, server: HttpServer, ask: Ask) -> None:
    wanted = ask("POST", "/v1/chat/completions", conversation(max_tokens=40)).json
    done = connect(server).messages.create(**ASKED, max_tokens=40)
    (block,) = done.content
    assert block.type == "text"
    assert block.text == wanted["choices"][0]["message"]["content"]
    assert (done.role, done.model, done.stop_reason) == ("assistant", "edgellm-verifier", "end_turn")
    assert (done.usage.input_tokens, done.usage.output_tokens) == (
        wanted["usage"]["prompt_tokens"],
        wanted["usage"]["completion_tokens"],
    )


def test_streams_add_up_to_the_whole_message(connect: Connect, server: HttpServer) -> None:
    client = connect(server)
    whole = client.messages.create(**ASKED, max_tokens=5)
    with client.messages.stream(**ASKED, max_tokens=5) as stream:
        text = "".join(stream.text_stream)
        done = stream.get_final_message()
    assert whole.stop_reason == done.stop_reason == "max_tokens"
    assert text == done.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert done.usage.input_tokens == whole.usage.input_tokens
    assert done.usage.output_tokens == whole.usage.output_tokens == 5


def test_events_have_their_names_and_say_how_much_was_verified(ask: Ask) -> None:
    body = ask("POST", "/v1/messages", {**ASKED, "max_tokens": 3, "stream": True}).body.decode()
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in body.strip().split("\n\n")]
    data = [json.loads(event["data"]) for event in events]
    assert [event["event"] for event in events] == [one["type"] for one in data]
    assert [one["type"] for one in data if one["type"] != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert data[-2]["edgellm"]["summary"]["share_verified"] == 1.0


def test_system_prompts_stop_sequences_and_blocks(connect: Connect, server: HttpServer, ask: Ask) -> None:
    client, parts = connect(server), QUESTION.partition("\n\n")
    blocks: Any = [{"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in parts]
    stopped = client.messages.create(
        model="edgellm-verifier", max_tokens=40, messages=[{"role": "user", "content": blocks}],
        stop_sequences=[" is"],
    )  # fmt: skip
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    system: Any = [{"type": "text", "text": "You are at home."}]
    counted = [
        client.messages.count_tokens(**ASKED, system=one).input_tokens for one in ("", "You are at home.", system)
    ]
    assert counted[0] < counted[1] == counted[2]
    raw = ask("POST", "/v1/messages", {**ASKED, "max_tokens": 1, "service_tier": "auto", "system": system})
    assert raw.headers["x-edgellm-ignored"] == "service_tier"
    assert raw.headers["x-edgellm-verified"] == "1.0000"
    assert raw.json["usage"]["input_tokens"] == counted[1]


def test_errors_are_the_clients_own_exceptions(connect: Connect, server: HttpServer, own: LLM) -> None:
    import anthropic

    client = connect(server)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(**{**ASKED, "model": "claude"}, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0"):
        client.messages.create(**ASKED, max_tokens=0)
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="read only text"):
        client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="The last message is the assistant's"):
        client.messages.create(model="m", max_tokens=1, messages=[{"role": "assistant", "content": "It"}])
    with serving(own, "edgellm-verifier", key=KEY) as locked:
        with pytest.raises(anthropic.AuthenticationError, match="The API key is missing or wrong"):
            connect(locked, "wrong").messages.create(**ASKED, max_tokens=1)
        assert connect(locked, KEY).messages.create(**ASKED, max_tokens=1).usage.output_tokens == 1


@pytest.fixture(scope="module")
def writing(
    connect: Connect, f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Writer, Ask, Any]]:
    """A server over a model whose template knows tools, and which writes what it is told."""
    path = with_template(f32_pair[1], tmp_path_factory.mktemp("tools") / "tools.gguf", TEMPLATE)
    with writing_over(path) as (writer, server):
        yield writer, asker(server), connect(server)


def test_tools_are_called_and_their_results_returned(writing: tuple[Writer, Ask, Any]) -> None:
    writer, _, client = writing
    writer.says(CALLS)
    asked = {"model": "writer", "max_tokens": 200, "tools": TOOLS}
    done = client.messages.create(**asked, messages=[USER])
    assert done.stop_reason == "tool_use"
    text, weather, clock = done.content
    assert (text.text, weather.name, weather.input, clock.name, clock.input) == (
        "Wait.", "get_weather", {"city": "Zürich"}, "clock", {},
    )  # fmt: skip
    assert "The time" in writer.prompt
    with client.messages.stream(**asked, messages=[USER]) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["text", "tool_use", "tool_use"]
    assert (streamed.content[1].input, streamed.stop_reason) == ({"city": "Zürich"}, "tool_use")
    writer.says("It rains.")
    results: Any = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": clock.id, "content": "12:00"},
        {"type": "text", "text": "Well?"},
    ]
    turns: Any = [USER, {"role": "assistant", "content": done.content}, {"role": "user", "content": results}]
    again = client.messages.create(**asked, messages=turns)
    assert (again.content[0].text, again.stop_reason) == ("It rains.", "end_turn")
    order = [writer.prompt.index(part) for part in ("Wait.", "rain", "12:00", "Well?")]
    assert order == sorted(order)


def test_calls_are_forced_limited_and_switched_off(writing: tuple[Writer, Ask, Any]) -> None:
    import anthropic

    writer, _, client = writing
    asked = {"model": "writer", "max_tokens": 200, "tools": TOOLS, "messages": [USER]}
    writer.says(CALLS)
    one = client.messages.create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["text", "tool_use"]
    none = client.messages.create(**asked, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]
    writer.says('{"city": "Bern"}}</tool_call>')
    forced = client.messages.create(**asked, tool_choice={"type": "tool", "name": "get_weather"})
    assert [(block.name, block.input) for block in forced.content] == [("get_weather", {"city": "Bern"})]
    with pytest.raises(anthropic.BadRequestError, match="any of 2 tools, and no grammar"):
        client.messages.create(**asked, tool_choice={"type": "any"})


def test_thoughts_are_blocks_of_their_own(connect: Connect, f32_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """And can be sent back as they came."""
    path = with_template(f32_pair[1], tmp_path / "always.gguf", ALWAYS)
    with LLM.open("none", path, threads=1) as pair, serving(pair, "thinker") as server:
        client = connect(server)
        asked: Any = {"model": "thinker", "max_tokens": 40, "thinking": {"type": "enabled", "budget_tokens": 5}}
        wanted = asker(server)("POST", "/v1/chat/completions", conversation(max_tokens=40, think=5)).json
        said = wanted["choices"][0]["message"]
        done = client.messages.create(**asked, messages=ASKED["messages"])
        assert [(block.type, getattr(block, block.type)) for block in done.content] == [
            ("thinking", said["reasoning_content"]), ("text", said["content"]),
        ]  # fmt: skip
        with client.messages.stream(**asked, messages=ASKED["messages"]) as stream:
            streamed = stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text"]
        assert getattr(streamed.content[1], "text", None) == said["content"]
        turns: Any = [*ASKED["messages"], {"role": "assistant", "content": done.content}, ASKED["messages"][0]]
        again = client.messages.create(**asked, messages=turns)
        assert again.usage.input_tokens > done.usage.input_tokens
