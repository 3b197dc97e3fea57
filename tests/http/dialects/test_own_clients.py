"""Each API by its own client: the same texts, calls and thoughts, whole and as a stream, and sent back."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ollama
import openai
import pytest

from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from testkit.thinking_templates import ALWAYS, with_template
from tests.http.conftest import QUESTION, Ask, asker, conversation, serving
from tests.http.test_tools import CALLS, FUNCTIONS, TOOLS, Writer, writing

__all__ = ["writing"]

STRICT = True  # these clients send nothing that a strict server refuses
RESULTS = ("rain <|end|>", "")
CALLED = [("get_weather", {"city": "Zürich"}), ("clock", {})]


@dataclass(frozen=True)
class Said:
    """A reply, and the turns that send it back, with the results of its calls."""

    text: str
    thought: str
    calls: list[tuple[str, Any]]
    end: str
    tokens: tuple[int, int]
    back: list[Any]


@dataclass(frozen=True)
class Asked:
    turns: list[Any]
    stream: bool = False
    longest: int = 300
    tools: bool = False
    think: bool | None = None


By: TypeAlias = Callable[[str, Asked], Said]


def by_openai(url: str, asked: Asked) -> Said:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        more: Any = {"tools": TOOLS} if asked.tools else {}
        more |= {"model": client.models.list().data[0].id, "messages": asked.turns, "max_tokens": asked.longest}
        more["extra_body"] = {"think": asked.think}
        if asked.stream:
            with client.chat.completions.stream(**more, stream_options={"include_usage": True}) as stream:
                with suppress(openai.LengthFinishReasonError):
                    stream.until_done()
                done: Any = stream.current_completion_snapshot
        else:
            done = client.chat.completions.create(**more)
    choice, calls = done.choices[0], done.choices[0].message.tool_calls or []
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(calls, RESULTS, strict=False)
    ]
    return Said(
        choice.message.content or "", getattr(choice.message, "reasoning_content", None) or "",
        [(call.function.name, json.loads(call.function.arguments)) for call in calls], choice.finish_reason,
        (done.usage.prompt_tokens, done.usage.completion_tokens), [choice.message.model_dump(), *results],
    )  # fmt: skip


def by_responses(url: str, asked: Asked) -> Said:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        more: Any = {"tools": [{"type": "function", **one} for one in FUNCTIONS]} if asked.tools else {}
        more |= {"model": client.models.list().data[0].id, "input": asked.turns, "max_output_tokens": asked.longest}
        if asked.stream:
            with client.responses.stream(**more) as stream:
                events: list[Any] = list(stream)
            done: Any = events[-1].response
        else:
            done = client.responses.create(**more)
    calls = [item for item in done.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in zip(calls, RESULTS, strict=False)
    ]
    thoughts = [part.text for item in done.output if item.type == "reasoning" for part in item.content]
    end = "length" if done.status == "incomplete" else "tool_calls" if calls else "stop"
    return Said(
        done.output_text, "".join(thoughts), [(call.name, json.loads(call.arguments)) for call in calls], end,
        (done.usage.input_tokens, done.usage.output_tokens), [*done.output, *results],
    )  # fmt: skip


def by_anthropic(url: str, asked: Asked) -> Said:
    import anthropic  # takes two seconds

    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as client:
        more: Any = {"messages": asked.turns, "max_tokens": asked.longest, "model": None}
        more |= {"thinking": {"type": "enabled"}} if asked.think else {}
        if asked.tools:
            more["tools"] = [
                {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
                for one in FUNCTIONS
            ]
        if asked.stream:
            with client.messages.stream(**more) as stream:
                done: Any = stream.get_final_message()
        else:
            done = client.messages.create(**more)
    of = {kind: [one for one in done.content if one.type == kind] for kind in ("text", "thinking", "tool_use")}
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": result}
        for call, result in zip(of["tool_use"], RESULTS, strict=False)
    ]
    ends = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    return Said(
        "".join(one.text for one in of["text"]), "".join(one.thinking for one in of["thinking"]),
        [(call.name, call.input) for call in of["tool_use"]], ends[done.stop_reason],
        (done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0), done.usage.output_tokens),
        [{"role": "assistant", "content": done.content}, *([{"role": "user", "content": results}] if results else [])],
    )  # fmt: skip


def by_ollama(url: str, asked: Asked) -> Said:
    with ollama.Client(host=url) as client:
        (name,) = [one.model for one in client.list().models]
        tools, options = TOOLS if asked.tools else None, {"num_predict": asked.longest}
        more: Any = {"tools": tools, "think": asked.think, "options": options}
        lines: Any = client.chat(name, asked.turns, stream=asked.stream, **more)
        lines = list(lines) if asked.stream else [lines]
    calls = [call for line in lines for call in line.message.tool_calls or ()]
    text, thought = ("".join(getattr(line.message, name) or "" for line in lines) for name in ("content", "thinking"))
    message = {"role": "assistant", "content": text, "thinking": thought, "tool_calls": calls}
    results = [
        {"role": "tool", "tool_name": call.function.name, "content": result}
        for call, result in zip(calls, RESULTS, strict=False)
    ]
    last, called = lines[-1], [(call.function.name, call.function.arguments) for call in calls]
    end = "length" if last.done_reason == "length" else "tool_calls" if calls else "stop"
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    return Said(
        text.strip() if calls else text, thought.rstrip(), called, end, (last.prompt_eval_count, last.eval_count),
        [message, *results],
    )  # fmt: skip


every = pytest.mark.parametrize("by", [by_openai, by_responses, by_anthropic, by_ollama])
streamed = pytest.mark.parametrize("stream", [False, True])


def wanted(ask: Ask, **more: Any) -> tuple[str, str, tuple[int, int]]:
    """Return the text, the thought and the numbers of tokens of a chat completion."""
    done = ask("POST", "/v1/chat/completions", conversation(**more)).json
    message, usage = done["choices"][0]["message"], done["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return message["content"] or "", (message["reasoning_content"] or "").rstrip(), counts


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@every
@streamed
@pytest.mark.parametrize(("longest", "end"), [(40, "stop"), (5, "length")])
def test_a_text_is_that_of_a_chat_completion(
    by: By, stream: bool, longest: int, end: str, server: HttpServer, ask: Ask
) -> None:
    said = by(server.url, Asked([user(QUESTION)], stream, longest))
    assert (said.text, said.thought, said.tokens) == wanted(ask, max_tokens=longest)
    assert (said.end, said.calls) == (end, [])


@every
@streamed
def test_tools_are_called_and_their_results_returned(by: By, stream: bool, writing: tuple[Writer, HttpServer]) -> None:
    writer, server = writing
    writer.says(CALLS)
    turns: list[Any] = [system("Be kind."), user("How is the weather in Zürich, and how late is it?")]
    said = by(server.url, Asked(turns, stream, tools=True))
    assert (said.text.strip(), said.calls, said.end) == ("Wait.", CALLED, "tool_calls")
    assert "The time" in writer.prompt
    writer.says("It rains.")
    again = by(server.url, Asked([*turns, *said.back, system("Be brief."), user("Well?")], stream, tools=True))
    assert (again.text, again.calls, again.end) == ("It rains.", [], "stop")
    order = [writer.prompt.index(part) for part in ("Be kind.", "Zürich,", "Wait.", RESULTS[0], "Well?")]
    assert order == sorted(order)
    assert "Be brief." in writer.prompt
    assert writer.prompt.count("clock") > 1, "described and called"
    assert writer.prompt.count("Zürich") > 1, "asked and called"


ANTHROPICS = [{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS]
CHOICES: dict[str, tuple[Any, list[Any], Callable[[Any], list[str]]]] = {
    "/v1/chat/completions": (
        {"messages": [user("?")], "tools": TOOLS},
        [{"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, {"parallel_tool_calls": False},
         {"tool_choice": "none"}],
        lambda found: [one["function"]["name"] for one in found["choices"][0]["message"].get("tool_calls", ())],
    ),
    "/v1/messages": (
        {"messages": [user("?")], "tools": ANTHROPICS, "max_tokens": 200},
        [{"tool_choice": {"type": "tool", "name": "get_weather"}},
         {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"tool_choice": {"type": "none"}}],
        lambda found: [one["name"] for one in found["content"] if one["type"] == "tool_use"],
    ),
    "/v1/responses": (
        {"input": "?", "tools": [{"type": "function", **one} for one in FUNCTIONS]},
        [{"tool_choice": {"type": "function", "name": "get_weather"}}, {"parallel_tool_calls": False},
         {"tool_choice": "none"}],
        lambda found: [one["name"] for one in found["output"] if one["type"] == "function_call"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", CHOICES)
def test_calls_are_forced_limited_and_switched_off(path: str, writing: tuple[Writer, HttpServer]) -> None:
    writer, server = writing
    body, (forced, limited, off), called = CHOICES[path]
    for more, text, names in (
        (forced, '{"city": "Bern"}}</tool_call>', ["get_weather"]), (limited, CALLS, ["get_weather"]), (off, CALLS, []),
    ):  # fmt: skip
        writer.says(text)
        answer = asker(server)("POST", path, {**body, **more})
        assert (answer.status, called(answer.json)) == (200, names)
        assert ("Bern" in answer.body.decode()) == (more is forced)


@pytest.fixture(scope="module")
def thinker(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    path = with_template(f32_pair[1], tmp_path_factory.mktemp("always") / "always.gguf", ALWAYS)
    with LLM.open("none", path, threads=1) as pair, serving(pair, "thinker") as server:
        yield server


@every
@streamed
def test_thoughts_are_apart_and_can_be_sent_back(by: By, stream: bool, thinker: HttpServer) -> None:
    asked = Asked([user(QUESTION)], stream, 40, think=True)
    said = by(thinker.url, asked)
    assert (said.text, said.thought.rstrip(), said.tokens) == wanted(asker(thinker), max_tokens=40, think=True)
    assert said.thought
    more = by(thinker.url, Asked([*asked.turns, *said.back, user("And now?")], stream, 4, think=True))
    assert more.tokens[0] > said.tokens[0]
