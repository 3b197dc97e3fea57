"""What the server wrote can be sent back in every dialect, whatever the model's template wants of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.llm import LLM
from testkit.chat_traits import TRAITS
from testkit.thinking_templates import with_template
from tests.http.conftest import Answer, Ask, asker, serving
from tests.http.test_tools import Writer, writing_over

CALLS = [("file", {"path": "a", "text": "{{ '<|user|>' + m + '<|end|>' }}"}), ("clock", {})]
WRITTEN = "Wait." + "".join(
    f"<tool_call>{json.dumps({'name': name, 'arguments': values})}</tool_call>" for name, values in CALLS
)
RESULTS = ("RESULT ONE <|end|>", "")
FILE: Any = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"enum": ["<|end|>"]}}}
FUNCTIONS: Any = [
    {"name": "file", "description": "writes texts that end with <|end|>", "parameters": FILE},
    {"name": "clock", "description": "", "parameters": {}},
]
TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
SYSTEM, ASKED = {"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "QUESTION"}


def chat(ask: Ask) -> Iterator[Answer]:
    body: Any = {"messages": [SYSTEM, ASKED], "tools": TOOLS}
    yield (first := ask("POST", "/v1/chat/completions", body))
    message = first.json["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(message["tool_calls"], RESULTS, strict=True)
    ]
    turns = [SYSTEM, ASKED, message, *results, {**SYSTEM, "role": "developer", "content": "LATER"}]
    yield ask("POST", "/v1/chat/completions", {**body, "messages": turns})


def messages(ask: Ask) -> Iterator[Answer]:
    tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS]
    body = {"max_tokens": 200, "tools": tools, "messages": [ASKED], "system": "SYSTEM"}
    yield (first := ask("POST", "/v1/messages", body))
    content = first.json["content"]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": result}
        for call, result in zip((block for block in content if block["type"] == "tool_use"), RESULTS, strict=True)
    ]
    answer = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    yield ask("POST", "/v1/messages", {**body, "messages": [ASKED, *answer, {**SYSTEM, "content": "LATER"}]})


def responses(ask: Ask) -> Iterator[Answer]:
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    body = {"tools": tools, "input": [ASKED], "instructions": "SYSTEM"}
    yield (first := ask("POST", "/v1/responses", body))
    output = first.json["output"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        for call, result in zip((item for item in output if item["type"] == "function_call"), RESULTS, strict=True)
    ]
    later = {"type": "message", "role": "developer", "content": "LATER"}
    yield ask("POST", "/v1/responses", {**body, "input": [ASKED, *output, *results, later]})


def ollama(ask: Ask) -> Iterator[Answer]:
    body: Any = {"model": "writer", "stream": False, "tools": TOOLS, "messages": [SYSTEM, ASKED]}
    yield (first := ask("POST", "/api/chat", body))
    results = [{"role": "tool", "content": result} for result in RESULTS]
    turns = [SYSTEM, ASKED, first.json["message"], *results, {**SYSTEM, "content": "LATER"}]
    yield ask("POST", "/api/chat", {**body, "messages": turns})


Talk = Callable[[Ask], Iterator[Answer]]


@pytest.fixture(scope="module", params=TRAITS)
def writing(
    request: pytest.FixtureRequest, f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Writer, Ask]]:
    path = with_template(f32_pair[1], tmp_path_factory.mktemp("traits") / "model.gguf", TRAITS[request.param])
    with writing_over(path) as (writer, server):
        yield writer, asker(server)


@pytest.mark.parametrize("talk", [chat, messages, responses, ollama])
def test_a_reply_with_calls_can_be_sent_back_with_the_results(writing: tuple[Writer, Ask], talk: Talk) -> None:
    writer, ask = writing
    writer.says(WRITTEN)
    first, second = talk(ask)
    assert (first.status, second.status) == (200, 200), second.body
    for text in ("SYSTEM", "LATER", "QUESTION", "Wait.", "'<|user|>' + m + '<|end|>'", "clock", "RESULT ONE <|end|>"):
        assert text in writer.prompt
    assert "x-edgellm-ignored" not in second.headers


BROKEN: Any = (
    '{"path": "CUT', '{"path": "CUT"}{"b": 1}', None, {"path": "CUT"}, ["CUT"], 5, "CUT", '"{\\"path\\": \\"CUT\\"}"',
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Writer, Ask]]:
    path = with_template(f32_pair[1], tmp_path_factory.mktemp("plain") / "model.gguf", TRAITS["plain"])
    with writing_over(path) as (writer, server):
        writer.says("Done.")
        yield writer, asker(server)


@pytest.mark.parametrize("written", BROKEN, ids=str)
@pytest.mark.parametrize("name", ["file", "mcp:server/tool", "a b", ""])
def test_calls_of_any_model_are_read(plain: tuple[Writer, Ask], written: Any, name: str) -> None:
    writer, ask = plain
    function = {"name": name, "arguments": written}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "x" * 300, "function": function}]}
    result = {"role": "tool", "tool_call_id": "x" * 300, "content": None}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": name, "input": written}]}
    returned = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
    item = {"type": "function_call", "call_id": "x", "name": name, "arguments": written}
    for path, body in {
        "/v1/chat/completions": {"messages": [ASKED, called, result]},
        "/v1/messages": {"max_tokens": 4, "messages": [ASKED, used, returned]},
        "/v1/responses": {"input": [ASKED, item, {"type": "function_call_output", "call_id": "x", "output": ""}]},
        "/api/chat": {"model": "writer", "stream": False, "messages": [ASKED, called, {**result, "content": ""}]},
    }.items():
        answer = ask("POST", path, body)
        assert answer.status == 200, answer.body
        assert written in (None, 5) or "CUT" in writer.prompt
        assert name in writer.prompt


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/v1/responses", {"input": "Hi", "tools": [{"type": kind} for kind in
          ("web_search", "local_shell", "mcp", "file_search")]},
         "tools.0.web_search, tools.1.local_shell, tools.2.mcp, tools.3.file_search"),
        ("/v1/responses", {"input": [ASKED, {"type": "web_search_call"}, {"type": "item_reference", "id": "x"}, ASKED]},
         "input.1.web_search_call, input.2.item_reference"),
        ("/v1/responses", {"input": [ASKED, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."},
          {"type": "sound", "text": 1}]}, ASKED], "tool_choice": {"type": "web_search"}},
         "input.1.content.1.sound, tool_choice.web_search"),
        ("/v1/responses", {"input": [ASKED, {"type": "reasoning", "summary": [], "content": None}, ASKED]}, None),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "clock"}],
          "messages": [ASKED, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "input": {}},
          {"type": "web_search_tool_result", "content": {"error": 1}}, {"type": "text", "text": "A"}]}, ASKED]},
         ("messages.1.content.0.server_tool_use, messages.1.content.1.web_search_tool_result,"
          " tools.0.web_search_20250305")),
        ("/v1/messages", {"messages": [SYSTEM, ASKED, {"role": "system", "content": [{"type": "text", "text": "B"}]}]},
         None),
        ("/v1/messages", {"messages": [{"role": "developer", "content": "B"}, ASKED], "metadata": {"user_id":
          "x" * 2000}}, None),
        ("/v1/chat/completions", {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"id": "c", "function":
          None}]}, {"role": "tool", "tool_call_id": "c", "content": "B"}]}, None),
        ("/v1/chat/completions", {"messages": [ASKED], "tools": [{"type": "custom", "custom": {"name": "x"}}]},
         "tools.0.custom"),
        ("/v1/chat/completions", {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"type": "custom", "id": "c",
          "custom": {"name": "x", "input": "y"}}]}, ASKED]}, "messages.1.tool_calls.0.custom"),
        ("/v1/chat/completions", {"messages": [ASKED, {"role": "assistant", "content": [{"type": "refusal",
          "refusal": "No."}, {"type": "thinking", "thinking": []}]}, ASKED]}, "messages.1.content.1.thinking"),
        ("/api/chat", {"model": "writer", "stream": False, "messages": [ASKED], "tools": [{"type": "web_search"}]},
         "tools.0.web_search"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_read_is_left_out_and_named(
    plain: tuple[Writer, Ask], path: str, body: Any, ignored: str | None
) -> None:
    writer, ask = plain
    answer = ask("POST", path, {"max_tokens": 4, **body} if path == "/v1/messages" else body)
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-edgellm-ignored") == ignored
    assert ("No." in writer.prompt) == ("refusal" in str(body))


def test_a_strict_server_refuses_what_it_would_leave_out(own: LLM) -> None:
    with serving(own, "edgellm-verifier", strict=True) as server:
        ask = asker(server)
        for more in ({"tools": [{"type": "custom"}]}, {"reasoning_effort": "high"}, {"think": True}):
            refused = ask("POST", "/v1/chat/completions", {"messages": [ASKED], **more})
            assert (refused.status, refused.error["code"]) == (400, "unknown_parameter")
        assert ask("POST", "/v1/messages/count_tokens", {"messages": [SYSTEM, ASKED]}).status == 200
        thinking = {"type": "enabled", "budget_tokens": 9}
        assert ask("POST", "/v1/messages/count_tokens", {"messages": [ASKED], "thinking": thinking}).status == 400
