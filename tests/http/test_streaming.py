"""Replies on their way: characters come whole, a client that leaves cancels them, and errors arrive mid-stream."""

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, cast

import pytest

from edgellm.engine import Message
from edgellm.errors import Stopped, VerifierLost
from edgellm.http import replies
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.llm.model_loading import PairMemory
from edgellm.spec.params import ReplyOptions
from edgellm.spec.sampling import ModelSampling
from edgellm.spec.stats import Summary
from edgellm.spec.stream import Reply
from edgellm.spec.types import Event, Notice, Source, Token
from tests.http.conftest import HOME, Ask, asker, conversation, serving
from tests.waiting import until

Script = Callable[[Summary, Callable[[], bool]], Generator[Event, None, None]]


def scripted(script: Script) -> Reply:
    def write(stats: Summary, _explain: bool, stopped: Callable[[], bool], *_: object) -> Generator[Event, None, None]:
        for event in script(stats, stopped):
            if isinstance(event, Token):
                stats.token(event)
                stats.show(event)
            yield event

    return Reply(write, prompt_tokens=3, seed=0)


def said(*pieces: bytes) -> list[Token]:
    return [Token(number, piece, Source.VERIFIER) for number, piece in enumerate(pieces)]


class Scripted:
    """A pair whose replies are made up."""

    context_length = 64
    verifier_up = None
    draft_name, verifier_name, chat_template_source = None, "made-up", ""
    memory = PairMemory(Counter(CPU=1), 0)
    sampling = ModelSampling(temperature=0.0)

    def __init__(self, script: Script) -> None:
        self._script, self.prompt_writer, self.model = script, self, self
        self.asked: list[list[Message]] = []

    def reply(self, messages: list[Message], *_: object, **_options: object) -> Reply:
        self.asked.append(messages)
        return scripted(self._script)

    complete = reply

    def fitting_options(self, options: ReplyOptions) -> tuple[ReplyOptions, list[str]]:
        return options, []

    def piece(self, token: int) -> bytes:
        return b"?"


@contextmanager
def opened(script: Script, **options: Any) -> Iterator[HttpServer]:
    with serving(Scripted(script), "made-up", **options) as server:
        yield server


def test_a_character_of_several_tokens_comes_whole_and_a_broken_one_at_the_end() -> None:
    smiley = "😀".encode()
    tokens = said(b"a", smiley[:1], smiley[1:3], smiley[3:] + b"b", smiley[:2])

    with opened(lambda *_: (token for token in tokens)) as server:
        events = asker(server)("POST", "/v1/chat/completions", conversation(stream=True)).events[1:-1]
    texts = [event["choices"][0]["delta"]["content"] for event in events]
    assert texts == ["a", "😀b", "\ufffd"]
    assert [[token["id"] for token in event["edgellm"]["tokens"]] for event in events] == [[0], [1, 2, 3], [4]]


def endless(stats: Summary, stopped: Callable[[], bool]) -> Generator[Event, None, None]:
    while not stopped():
        time.sleep(0.002)
        yield from said(b"on ")


