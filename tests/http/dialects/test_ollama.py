"""Ollama's API, by its own client."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import ollama
import pytest

from edgellm.engine import Model
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.upstream.opening import open_upstream
from testkit.thinking_templates import with_template
from tests.http.conftest import QUESTION, Ask, asker, conversation, serving
from tests.http.dialects.test_own_clients import thinker

__all__ = ["thinker"]

ASKED: Any = {"model": "edgellm-verifier", "messages": [{"role": "user", "content": QUESTION}]}


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as opened:
        yield opened


def test_a_text_is_continued_in_the_template_and_without(client: ollama.Client, ask: Ask) -> None:
    wanted = ask("POST", "/v1/chat/completions", conversation(max_tokens=4)).json["choices"][0]["message"]["content"]
    asked: Any = {"model": "edgellm-verifier:latest", "prompt": QUESTION, "options": {"num_predict": 4}}
    assert client.generate(**asked).response == wanted
    assert "".join(line.response or "" for line in client.generate(**asked, stream=True)) == wanted
    plain = ask("POST", "/v1/completions", {"prompt": "The film", "max_tokens": 4}).json["choices"][0]["text"]
    raw: Any = {"model": "edgellm-verifier", "prompt": "The film", "raw": True, "options": {"num_predict": 4}}
    assert client.generate(**raw).response == plain
    with_system = client.generate(**asked, system="You are at home.")
    assert (with_system.prompt_eval_count or 0) > (client.generate(**asked).prompt_eval_count or 0)


def test_streams_are_lines_and_say_how_much_was_verified(ask: Ask) -> None:
    answer = ask("POST", "/api/chat", {**ASKED, "options": {"num_predict": 3, "num_ctx": 4096}})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["x-edgellm-ignored"] == "options.num_ctx"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert lines[-1]["edgellm"]["summary"]["share_verified"] == 1.0
    assert lines[-1]["done_reason"] == "length"
    whole = ask("POST", "/api/chat", {**ASKED, "stream": False, "options": {"num_predict": 3}})
    assert whole.headers["x-edgellm-verified"] == "1.0000"


def test_what_clients_ask_about_models(client: ollama.Client, own: LLM, ask: Ask) -> None:
    listed: Any = client.list().models[0]
    (running,) = client.ps().models
    assert listed.model == running.model == "edgellm-verifier:latest"
    assert running.context_length == own.context_length
    assert listed.details.family == "llama"
    shown: Any = client.show("edgellm-verifier")
    assert (shown.details.quantization_level, shown.capabilities) == ("F32", ["completion", "tools"])
    assert shown.modelinfo["llama.context_length"] == own.context_length
    assert shown.template
    assert ask("GET", "/api/version").json["version"].count(".") == 2


def test_the_server_is_known_as_a_verifier_with_its_template(server: HttpServer, draft_path: Path) -> None:
    with Model.load(draft_path) as draft, closing(open_upstream(server.url, draft)) as verifier:
        assert verifier.elsewhere.finding.startswith(f"edgellm at {server.url} verifies by continue")
        assert [one[-21:] for one in verifier.elsewhere.notices] == ["decides what it logs."]


def test_a_request_without_a_prompt_has_the_model_loaded(client: ollama.Client) -> None:
    assert client.generate(model="edgellm-verifier").done_reason == "load"
    assert client.chat(model="edgellm-verifier:latest").done_reason == "load"
    assert client.generate(model="edgellm-verifier", keep_alive="0s").done_reason == "unload"
    assert client.chat(model="edgellm-verifier", keep_alive=0).done_reason == "unload"


def test_a_body_is_json_whatever_its_type_is_said_to_be(ask: Ask) -> None:
    """As curl sends it by Ollama's documentation."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for path, body in (("/api/chat", ASKED), ("/api/generate", {"model": "edgellm-verifier", "prompt": "Hello."})):
        assert ask("POST", path, {**body, "options": {"num_predict": 1}}, form).status == 200
    refused = ask("POST", "/api/generate", {"model": 5}, form)
    assert (refused.status, refused.json["error"]) == (400, "model is 5. It should be a valid string.")
    foreign = {"Origin": "https://example.org", **form}
    assert ask("POST", "/api/chat", ASKED, foreign).status == 403
    assert ask("POST", "/v1/messages", {**ASKED, "max_tokens": 1}, form).status == 415


def test_errors_are_the_clients_own(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"options.temperature is -1. It should be greater"):
        client.chat(**{**ASKED, "options": {"temperature": -1}})
    with pytest.raises(ollama.ResponseError, match="suffix is 'b', which is not supported"):
        client.generate("edgellm-verifier", "a", suffix="b")
    image: Any = {"role": "user", "content": "What is it?", "images": ["aGVsbG8="]}
    with pytest.raises(ollama.ResponseError, match="read only text"):
        client.chat("edgellm-verifier", [image])


def test_thoughts_of_a_text_have_a_field_of_their_own(thinker: HttpServer) -> None:
    said = asker(thinker)("POST", "/v1/chat/completions", conversation(max_tokens=40, think=True)).json
    said = said["choices"][0]["message"]
    with ollama.Client(host=thinker.url) as client:
        text = client.generate("thinker", QUESTION, think=True, options={"num_predict": 40})
        assert (text.thinking, text.response) == (said["reasoning_content"], said["content"] or "")
        assert not client.chat("thinker", ASKED["messages"], think=False, options={"num_predict": 4}).message.thinking


def test_a_model_without_a_template_continues_a_text(f32_pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = with_template(f32_pair[1], tmp_path / "base.gguf", "")
    asked = {"model": "base", "prompt": "The film", "stream": False, "options": {"num_predict": 4, "temperature": 0}}
    with LLM.open("none", path, threads=1) as pair, serving(pair, "base") as server:
        raw, text = (asker(server)("POST", "/api/generate", {**asked, "raw": raw}).json for raw in (True, False))
    assert text["response"] == raw["response"] != ""
