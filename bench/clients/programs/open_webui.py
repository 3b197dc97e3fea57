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


def call(path, body=None, headers=()):
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(URL + path, data, {"Content-Type": "application/json", **dict(headers)})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise Refused(error) from error


def openai_models():
    """GET /v1/models, which tests a connection"""
    check(json.loads(call("/v1/models", headers={"Authorization": "Bearer x"}))["data"][0]["id"] == MODEL)


def openai_chat():
    """POST /v1/chat/completions in a stream, with its extra fields"""
    own = {"metadata": {}, "chat_id": "1", "session_id": "2", "features": {}}
    said = call("/v1/chat/completions", {**ASKED, **own, "model": MODEL, "stream_options": {"include_usage": True}})
    check(said.endswith("data: [DONE]\n\n") and ANSWER in said, said[-300:])


def ollama_version():
    """GET /ollama/api/version"""
    check(json.loads(call("/api/version"))["version"])


def ollama_tags():
    """GET /api/tags"""
    model, *_ = json.loads(call("/api/tags"))["models"]
    check({"name", "model", "digest", "size", "modified_at", "details"} <= set(model), model)


def ollama_chat():
    """POST /api/chat in a stream, with :latest and num_ctx"""
    options = {"temperature": 0.0, "num_ctx": 1024}
    said = call("/api/chat", {**ASKED, "model": f"{MODEL}:latest", "options": options, "keep_alive": "5m"})
    lines = [json.loads(line) for line in said.splitlines()]
    check(lines[-1]["done"] and ANSWER in "".join(line["message"]["content"] for line in lines), lines[-1])


def ollama_generate():
    """POST /api/generate, whole"""
    body = {"model": MODEL, "prompt": QUESTION, "stream": False}
    check(ANSWER in json.loads(call("/api/generate", body))["response"])


def ollama_embed():
    """POST /api/embed"""
    found = json.loads(call("/api/embed", {"model": EMBEDDER, "input": ["The mug is on the shelf."]}))
    check(len(found["embeddings"]) == 1)


run(openai_models, openai_chat, ollama_version, ollama_tags, ollama_chat, ollama_generate, ollama_embed)
