"""Tools over HTTP: described by the model's own template, called in the family's format, settled in a second turn.

The bundled pair calls no tools, so a verifier writes a given text here; everything else is as it is.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.engine import Model
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, settled
from edgellm.spec.types import Verdict
from testkit.chat_traits import TRAITS
from testkit.thinking_templates import with_template
from tests.http.conftest import Answer, asker, serving

TEMPLATE = (
    "{%- if tools %}{{ '<|system|>Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ ' Answer in <tool_call></tool_call>.<|end|>' }}{% endif %}"
    "{%- for m in messages %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '(' }}"
    "{{- call.function.arguments | tojson + ')</tool_call>' }}{% endfor %}"
    "{{- '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"
)
CALLS = (
    'Wait.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
    '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
)
FUNCTIONS: Any = [
    {"name": "get_weather", "description": "The weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
    {"name": "clock", "description": "The time", "parameters": {"type": "object"}},
]  # fmt: skip
TOOLS: Any = [{"type": "function", "function": one} for one in FUNCTIONS]
USER: Any = {"role": "user", "content": "How is the weather in Zürich, and how late is it?"}


class Writer(Verifier):
    """A verifier that writes a given text, and keeps the prompt that it was asked to continue."""

    def __init__(self, model: Model) -> None:
        self._model, self._text, self._prompt = model, np.array([], np.int32), 0
        self.prompt = ""

    def says(self, text: str) -> None:
        end = self._model.end_of_turn
        assert end is not None
        self._text = np.append(self._model.tokenize(text), end).astype(np.int32)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("writer", 1000)

    def open(self, state: GenerationState) -> Session:
        self._prompt = state.prompt_tokens
        self.prompt = b"".join(map(self._model.control_text, state.ids.tolist())).decode()
        return Session(state, lambda request: settled(Verdict(0, self._text[len(request.prefix) - self._prompt :][:1])))

    def close(self) -> None: ...


@contextmanager
def writing_over(path: Path, **config: Any) -> Iterator[tuple[Writer, HttpServer]]:
    """A server whose model writes what it is told, with fields of `HttpConfig`."""
    with Model.load(path) as model:
        writer = Writer(model)
        with LLM(model, verifier=writer) as pair, serving(pair, "writer", **config) as server:
            yield writer, server


@pytest.fixture(scope="module", params=["own", "generic", "strict"])
def writing(
    request: pytest.FixtureRequest, f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Writer, HttpServer]]:
    """A server over a model that writes what it is told, and whose template knows tools, does not, or wants much of a
    conversation."""
    path = f32_pair[1]
    if request.param != "generic":
        template = TEMPLATE if request.param == "own" else TRAITS["as strict as Mistral's"]
        path = with_template(path, tmp_path_factory.mktemp("tools") / "tools.gguf", template)
    with writing_over(path, strict=getattr(request.module, "STRICT", False)) as found:
        yield found


def ask_for(server: HttpServer, **more: object) -> Answer:
    return asker(server)("POST", "/v1/chat/completions", {"messages": [USER], "tools": TOOLS, **more})


def test_a_reply_of_no_token_has_no_share_of_verified_ones(writing: tuple[Writer, HttpServer]) -> None:
    writer, server = writing
    for text in ("", "Wait."):
        writer.says(text)
        assert ("x-edgellm-verified" in ask_for(server, tools=[]).headers) == bool(text)


TIMED: Any = {"properties": {"zone": {"description": "half a surrogate pair: \ud800"}}}
ASKED: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [{"type": "function", "function": {
        "name": "clock", "parameters": TIMED}}]},
    "/v1/messages": {"messages": [USER], "max_tokens": 300, "tools": [{"name": "clock", "input_schema": TIMED}]},
    "/v1/responses": {"input": "Hello.", "tools": [{"type": "function", "name": "clock", "parameters": TIMED}],
                      "metadata": {"user": "half \udc00"}},
    "/api/chat": {"model": "writer", "messages": [USER], "tools": [{"type": "function", "function": {
        "name": "clock", "parameters": TIMED}}]},
}  # fmt: skip


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", [r'{"zone\ud83d": ["\udc00", NaN, -Infinity, 1e999]}', r'"{\"a\": \"\ud83d\"}"'])
def test_what_leaves_the_server_is_valid_json(
    writing: tuple[Writer, HttpServer], path: str, stream: bool, arguments: str
) -> None:
    writer, server = writing
    writer.says(f'<tool_call>{{"name": "clock", "arguments": {arguments}}}</tool_call>')
    answer = asker(server)("POST", path, {**ASKED[path], "stream": stream})
    text = answer.body.decode()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and not line.startswith((":", "event:"))]
    read = [json.loads(line, parse_constant=pytest.fail) for line in lines if line != "[DONE]"]
    json.dumps(read, ensure_ascii=False).encode()
    assert (answer.status, "\\ud" in text, "\ufffd" in text) == (200, False, True)
    ends = {"/v1/chat/completions": "[DONE]", "/v1/messages": "message_stop", "/v1/responses": "response.completed"}
    assert not stream or ends.get(path, '"done":true') in lines[-1]


def test_a_call_that_the_limit_cuts_is_no_call(f32_pair: tuple[Path, Path], tmp_path: Path) -> None:
    template = TEMPLATE.replace("</tool_call>.", "<function=x><parameter=y></tool_call>.")
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich </parameter> or Bern"
    with writing_over(with_template(f32_pair[1], tmp_path / "xml.gguf", template)) as (writer, server):
        writer.says(text)
        ended = ask_for(server).json
        most = ended["usage"]["completion_tokens"] - 2
        cut = ask_for(server, max_tokens=most).json["choices"][0]
    (call,) = ended["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich </parameter> or Bern"}
    assert (cut["finish_reason"], cut["message"].get("tool_calls")) == ("length", None)
    assert cut["message"]["content"] == text[: len(cut["message"]["content"])]


def test_a_call_that_must_come_is_begun_for_the_model(writing: tuple[Writer, HttpServer]) -> None:
    writer, server = writing
    writer.says('{"city": "Bern"}}</tool_call>')
    ask_for(server, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert writer.prompt.endswith('<tool_call>\n{"name": "get_weather", "arguments": ')
    assert ask_for(server, tools=TOOLS[:1], tool_choice="required").json["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tool_choice": "required"}, "no grammar of such calls is available: the verifier applies none"),
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "not among the tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name is 'a b'"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools"),
    ],
    ids=str,
)  # fmt: skip
def test_tools_that_cannot_be_meant_are_refused(writing: tuple[Writer, HttpServer], more: Any, said: str) -> None:
    answer = ask_for(writing[1], **more)
    assert answer.status == 400
    assert said in answer.error["message"]


@pytest.fixture(scope="module", params=["own", "generic"])
def pair(
    request: pytest.FixtureRequest, f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    """The bundled pair, which knows no tools, so that nothing but a grammar makes it call one."""
    draft, verifier = f32_pair
    if request.param == "own":
        verifier = with_template(verifier, tmp_path_factory.mktemp("forced") / "tools.gguf", TEMPLATE)
    with LLM.open(draft, verifier, threads=1) as opened:
        yield opened


PLACES: Any = {
    "type": "function", "function": {"name": "place", "parameters": {
        "type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}, "n": {"enum": [3, 5]}},
        "required": ["at", "n"], "additionalProperties": False,
        "$defs": {"Place": {"type": "object", "properties": {"room": {"enum": ["hall", "attic"]}},
                            "required": ["room"], "additionalProperties": False}}}},
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_of_several_tools_is_called_where_one_is_required(pair: LLM, temperature: float) -> None:
    with serving(pair, "pair") as server:
        tools = [PLACES, {**PLACES, "function": {**PLACES["function"], "name": "elsewhere"}}]
        more = {"tools": tools, "tool_choice": "required", "temperature": temperature, "seed": 5, "max_tokens": 100}
        choice = ask_for(server, **more).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("place", "elsewhere")
    arguments = json.loads(call["function"]["arguments"])
    assert (arguments["at"]["room"] in ("hall", "attic"), arguments["n"] in (3, 5)) == (True, True)
    assert not choice["message"]["content"]


def test_a_call_that_must_come_leaves_an_empty_thought(f32_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Where the prompt opens a thought, which somebody who demands a call at once has not asked for."""
    verifier = with_template(f32_pair[1], tmp_path / "thinks.gguf", TEMPLATE + "{{- '<think>\\n' }}{# </think> #}")
    with LLM.open("none", verifier, threads=1) as alone, serving(alone, "pair") as server:
        more = {"tools": [PLACES], "tool_choice": "required", "max_tokens": 100}
        choice = ask_for(server, **more).json["choices"][0]
        refused = ask_for(server, **more, think=True)
    (call,) = choice["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"at", "n"}
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (None, None)
    assert (refused.status, "think asks for a thought" in refused.error["message"]) == (400, True)
