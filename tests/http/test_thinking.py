"""Thoughts over HTTP: a field of their own in messages, deltas and usage, and switches in requests."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgellm.http.schemas.requests import ChatRequest
from edgellm.llm import LLM
from edgellm.spec.params import ReplyOptions
from testkit.chat_traits import TRAITS
from testkit.thinking_templates import ALWAYS, CHANNELS, OPENED, with_template
from tests.http.conftest import QUESTION, Ask, asker, conversation, serving

CHAT = "/v1/chat/completions"
Thinker: TypeAlias = tuple[LLM, Ask]


@pytest.fixture(scope="module")
def thinkers(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Thinker]]:
    """The bundled verifier with several templates, each behind a server."""
    folder, found = tmp_path_factory.mktemp("templates"), dict[str, Thinker]()
    templates = {"always": ALWAYS, "opened": OPENED, "channels": CHANNELS, "none": TRAITS["system first"]}
    with ExitStack() as opened:
        for name, template in templates.items():
            path = with_template(f32_pair[1], folder / f"{name}.gguf", template)
            pair = opened.enter_context(LLM.open("none", path, threads=1))
            found[name] = pair, asker(opened.enter_context(serving(pair, "thinker")))
        yield found


def test_a_thought_is_a_field_of_its_own(thinkers: dict[str, Thinker]) -> None:
    pair, ask = thinkers["always"]
    reply = pair.reply(QUESTION, think=5)
    tokens = list(reply)
    wanted = reply.summary
    assert wanted.thinking
    answer = ask("POST", CHAT, conversation(think=5)).json
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (wanted.thinking, wanted.text)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert answer["usage"]["completion_tokens"] == len(tokens)
    channels = [token["channel"] for token in answer["edgellm"]["tokens"]]
    assert channels == [token.channel.value for token in tokens]


def asked(defaults: ReplyOptions | None = None, **request: Any) -> tuple[object, dict[str, object]]:
    chosen = ChatRequest.model_validate({**conversation(), **request}).options(defaults or ReplyOptions(), 100)
    return chosen.think, dict(chosen.template_args)


def test_what_requests_and_the_server_ask_for() -> None:
    served = ReplyOptions(think=7, template_args={"a": 1, "b": 1})
    assert asked() == (None, {})
    assert asked(served) == (7, {"a": 1, "b": 1})
    assert asked(served, think=False, chat_template_kwargs={"a": 2}) == (False, {"a": 2, "b": 1})
    assert asked(served, reasoning_effort="none") == (7, {"a": 1, "b": 1, "reasoning_effort": "none"})
    assert asked(reasoning_effort="high") == (None, {"reasoning_effort": "high"})


@pytest.mark.parametrize(
    ("template", "path", "more", "ignored"),
    [
        ("channels", CHAT, {"reasoning_effort": "low"}, None),
        ("channels", CHAT, {"reasoning_effort": "xhigh"}, "reasoning_effort"),
        ("opened", CHAT, {"reasoning_effort": "none"}, None),
        ("opened", CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        ("opened", CHAT, {"chat_template_kwargs": {"enable_thought": 1}}, "chat_template_kwargs.enable_thought"),
        ("always", "/v1/responses", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("always", "/api/chat", {"think": "low"}, "think"),
        ("always", "/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 2}}, None),
        ("none", CHAT, {"think": True}, "think"),
        ("none", CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, None),
        ("none", "/v1/responses", {"reasoning": {"effort": "minimal"}}, None),
        ("none", "/api/chat", {"think": "high"}, "think"),
        ("none", "/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 2}}, "thinking"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_model_does_not_have_of_thoughts_is_named(
    thinkers: dict[str, Thinker], template: str, path: str, more: dict[str, Any], ignored: str | None, stream: bool
) -> None:
    _, ask = thinkers[template]
    asked: dict[str, Any] = {
        "/v1/responses": {"input": QUESTION, "max_output_tokens": 2},
        "/api/chat": {**conversation(), "model": "thinker", "options": {"num_predict": 2}},
    }.get(path, conversation(max_tokens=2))
    answer = ask("POST", path, {**asked, **more, "stream": stream})
    assert answer.status == 200
    assert answer.headers.get("x-edgellm-ignored") == ignored


def test_what_the_template_wants_changed_is_told(thinkers: dict[str, Thinker]) -> None:
    _, ask = thinkers["none"]
    turns = [{"role": role, "content": "Hi"} for role in ("user", "system", "user")]
    for stream in (False, True):
        told = ask("POST", CHAT, {"messages": turns, "max_tokens": 1, "stream": stream}).headers["x-edgellm-template"]
        assert told == "The system messages are joined at the beginning. The chat template wants it so."
