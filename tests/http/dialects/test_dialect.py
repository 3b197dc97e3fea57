"""What holds in every dialect: errors in the middle of a stream, verified text that is insisted on, and the key."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from testkit.gguf.changed import with_sampling
from tests.http.conftest import QUESTION, Answer, Ask, asker, serving, written
from tests.http.test_streaming import failing, opened

SAID: Any = [{"role": "user", "content": "Where is my mug?"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": SAID, "max_tokens": 4},
    "/v1/responses": {"input": "Where is my mug?", "max_output_tokens": 4},
    "/api/chat": {"model": "edgellm-draft", "messages": SAID},
    "/api/generate": {"model": "edgellm-draft", "prompt": "Where is my mug?"},
}
every = pytest.mark.parametrize("path", REQUESTS)
KEY = "k" * 43


def said(answer: Answer) -> str:
    """Return the message of a refusal."""
    error = answer.json["error"]
    return str(error if isinstance(error, str) else error["message"])


@every
def test_an_error_in_the_middle_of_a_stream_ends_it_in_the_form_of_the_dialect(path: str) -> None:
    with opened(failing) as server:
        answer = asker(server)("POST", path, {**REQUESTS[path], "model": "made-up", "stream": True})
    assert answer.status == 200
    last: Any = json.loads(answer.body.split(b"data: ")[-1].strip().splitlines()[-1])
    if path == "/v1/messages":
        assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
        error = last["error"]["message"]
    elif path == "/v1/responses":
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        error = last["response"]["error"]["message"]
    else:
        error = last["error"]
    assert "The verifier is gone." in error


@pytest.mark.parametrize("path", [*REQUESTS, "/v1/chat/completions"])
def test_without_a_verifier_none_can_be_required(path: str, f32_pair: tuple[Path, Path]) -> None:
    with LLM.open(f32_pair[0], "none", threads=1) as pair, serving(pair, "edgellm-draft") as server:
        ask = asker(server)
        for more, headers in (({"require_verified": True}, {}), ({}, {"X-EdgeLLM-Require-Verified": "true"})):
            answer = ask("POST", path, {**REQUESTS.get(path, {"messages": SAID}), "stream": False, **more}, headers)
            assert (answer.status, "no verifier is open here" in said(answer)) == (400, True)


@pytest.fixture(scope="module")
def sampled(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A verifier that wants to be sampled, alone."""
    path = with_sampling(f32_pair[1], tmp_path_factory.mktemp("sampled") / "verifier.gguf", temp=5.0, top_k=0)
    with LLM.open("none", path, threads=1) as pair:
        yield pair


def written_by(answer: Answer, path: str) -> str:
    """Return the text of a whole reply."""
    found = answer.json
    return {
        "/v1/messages": lambda: "".join(part["text"] for part in found["content"]),
        "/v1/responses": lambda: found["output"][0]["content"][0]["text"],
        "/api/chat": lambda: found["message"]["content"], "/api/generate": lambda: found["response"],
        "/v1/chat/completions": lambda: found["choices"][0]["message"]["content"],
    }[path]()  # fmt: skip


@pytest.mark.parametrize("path", [*REQUESTS, "/v1/chat/completions"])
def test_a_request_without_a_temperature_is_sampled_as_the_model_wants(path: str, sampled: LLM) -> None:
    """The summary tells the seed, which repeats the text; temperature 0 stays greedy."""
    ollama = path.startswith("/api")
    with serving(sampled, "edgellm-draft") as server:

        def ask(**options: float) -> Answer:
            more = {"options": {"num_predict": 16, **options}} if ollama else options
            longest = {"max_output_tokens": 16} if path == "/v1/responses" else {} if ollama else {"max_tokens": 16}
            request = REQUESTS.get(path, {"messages": SAID})
            return asker(server)("POST", path, {**request, "stream": False, **longest, **more})

        answers = [ask(), ask()]
        texts = [written_by(answer, path) for answer in answers]
        assert texts[0] != texts[1]
        for answer, text in zip(answers, texts, strict=True):
            seed = answer.json["edgellm"]["summary"]["seed"]
            assert text == written(sampled, question="Where is my mug?", seed=seed, max_tokens=16)
            if ollama or path == "/v1/chat/completions":
                assert written_by(ask(seed=seed), path) == text
        greedy = written(sampled, question="Where is my mug?", temperature=0.0, max_tokens=16)
        assert written_by(ask(temperature=0.0), path) == greedy


def refusal(ask: Ask, path: str, headers: dict[str, str]) -> tuple[int, str]:
    answer = ask("POST", path, REQUESTS[path], headers)
    return answer.status, said(answer)


@every
def test_the_key_is_taken_from_either_header(path: str) -> None:
    with opened(failing, key=KEY) as server:
        ask = asker(server)
        wrong: tuple[dict[str, str], ...] = ({}, {"X-Api-Key": KEY[1:]}, {"Authorization": f"Bearer {KEY}x"})
        for headers in (*wrong, {"X-Api-Key": KEY, "Authorization": "Bearer other"}):
            status, message = refusal(ask, path, headers)
            assert (status, "API key" in message) == (401, True)
        for headers in ({"X-Api-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            status, message = refusal(ask, path, {**headers, "Host": "example.org"})
            assert (status, "not a name of this server" in message) == (403, True)
            answer = ask("POST", path, {**REQUESTS[path], "model": "other"}, headers)
            assert (answer.status, "not served here" in said(answer)) == (404, True)


ASKED: Any = {"model": "edgellm-verifier", "messages": [{"role": "user", "content": QUESTION}]}


def test_system_prompts_stop_sequences_and_blocks(server: HttpServer, ask: Ask) -> None:
    import anthropic

    blocks: Any = [
        {"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in QUESTION.partition("\n\n")
    ]
    system: Any = [{"type": "text", "text": "You are at home."}]
    with anthropic.Anthropic(base_url=server.url, api_key="none is needed", max_retries=0) as client:
        stopped = client.messages.create(
            model="edgellm-verifier", max_tokens=40, messages=[{"role": "user", "content": blocks}],
            stop_sequences=[" is"],
        )  # fmt: skip
        counted = [
            client.messages.count_tokens(**ASKED, system=one).input_tokens for one in ("", "You are at home.", system)
        ]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert counted[0] < counted[1] == counted[2]
    raw = ask("POST", "/v1/messages", {**ASKED, "max_tokens": 1, "service_tier": "auto", "system": system})
    assert raw.headers["x-edgellm-ignored"] == "service_tier"
    assert raw.headers["x-edgellm-verified"] == "1.0000"
    usage = raw.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted[1]
