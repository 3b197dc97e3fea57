"""Requests as agents send them: answered, with what a text model cannot do left out and named."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.http.server import HttpServer
from testkit.chat_traits import TRAITS
from testkit.thinking_templates import with_template
from tests.http.conftest import QUESTION, Ask, asker
from tests.http.test_tools import Writer, writing, writing_over

__all__ = ["writing"]

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
U, A = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": "On Friday."}
OBJECT = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": None, "function": {"name": "f"}}]}
IMAGE, PICTURE = {"type": "image", "source": {"type": "base64", "data": "aGk="}}, "[image left out]"
SHOT = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "shot", "input": {}}]}
SEEN = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The bus leaves at 8."}}
LATER = {"role": "system", "content": "LATER"}
CODEX: Any = [
    {"type": "custom", "name": "exec", "description": "Run"}, {"type": "function", "name": "wait", "parameters": {}},
]  # fmt: skip
LONG = {"type": "object", "properties": {"city": {"type": "string", "description": "x" * 40_000}}}
HISTORY: Any = [
    {"type": "custom_tool_call", "call_id": "c", "name": "exec", "input": "LIST", "namespace": "functions"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": {"a": "FOUND"}},
    {"type": "local_shell_call", "id": "x", "call_id": "d", "action": {"command": ["SHELL"]}, "status": "completed"},
    {"type": "local_shell_call_output", "id": "d", "output": "SHOWN"},
    {"type": "reasoning", "summary": [], "encrypted_content": None, "content": None},
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "ignored", "texts"),
    [
        (RESPONSES, {"input": [{"type": "additional_tools", "role": "developer", "tools": [
            {"type": "namespace", "name": "functions", "tools": CODEX}, {"type": "web_search"}]}, U]},
         "input.0.tools.1.web_search", ["functions__exec", "functions__wait"]),
        (RESPONSES, {"input": [U, *HISTORY, U]}, None, ["functions__exec", "LIST", "FOUND", "SHELL", "SHOWN"]),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}, {"type": "function",
            "name": "shell", "parameters": OBJECT}]}, "tools.0.format, tools.0.web_search", ["apply_patch", "shell"]),
        (MESSAGES, {"messages": [U, A, LATER, U]}, None, ["LATER"]),
        (MESSAGES, {"messages": [LATER, U]}, None, ["LATER"]),
        (MESSAGES, {"messages": [U, {**LATER, "content": []}], "output_config": {"effort": "high"}},
         "output_config.effort", []),
        (MESSAGES, {"messages": [U, SHOT, SEEN]}, "messages.2.content.0.content.0.image", [PICTURE]),
        (MESSAGES, {"messages": [U, SHOT, SEEN, A, U]}, "messages.2.content.0.content.0.image", [PICTURE]),
        (MESSAGES, {"messages": [{**U, "content": [IMAGE]}, A, U]}, "messages.0.content.0.image", [PICTURE]),
        (MESSAGES, {"messages": [U, {**A, "content": [{"type": "text", "text": "X", "citations": None}]}, U]}, None,
         ["X"]),
        (MESSAGES, {"messages": [{**U, "content": [DOCUMENT]}]}, None, ["The bus leaves at 8."]),
        (RESPONSES, {"input": [U, {"type": "function_call", "name": "f", "call_id": "e", "arguments": "{}"}, {"type":
            "function_call_output", "call_id": "e", "output": [{"type": "input_image", "image_url": "data:"}]}]},
         "input.2.output.0.input_image", [PICTURE]),
        (CHAT, {"messages": [U, CALL, {"role": "tool", "tool_call_id": None, "content": [{"type": "image_url",
            "image_url": {"url": "data:"}}]}, U]}, "messages.2.content.0.image_url", [PICTURE]),
        (CHAT, {"messages": [U], "max_tokens": -1, "enable_thinking": False}, None, []),
        (CHAT, {"messages": [U], "think": False, "tools": [FUNCTION]}, None, []),
        (OLLAMA, {"messages": [U], "think": "high"}, "think", []),
        (OLLAMA, {"messages": [{**U, "images": ["aGk="]}, A, U]}, None, [PICTURE]),
        (RESPONSES, {"input": "Hi", "tools": [{"type": kind} for kind in
            ("web_search", "local_shell", "mcp", "file_search")]},
         "tools.0.web_search, tools.1.local_shell, tools.2.mcp, tools.3.file_search", []),
        (RESPONSES, {"input": [U, {"type": "web_search_call"}, {"type": "item_reference", "id": "x"}, U]},
         "input.1.web_search_call, input.2.item_reference", []),
        (RESPONSES, {"input": [U, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."},
            {"type": "sound", "text": 1}]}, U], "tool_choice": {"type": "web_search"}},
         "input.1.content.1.sound, tool_choice.web_search", ["No."]),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}, {"name": "clock"}],
            "messages": [U, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "input": {}},
            {"type": "web_search_tool_result", "content": {"error": 1}}, {"type": "text", "text": "A"}]}, U]},
         ("messages.1.content.0.server_tool_use, messages.1.content.1.web_search_tool_result,"
          " tools.0.web_search_20250305"), []),
        (MESSAGES, {"messages": [{"role": "developer", "content": "B"}, U], "metadata": {"user_id": "x" * 2000}}, None,
         []),
        (CHAT, {"messages": [U, {"role": "assistant", "tool_calls": [{"id": "c", "function": None}]},
            {"role": "tool", "tool_call_id": "c", "content": "B"}]}, None, []),
        (CHAT, {"messages": [U], "tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.custom", []),
        (CHAT, {"messages": [U, {"role": "assistant", "tool_calls": [{"type": "custom", "id": "c", "custom": {
            "name": "x", "input": "y"}}]}, U]}, "messages.1.tool_calls.0.custom", []),
        (CHAT, {"messages": [U, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."},
            {"type": "thinking", "thinking": []}]}, U]}, "messages.1.content.1.thinking", ["No."]),
        (OLLAMA, {"messages": [U], "tools": [{"type": "web_search"}]}, "tools.0.web_search", []),
    ],
    ids=lambda value: str(value)[:80],
)  # fmt: skip
def test_what_agents_send_is_answered(
    writing: tuple[Writer, HttpServer], path: str, body: Any, ignored: str | None, texts: list[str]
) -> None:
    writer, server = writing
    writer.says("Done.")
    more: Any = {MESSAGES: {"max_tokens": 4}, OLLAMA: {"model": "writer", "stream": False}}.get(path, {})
    answer = asker(server)("POST", path, {**more, **body})
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-edgellm-ignored") == ignored
    assert not [text for text in texts if text not in writer.prompt]


@pytest.mark.parametrize(("path", "model"), [(CHAT, "gpt-4o-mini"), (MESSAGES, "claude-haiku-4-5-20251001"),
                                             (RESPONSES, "gpt-5-codex"), (OLLAMA, "gpt-oss")])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_services_model_is_the_opened_one(ask: Ask, path: str, model: str, stream: bool) -> None:
    body = {"input": "Hi"} if path == RESPONSES else {"messages": [U], "max_tokens": 4}
    answer = ask("POST", path, {**body, "model": model, "stream": stream})
    assert (answer.status, answer.headers["x-edgellm-model"]) == (200, "edgellm-verifier")
    own = ask("POST", path, {**body, "model": "edgellm-verifier", "stream": stream})
    assert "x-edgellm-model" not in own.headers


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_usage_tells_the_tokens_that_were_read(ask: Ask, path: str) -> None:
    def usage(turns: list[Any]) -> tuple[int, int]:
        """Return the tokens read and those that were known already."""
        body = {"input": turns, "max_output_tokens": 12} if path == RESPONSES else {"messages": turns, "max_tokens": 12}
        found = ask("POST", path, body).json["usage"]
        if path == MESSAGES:
            return found["input_tokens"], found["cache_read_input_tokens"]
        name = "prompt_tokens" if path == CHAT else "input_tokens"
        known = found[f"{name}_details"]["cached_tokens"]
        return found[name] - known, known

    first = {"role": "user", "content": f"{path} {QUESTION}"}
    read, known = usage([first])
    assert read > known
    more, known = usage([first, A, {"role": "user", "content": "x " * 200}])
    assert known >= read
    assert 200 < more < 250


@pytest.mark.parametrize("stream", [False, True])
def test_calls_go_back_to_the_tool_and_its_namespace(writing: tuple[Writer, HttpServer], stream: bool) -> None:
    writer, server = writing
    tools = [{"type": "namespace", "name": "mcp__x", "tools": CODEX}]
    writer.says(
        '<tool_call>{"name": "mcp__x__wait", "arguments": {"s": 1}}</tool_call>'
        '<tool_call>{"name": "mcp__x__exec", "arguments": {"input": "ls -l"}}</tool_call>'
    )
    answer = asker(server)("POST", RESPONSES, {"input": "Hi", "tools": tools, "stream": stream})
    done = answer.events_named[-1]["response"] if stream else answer.json
    wait, execute = done["output"]
    assert (wait["type"], wait["namespace"], wait["name"], json.loads(wait["arguments"])) == (
        "function_call", "mcp__x", "wait", {"s": 1},
    )  # fmt: skip
    assert (execute["type"], execute["namespace"], execute["name"], execute["input"]) == (
        "custom_tool_call", "mcp__x", "exec", "ls -l",
    )  # fmt: skip


@pytest.mark.parametrize(("path", "more"), [(CHAT, {"continue_final_message": True, "add_generation_prompt": False}),
                                            (MESSAGES, {})])  # fmt: skip
def test_the_assistants_last_turn_is_continued(ask: Ask, path: str, more: dict[str, object]) -> None:
    def text(messages: list[Any], **more: object) -> str:
        found = ask("POST", path, {"messages": messages, "max_tokens": 40, **more}).json
        return str(found["choices"][0]["message"]["content"] if path == CHAT else found["content"][0]["text"])

    whole = text([U])
    words = whole.split(" ")
    begun = " ".join(words[:2])
    assert begun + text([U, {"role": "assistant", "content": begun}], **more) == whole
    refused = ask("POST", CHAT, {"messages": [U], "continue_final_message": True})
    assert (refused.status, refused.error["param"]) == (400, "continue_final_message")


def test_a_format_beside_tools_is_kept(ask: Ask) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "codex_output_schema", "strict": True, "schema": schema}
    tools = {"type": "additional_tools", "role": "developer", "tools": CODEX}
    named = {"type": "json_schema", "json_schema": form}
    for path, body in (
        (OLLAMA, {"model": "edgellm-verifier", "messages": [U], "format": schema, "tools": [FUNCTION]}),
        (RESPONSES, {"input": [tools, U], "tool_choice": "auto", "text": {"format": form}}),
        (CHAT, {"messages": [U], "response_format": named, "tools": [FUNCTION]}),
    ):
        answer = ask("POST", path, {**body, "stream": False})
        assert answer.status == 200, answer.body
        assert "tools" in answer.headers["x-edgellm-ignored"].split(", ")
        assert '{"a"' in answer.body.decode().replace("\\", "").replace(" ", "")
    answer = ask("POST", CHAT, {**body, "tool_choice": "required"})
    assert (answer.status, answer.error["param"]) == (400, "response_format")


def test_descriptions_do_not_count_to_a_schema(ask: Ask) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": LONG}}
    assert ask("POST", CHAT, {"messages": [U], "response_format": form, "max_tokens": 4}).status == 200


BROKEN: Any = (
    '{"path": "CUT', '{"path": "CUT"}{"b": 1}', None, {"a": "CUT\ud83d"}, ["CUT"], 5, "CUT", r'"{\"path\": \"CUT\"}"',
)  # fmt: skip


@pytest.fixture(scope="module")
def plain(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Writer, Ask]]:
    path = with_template(f32_pair[1], tmp_path_factory.mktemp("plain") / "model.gguf", TRAITS["plain"])
    with writing_over(path) as (writer, server):
        writer.says("Done.")
        yield writer, asker(server)


@pytest.mark.parametrize("written", BROKEN, ids=repr)
@pytest.mark.parametrize("name", ["file", "mcp:server/tool", "a b", ""])
def test_calls_of_any_model_are_read(plain: tuple[Writer, Ask], written: Any, name: str) -> None:
    writer, ask = plain
    function = {"name": name, "arguments": written}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "x" * 300, "function": function}]}
    result = {"role": "tool", "tool_call_id": "x" * 300, "content": "half \ud83d"}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": name, "input": written}]}
    returned = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
    item = {"type": "function_call", "call_id": "x", "name": name, "arguments": written}
    for path, body in {
        CHAT: {"messages": [U, called, result]},
        MESSAGES: {"max_tokens": 4, "messages": [U, used, returned]},
        RESPONSES: {"input": [U, item, {"type": "function_call_output", "call_id": "x", "output": ""}]},
        OLLAMA: {"model": "writer", "stream": False, "messages": [U, called, result]},
    }.items():
        answer = ask("POST", path, body)
        assert answer.status == 200, answer.body
        assert written in (None, 5) or "CUT" in writer.prompt
        assert name in writer.prompt
