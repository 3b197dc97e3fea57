"""What other servers and agents wrote can be sent back in every dialect, and what cannot be read is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.llm import LLM
from testkit.chat_traits import TRAITS
from testkit.thinking_templates import with_template
from tests.http.conftest import Ask, asker, serving
from tests.http.test_tools import Writer, writing_over

SYSTEM, ASKED = {"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "QUESTION"}


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