def waiting(go: threading.Event) -> Script:
    """A reply that begins once it may."""

    def script(_stats: Summary, stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        while not go.wait(0.01) and not stopped():
            pass
        yield from said(b"done")

    return script


def failing(_stats: Summary, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
    yield from said(b"It ")
    yield Notice("Something happened.")
    yield from said(b"goes")
    raise VerifierLost("The verifier is gone.", "Start it again.")


def surprising(_stats: Summary, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
    yield from said(b"It ")
    raise ZeroDivisionError("secret")


def test_an_error_mid_stream_has_openais_form() -> None:
    with opened(failing) as server:
        answer = asker(server)("POST", "/v1/chat/completions", conversation(stream=True))
        assert answer.status == 200
        assert b"[DONE]" not in answer.body
        assert answer.events[-1]["error"]["code"] == "verifier_lost"
        notices = [event["edgellm"]["notice"] for event in answer.events[:-1] if "notice" in event.get("edgellm", {})]
        assert notices == ["Something happened."]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
        assert text == "It goes"
        whole = asker(server)("POST", "/v1/chat/completions", conversation())
        assert (whole.status, whole.error["code"]) == (503, "verifier_lost")
        assert int(whole.headers["retry-after"]) >= 1


def test_the_progress_of_a_long_prompt_is_streamed_to_who_asks(own: LLM, ask: Ask) -> None:
    for wanted, stream in ((True, True), (False, True), (True, False)):
        prompt = f"{wanted} {stream} " + "The bus leaves at 8:10. " * 60
        messages = [{"role": "user", "content": prompt}]
        body = {"messages": messages, "max_tokens": 2, "stream": stream, "return_progress": wanted}
        answer = ask("POST", "/v1/chat/completions", body)
        assert answer.status == 200
        if not stream:
            assert b"prompt_progress" not in answer.body
            continue
        progress = [event["prompt_progress"] for event in answer.events if "prompt_progress" in event]
        assert bool(progress) is wanted
        for one in progress:
            assert 0 <= one["cache"] <= one["processed"] <= one["total"]
            timings = answer.events[-1]["timings"]
            read = timings["cache_n"] + timings["prompt_n"]  # a draft model reads the verifier's first words, too
            assert one["total"] == read or one["model"] == own.draft_name
        assert {one["model"] for one in progress} <= {own.draft_name, own.verifier_name}  # a quick one says nothing


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_that_waits_gives_a_sign_of_life(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A reply waits for a model, for other replies or for its first token."""
    monkeypatch.setattr(replies, "SIGN_OF_LIFE", 0.05)
    go = threading.Event()

    def script(_stats: Summary, _stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        assert go.wait(60)
        if fails:
            raise VerifierLost("The verifier is gone.", "Start it again.")
        yield from said(b"done")

    with opened(script) as server, closing(begun(server, conversation(stream=True))) as connection:
        answer = connection.getresponse()
        assert (answer.status, answer.read(11)) == (200, b": waiting\n\n")
        go.set()
        assert answer.read().endswith(b'"code":"verifier_lost"}}\n\n' if fails else b"data: [DONE]\n\n")


def test_details_of_unexpected_errors_are_reported_by_the_server_alone() -> None:
    events: list[str] = []
    with opened(surprising, on_event=events.append) as server:
        ask = asker(server)
        streamed = ask("POST", "/v1/chat/completions", conversation(stream=True))
        assert streamed.events[-1]["error"]["code"] == "internal_error"
        whole = ask("POST", "/v1/chat/completions", conversation())
        assert (whole.status, whole.error["code"]) == (500, "internal_error")
        assert b"secret" not in streamed.body + whole.body
    assert events == ["A reply failed: ZeroDivisionError: secret"] * 2


def says(server: HttpServer, metric: str) -> bool:
    return metric.encode() in asker(server)("GET", "/metrics").body


def begun(server: HttpServer, body: Mapping[str, object]) -> http.client.HTTPConnection:
    """Return the connection of a client that has asked for a chat completion."""
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def leave(connection: http.client.HTTPConnection) -> None:
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_reply(stream: bool) -> None:
    ended = threading.Event()

    def script(stats: Summary, stopped: Callable[[], bool]) -> Generator[Event, None, None]:
        try:
            yield from endless(stats, stopped)
        finally:
            ended.set()

    with opened(script, replies=1, waiting=0) as server:
        connection = begun(server, conversation(stream=stream))
        if stream:
            assert connection.getresponse().read(40)
        else:
            until(lambda: says(server, "edgellm_requests_running 1.0"))
        assert not ended.is_set()
        leave(connection)
        assert ended.wait(120)
        until(lambda: says(server, 'edgellm_requests_total{outcome="cancelled"} 1.0'))


def test_tokenising_blocks_no_other_reply_and_ends_when_its_client_leaves() -> None:
    """As `LLM.reply` does, whose prompt is tokenised at once."""
    began, over = threading.Event(), threading.Event()

    class Tokenising(Scripted):
        def reply(self, *given: Any, **options: Any) -> Reply:
            if given[0][-1].content != "long":
                return scripted(self._script)
            began.set()
            while not options["should_stop"]():
                time.sleep(0.005)
            over.set()
            raise Stopped

    pair = Tokenising(lambda *_: iter(said(b"hello")))  # type: ignore[arg-type]
    with serving(pair, "made-up", replies=2, waiting=0) as server:
        ask = asker(server)
        connection = begun(server, {"messages": [{"role": "user", "content": "long"}]})
        assert began.wait(30)
        answer = ask("POST", "/v1/chat/completions", conversation())
        assert answer.json["choices"][0]["message"]["content"] == "hello"
        assert not over.is_set()
        leave(connection)
        assert over.wait(30)
        # the made-up reply does not say how it ended, and counts as cancelled, too
        until(lambda: says(server, 'edgellm_requests_total{outcome="cancelled"} 2.0'))


def test_too_many_at_once_are_refused_and_one_in_the_queue_that_leaves_makes_room() -> None:
    go = threading.Event()
    with opened(waiting(go), replies=1, waiting=1) as server, ThreadPoolExecutor() as threads:
        ask = asker(server)
        asked = "POST", "/v1/chat/completions", conversation()
        first = threads.submit(ask, *asked)
        until(lambda: says(server, "edgellm_requests_running 1.0"))
        waits = begun(server, conversation())
        until(lambda: says(server, "edgellm_requests_waiting 1.0"))
        for stream in (False, True):
            refused = ask("POST", "/v1/chat/completions", conversation(stream=stream))
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
        waits.close()
        until(lambda: says(server, "edgellm_requests_waiting 0.0"))
        second = threads.submit(ask, *asked)
        until(lambda: says(server, "edgellm_requests_waiting 1.0"))
        go.set()
        assert [one.result().status for one in (first, second)] == [200, 200]
        assert says(server, 'edgellm_requests_total{outcome="refused"} 2.0')


def test_while_it_loads_and_while_it_stops_it_says_so() -> None:
    with HttpServer(HOME) as server, ThreadPoolExecutor() as thread:
        ask = asker(server)
        for path in ("/health", "/v1/models"):
            answer = ask("GET", path)
            assert (answer.status, answer.error["code"]) == (503, "loading")
            assert answer.headers["retry-after"] == "1"
        server.open(ServedModel(cast(LLM, Scripted(endless)), "made-up"))
        assert ask("GET", "/health").json == {"status": "ok", "models": {"made-up": "ok"}}
        asked = "POST", "/v1/chat/completions"
        streaming = thread.submit(ask, *asked, conversation(stream=True))
        until(lambda: says(server, "edgellm_requests_running 1.0"))
        server.request_stop(60)
        until(lambda: ask(*asked, conversation()).status == 503)
        assert ask(*asked, conversation()).error["code"] == "stopping"
        server.request_stop(0)
        assert streaming.result().status == 200
        assert server.wait(120)


def test_without_a_model_all_other_requests_are_answered() -> None:
    with HttpServer(HOME) as server:
        server.models.open_without_model("This process computes layers.")
        ask = asker(server)
        assert ask("GET", "/health").json == {"status": "ok"}
        assert ask("GET", "/v1/models").json == {"object": "list", "data": []}
        assert ask("GET", "/status").json["model"] is None
        answer = ask("POST", "/v1/chat/completions", conversation())
        assert (answer.status, answer.error["message"]) == (404, "This process computes layers.")
