"""A server over the real pair, and a client for it."""

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from edgellm.engine import Model
from edgellm.engine.embedding.embedder import Embedder
from edgellm.http.middleware import HttpConfig
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.spec.stream import Reply
from edgellm.storage.chat_log import History
from testkit.gguf.architectures import write_bert

HOME = Address.parse("127.0.0.1:0")
QUESTION = "The film night is on Friday at 20:00.\n\nWhen is the film night?"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events, without [DONE] and comments."""
        lines = [
            line.removeprefix("data: ")
            for line in self.body.decode().split("\n\n")
            if line and not line.startswith(":")
        ]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def events_named(self) -> list[Any]:
        """The data of server-sent events that have names."""
        lines = self.body.decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


Ask = Callable[..., Answer]


def configured(**config: Any) -> HttpServer:
    """A server with the fields of `HttpConfig`."""
    return HttpServer(HOME, HttpConfig(**config))


@contextmanager
def serving(pair: Any, name: str, **config: Any) -> Iterator[HttpServer]:
    """A server of one pair, real or made up, with the fields of `HttpConfig`."""
    with configured(**config) as server:
        server.open(ServedModel(pair, name))
        yield server


def asker(server: HttpServer) -> Ask:
    """`ask("GET", "/health")`, `ask("POST", path, {...})`; `body` may be bytes, headers replace those of the client."""

    def ask(method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        wanted = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, data, wanted | (headers or {}))
        answer = connection.getresponse()
        shown = {name.lower(): value for name, value in answer.getheaders()}
        done = Answer(answer.status, shown, answer.read())
        connection.close()
        return done

    return ask


def conversation(**more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": QUESTION}], **more}


def written(pair: LLM, question: str = QUESTION, **options: Any) -> str:
    reply: Reply = pair.reply(question, **options)
    list(reply)
    return reply.summary.text


@pytest.fixture
def store(home: Path) -> History:
    """The conversations of a home of their own."""
    return History()


@pytest.fixture(scope="package")
def own(f32_pair: tuple[Path, Path]) -> Iterator[LLM]:
    """The pair behind the server."""
    with LLM.open(*f32_pair, threads=1) as opened:
        yield opened


@pytest.fixture(scope="package")
def server(own: LLM) -> Iterator[HttpServer]:
    events: list[str] = []
    with serving(own, "edgellm-verifier", on_event=events.append) as opened:
        yield opened
    assert events == []


@pytest.fixture
def ask(server: HttpServer) -> Ask:
    return asker(server)


def client_of(server: HttpServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none is needed", max_retries=0)


@pytest.fixture(scope="package")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as opened:
        yield opened


@pytest.fixture(scope="package")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    path = tmp_path_factory.mktemp("embedding") / "bert.gguf"
    write_bert(path)
    with Model.load(path) as model, Embedder(model) as opened:
        yield opened
