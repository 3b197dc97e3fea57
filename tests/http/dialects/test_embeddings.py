"""Embeddings over HTTP, by OpenAI's client and by Ollama's."""

from collections.abc import Iterator

import numpy as np
import ollama
import pytest

from edgellm.engine.embedding.embedder import Embedder
from edgellm.http.model_host import ServedEmbedder
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from tests.http.conftest import Ask, asker, client_of, serving

TEXTS = ["The mug is on the shelf.", "Where is my mug?"]


@pytest.fixture(scope="module")
def embedding(own: LLM, embedder: Embedder) -> Iterator[HttpServer]:
    with serving(own, "edgellm-verifier") as server:
        server.models.open_embedder(ServedEmbedder("bert", embedder))
        yield server


def test_the_openai_client_gets_the_models_vectors(embedding: HttpServer, embedder: Embedder) -> None:
    wanted = [embedder.embed(embedder.ids(text)) for text in TEXTS]
    with client_of(embedding) as client:
        by_client = client.embeddings.create(model="bert", input=TEXTS)  # it asks for base64
        plain = client.embeddings.create(model="bert", input=TEXTS[0], encoding_format="float")
        ids = client.embeddings.create(model="bert", input=[embedder.ids(text).tolist() for text in TEXTS])
    for found in (by_client, ids):
        for entry, vector in zip(found.data, wanted, strict=True):
            np.testing.assert_array_equal(np.array(entry.embedding, np.float32), vector)
    np.testing.assert_array_equal(np.array(plain.data[0].embedding, np.float32), wanted[0])
    assert [entry.index for entry in by_client.data] == [0, 1]
    assert by_client.model == "bert"
    assert by_client.usage.prompt_tokens == sum(len(embedder.ids(text)) for text in TEXTS)


def test_ollamas_client_gets_them_too(embedding: HttpServer, embedder: Embedder) -> None:
    wanted = [embedder.embed(embedder.ids(text)) for text in TEXTS]
    with ollama.Client(host=embedding.url) as client:
        found = client.embed("bert:latest", TEXTS)
        np.testing.assert_array_equal(np.array(found.embeddings, np.float32), wanted)
        long = "word " * embedder.positions
        assert client.embed("bert", long).prompt_eval_count == embedder.positions
        with pytest.raises(ollama.ResponseError, match="tokens"):
            client.embed("bert", long, truncate=False)
        np.testing.assert_array_equal(np.array(client.embeddings("bert", TEXTS[0]).embedding, np.float32), wanted[0])
        empty = np.array(client.embed("bert", ["a", ""]).embeddings, np.float32)[1]
        np.testing.assert_array_equal(empty, embedder.embed(embedder.ids("")))
        assert list(client.embed("bert", []).embeddings) == []


def test_what_is_refused(embedding: HttpServer, ask: Ask) -> None:
    asked = asker(embedding)
    for body, status, said in (
        ({"input": "a", "model": "other"}, 404, "'other' embeds no texts here"),
        ({"input": "a", "dimensions": 3}, 400, "dimensions is 3, and bert gives 64"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", 5]}, 400, "input"),
        ({"input": [10**6]}, 400, "1000000 is not a token"),
        ({"input": "word " * 100}, 400, "tokens"),
    ):
        answer = asked("POST", "/v1/embeddings", body)
        assert (answer.status, said in answer.error["message"]) == (status, True), answer.body
    none = ask("POST", "/v1/embeddings", {"input": "a"})
    assert (none.status, none.error["code"]) == (404, "model_not_found")
    assert "--embeddings MODEL" in none.error["message"]
    assert "--embeddings" in ask("POST", "/api/embed", {"model": "bert", "input": "a"}).json["error"]


def test_the_lists_of_models_name_it(embedding: HttpServer, embedder: Embedder) -> None:
    asked = asker(embedding)
    (bert,) = [one for one in asked("GET", "/v1/models").json["data"] if one["embeds"]]
    assert (bert["id"], bert["loaded"], bert["context_length"]) == ("bert", True, embedder.positions)
    assert asked("GET", "/v1/models/bert").json == bert
    with ollama.Client(host=embedding.url) as client:
        assert [one.model for one in client.list().models] == ["edgellm-verifier:latest", "bert:latest"]
        running = client.ps().models[-1]
        assert (running.model, running.context_length) == ("bert:latest", embedder.positions)
        assert running.size == embedder.model.header.file_size
        for name in ("bert", "bert:latest"):
            shown = client.show(name)
            assert (shown.capabilities, shown.details and shown.details.family) == (["embedding"], "bert")
    chat = asked("POST", "/v1/chat/completions", {"model": "bert", "messages": [{"role": "user", "content": "a"}]})
    assert (chat.status, "bert embeds texts" in chat.error["message"]) == (400, True)


@pytest.mark.parametrize(("path", "more"), [("/v1/embeddings", {}), ("/api/embed", {"options": {"num_ctx": 5}})])
def test_unknown_parameters_are_named(embedding: HttpServer, path: str, more: dict[str, object]) -> None:
    asked = asker(embedding)
    answer = asked("POST", path, {"model": "bert", "input": "a", "normalize": True, **more})
    assert answer.headers["x-edgellm-ignored"] == ", ".join(sorted(["normalize", *more]))
