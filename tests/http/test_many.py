"""Requests that are served at once get the replies that each would get alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgellm.engine import Model
from edgellm.http.model_pool import ServedModel
from edgellm.http.server import HttpConfig, HttpServer
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from tests.http.conftest import HOME, Answer, asker, serving
from tests.spec.real import case

CLIENTS = 8  # more than are served at once, and two of each prompt: one streams


@contextmanager
def together(own: LLM) -> Iterator[HttpServer]:
    """A pair, whose replies take turns."""
    with serving(own, "edgellm-verifier", replies=3, waiting=CLIENTS) as server:
        yield server


@contextmanager
def in_batches(path: Path) -> Iterator[HttpServer]:
    """A served verifier, which computes them in one batch; more of them than it has room for."""
    with (
        Model.load(path) as model,
        VerifierServer(model, Address.parse("127.0.0.1:0"), context=512, sessions=2, threads=1) as verifier,
        LLM.of(model, verifier=verifier.inside(), threads=1) as pair,
        HttpServer(HOME, HttpConfig(replies=4, waiting=CLIENTS)) as server,
    ):
        server.open(ServedModel(pair, "edgellm-verifier", in_turns=False))
        yield server


@pytest.mark.parametrize("how", ["together", "in batches"])
def test_everyone_gets_the_same_as_alone(own: LLM, f32_pair: tuple[Path, Path], how: str) -> None:
    with together(own) if how == "together" else in_batches(f32_pair[1]) as server:
        ask = asker(server)
        answers: dict[int, Answer] = {}

        def post(number: int) -> None:
            turns = [{"role": turn.role, "content": turn.content} for turn in case(number % 4)]
            body = {"messages": turns, "max_tokens": 24, "stream": number < 4}
            answers[number] = ask("POST", "/v1/chat/completions", body)

        threads = [threading.Thread(target=post, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(4):
        reply = own.reply(case(number), max_tokens=24)
        list(reply)
        for at in range(number, CLIENTS, 4):
            assert answers[at].status == 200
            assert text_of(answers[at], stream=at < 4) == reply.summary.text


def text_of(answer: Answer, *, stream: bool) -> str:
    if not stream:
        return str(answer.json["choices"][0]["message"]["content"])
    return "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events)
