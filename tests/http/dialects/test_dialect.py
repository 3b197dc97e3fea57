"""What holds in every dialect: errors in the middle of a stream, verified text that is insisted on, and the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from tests.http.conftest import HOME, Answer, Ask, asker
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


@every
def test_without_a_verifier_none_can_be_required(path: str, f32_pair: tuple[Path, Path]) -> None:
    with LLM.open(f32_pair[0], "none", threads=1) as pair, HttpServer(HOME) as server:
        server.open(ServedModel(pair, "edgellm-draft"))
        ask = asker(server)
        for more, headers in (({"require_verified": True}, {}), ({}, {"X-EdgeLLM-Require-Verified": "true"})):
            answer = ask("POST", path, {**REQUESTS[path], "stream": False, **more}, headers)
            assert (answer.status, "no verifier is open here" in said(answer)) == (400, True)


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
