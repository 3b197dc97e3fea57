"""The calls that Open WebUI makes to a server of OpenAI's API and to Ollama, as its documentation describes them."""

import json
import urllib.error
import urllib.request

from common import ANSWER, EMBEDDER, MODEL, QUESTION, URL, check, run

ASKED = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}


class Refused(Exception):
    """An answer with an error's status."""

    def __init__(self, error):
        super().__init__(error.read().decode())
        self.status_code = error.code


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(URL + path, data, {"Content-Type": "application/json", "Authorization": "Bearer x"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise Refused(error) from error


def lines(said):
    return [json.loads(line) for line in said.splitlines()]


own = {"metadata": {}, "chat_id": "1", "session_id": "2", "features": {}, "stream_options": {"include_usage": True}}
by_ollama = {"model": f"{MODEL}:latest", "options": {"temperature": 0.0, "num_ctx": 1024}, "keep_alive": "5m"}
CALLS = {
    "GET /v1/models, which tests a connection": lambda: check(json.loads(call("/v1/models"))["data"][0]["id"] == MODEL),
    "POST /v1/chat/completions in a stream, with its extra fields": lambda: check(
        ANSWER in (said := call("/v1/chat/completions", {**ASKED, **own, "model": MODEL})) and "[DONE]" in said
    ),
    "GET /ollama/api/version": lambda: check(json.loads(call("/api/version"))["version"]),
    "GET /api/tags": lambda: check(
        {"name", "model", "digest", "size", "modified_at", "details"} <= set(json.loads(call("/api/tags"))["models"][0])
    ),
    "POST /api/chat in a stream, with :latest and num_ctx": lambda: check(
        ANSWER in "".join(one["message"]["content"] for one in lines(call("/api/chat", {**ASKED, **by_ollama})))
    ),
    "POST /api/generate, whole": lambda: check(
        ANSWER in json.loads(call("/api/generate", {"model": MODEL, "prompt": QUESTION, "stream": False}))["response"]
    ),
    "POST /api/embed": lambda: check(
        len(json.loads(call("/api/embed", {"model": EMBEDDER, "input": ["The mug."]}))["embeddings"]) == 1
    ),
}
for name, made in CALLS.items():
    made.__doc__ = name
run(*CALLS.values())
