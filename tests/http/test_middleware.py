"""Requests that are refused, and what clients that show no key do not learn."""

import http.client
import json
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from edgellm.errors import InvalidOption, PortTaken, VerifierLost
from edgellm.http import middleware
from edgellm.http.dialects import error_body
from edgellm.http.middleware import HttpConfig, checked_host, checked_origin, redact
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.rpc.trust.trust import Peer, Trust
from edgellm.spec.types import Notice
from tests.http.conftest import HOME, Ask, asker, conversation, serving
from tests.http.test_streaming import scripted
from tests.rpc.strangers import befriend

PATHS = [("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/completions")]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1", "localhost."]
)
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_another_host_is_refused(ask: Ask, method: str, path: str, host: str) -> None:
    body = {"prompt": "a"} if method == "POST" else None
    answer = ask(method, path, body, {"Host": host})
    assert (answer.status, answer.error["code"]) == (403, "wrong_host")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
def test_every_name_of_this_machine_is_accepted(ask: Ask, server: HttpServer, host: str) -> None:
    for port in ("", f":{server.address.port}"):
        assert ask("GET", "/health", None, {"Host": host + port}).status == 200


def test_the_own_origin_is_accepted(ask: Ask, server: HttpServer) -> None:
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    answer = ask("POST", "/v1/completions", {"prompt": "The film", "max_tokens": 1}, own)
    assert answer.status == 200
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


PAGE = "https://chat.example.org"


@pytest.fixture(scope="module")
def allowing(own: LLM) -> Iterator[Ask]:
    """A server that lets pages of an origin and a container in, and others not."""
    options = {"names": ["host.docker.internal"], "origins": [f"{PAGE}:443/", "app://obsidian.md"]}
    with serving(own, "edgellm-verifier", key="k" * 43, **options) as server:
        yield asker(server)


ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}


@pytest.mark.parametrize("origin", [PAGE, "app://obsidian.md"])
def test_a_page_of_an_allowed_origin_may_ask_and_read(allowing: Ask, origin: str) -> None:
    sent = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
    asked = allowing(
        "OPTIONS", "/v1/completions", None, sent | ASKED | {"Access-Control-Request-Private-Network": "true"}
    )
    assert asked.status == 200
    assert asked.headers["access-control-allow-origin"] == origin
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert asked.headers["access-control-allow-private-network"] == "true"
    body = {"prompt": "The film", "max_tokens": 1}
    for key, status in (("k" * 43, 200), ("wrong", 401)):  # a page has to know the key, too
        answer = allowing("POST", "/v1/completions", body, sent | {"Authorization": f"Bearer {key}"})
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == origin
        assert answer.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://chat.example.org"}, {"Origin": f"{PAGE}.evil.example"}, {"Origin": f"{PAGE}:444"},
        {"Origin": f"{PAGE}, {PAGE}"}, {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},  # an image or a script: it names no origin
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_another_origin_is_refused_also_where_some_are_allowed(
    ask: Ask, allowing: Ask, method: str, headers: dict[str, str]
) -> None:
    more = {"Authorization": f"Bearer {'k' * 43}"} | (ASKED if method == "OPTIONS" else {})
    for asked in (ask, allowing):
        for path in ("/v1/completions",) if method == "POST" else [path for _, path in PATHS]:
            answer = asked(method, path, {"prompt": "a"} if method == "POST" else None, headers | more)
            assert (answer.status, answer.error["code"]) == (403, "cross_origin")
            assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_rebound_name_is_refused_whatever_is_allowed(allowing: Ask) -> None:
    """Also where a page of an allowed origin asks: its name is not that of this machine."""
    key = {"Authorization": f"Bearer {'k' * 43}"}
    for host in ("evil.example", "chat.example.org", "x.host.docker.internal", "docker.internal"):
        for more in ({}, {"Origin": PAGE}, {"Origin": f"https://{host}"}, {"Origin": PAGE, **ASKED}):
            method = "OPTIONS" if "Access-Control-Request-Method" in more else "GET"
            answer = allowing(method, "/v1/models", None, key | more | {"Host": host})
            assert (answer.status, answer.error["code"]) == (403, "wrong_host")
    for host in ("host.docker.internal", "host.docker.internal:8080", "HOST.docker.internal"):
        assert allowing("GET", "/v1/models", None, key | {"Host": host}).status == 200


@pytest.mark.parametrize("value", [None, "", "Bearer ", "Bearer kkk", f"Basic {'k' * 43}", f"Bearer {'k' * 44}", "é"])
def test_without_the_key_requests_are_refused(allowing: Ask, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}
    for method, path in PATHS[1:]:
        answer = allowing(method, path, {"prompt": "a"} if method == "POST" else None, headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert allowing("GET", "/health", None, headers).json == {"status": "ok"}  # and no model's name
    for scheme in ("Bearer", "bearer"):
        assert allowing("GET", "/v1/models", None, {"Authorization": f"{scheme} {'k' * 43}"}).status == 200


KEY, WRONG = (b"authorization", b"Bearer " + b"k" * 43), (b"authorization", b"Bearer x")
HERE, ELSEWHERE = (b"host", b"localhost"), (b"host", b"evil.example")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([HERE, KEY], 200), ([HERE, KEY, WRONG], 401), ([HERE, WRONG, KEY], 401), ([HERE, ELSEWHERE, KEY], 403),
        ([ELSEWHERE, HERE, KEY], 403), ([KEY], 403),
    ],
    ids=str,
)  # fmt: skip
async def test_a_header_that_is_given_twice_is_not_believed(headers: list[tuple[bytes, bytes]], status: int) -> None:
    """Whatever the server in front of the middleware makes of them."""
    answers: list[int] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        answers.extend([message["status"]] if "status" in message else [])

    scope = {"type": "http", "scheme": "http", "method": "GET", "path": "/v1/models", "headers": headers}
    await middleware.SecurityMiddleware(app, ["localhost"], middleware.Keys("k" * 43), error_body)(scope, receive, send)
    assert answers == [status]


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_a_request_is_refused(server: HttpServer, monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    monkeypatch.setattr(middleware, "MAX_BYTES", 1000)
    connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=120)
    body, headers = iter([b"a" * 600] * 4) if chunked else b"a" * 2000, {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers, encode_chunked=chunked)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_request_that_does_not_arrive_in_time_is_refused(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "CLIENT_SECONDS", 0.2)
    with socket.create_connection((server.address.host, server.address.port), timeout=120) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 100\r\n\r\n{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


def test_another_type_than_json_is_refused(ask: Ask) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = ask("POST", "/v1/completions", b'{"prompt": "a"}', {"Content-Type": kind})
        assert answer.status == 415
        assert "application/json" in answer.error["message"]


def test_a_server_that_cannot_be_started(tmp_path: Path) -> None:
    for config in (HttpConfig(), HttpConfig(key="k" * 43), HttpConfig((tmp_path, tmp_path))):
        with pytest.raises(InvalidOption, match="no key or no cert"):
            HttpServer(Address.parse("192.168.1.2:0"), config)
    for replies, waiting in ((0, 1), (1, -1), (10**6, 1)):
        with pytest.raises(InvalidOption, match=r"replies|waiting"):
            HttpServer(HOME, HttpConfig(replies=replies, waiting=waiting))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortTaken):
        HttpServer(Address("127.0.0.1", taken.getsockname()[1])).start()


@pytest.mark.parametrize(
    ("check", "given", "expected"),
    [
        (checked_host, "Host.Docker.Internal", "host.docker.internal"), (checked_host, "desk", "desk"),
        (checked_host, "192.168.1.2", "192.168.1.2"), (checked_host, "[::1]", "::1"),
        (checked_origin, "HTTPS://Chat.Example.org/", "https://chat.example.org"),
        (checked_origin, "https://a.org:443", "https://a.org"), (checked_origin, "http://[::1]:80", "http://[::1]"),
        (checked_origin, "http://localhost:3000", "http://localhost:3000"),
        (checked_origin, "chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)  # fmt: skip
def test_hosts_and_origins(check: Callable[[str], str], given: str, expected: str) -> None:
    assert check(given) == expected


OTHER_HOSTS = ("*", "*.example.org", "", "a b", "a:80", "http://a", "a/", ".a", "a.", "-a", "a" * 300)
OTHER_ORIGINS = (
    "*", "null", "", "https://*", "https://*.example.org", "example.org", "https://a/b", "https://", "file://", "a b",
)  # fmt: skip


@pytest.mark.parametrize(
    ("check", "option", "given"),
    [(checked_host, "host", one) for one in OTHER_HOSTS] + [(checked_origin, "origin", one) for one in OTHER_ORIGINS],
)
def test_others_cannot_be_allowed(check: Callable[[str], str], option: str, given: str) -> None:
    with pytest.raises(InvalidOption, match=f"--allow-{option} is"):
        check(given)


# --- names of other devices -------------------------------------------------------------------------------------------


SHOWN = "k" * 43
EVERY_PATH = ("/", "/health", "/status", "/metrics", "/v1/models", "/openapi.json", "/page/chat.js", "/nothing")


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A paired device of this user, last seen at two addresses."""
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "own"))
    here, there = Trust.load(), Trust.load(tmp_path / "there")
    befriend(there, here, name="Grandma's attic")
    for address in ("192.168.7.21:50151", "[fd00::7]:50151"):
        here.peers.record_seen(there.identity.id, Address.parse(address))
    return here.peers.all()[0]


@pytest.fixture
def talkative(own: LLM, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A pair whose replies name the device in a notice, or in an error."""
    said = f"{peer.name} ({peer.id.short}) at {peer.addresses[0]} is gone, so is [fe80::1%eth0]:7 and 10.0.0.9."

    def script(*_: object) -> Generator[Notice, None, None]:
        yield Notice(said)
        raise VerifierLost(said, "Try again.")

    monkeypatch.setattr(own, "reply", lambda *_words, **_options: scripted(script))
    return own


def test_without_a_key_no_path_names_a_device(talkative: LLM, peer: Peer) -> None:
    with serving(talkative, "edgellm-verifier") as server:
        ask = asker(server)
        answers = "".join(ask("GET", path).body.decode() for path in EVERY_PATH)
        for stream in (False, True):
            answers += ask("POST", "/v1/chat/completions", conversation(stream=stream)).body.decode()
        answers += ask("GET", "/health", headers={"Host": "evil.example"}).body.decode()
        assert "device 1" in answers
        secrets = [peer.name, str(peer.id), peer.id.short, "192.168.7.21", "fd00::7", "fe80::1", "10.0.0.9"]
        assert not [secret for secret in secrets if secret.casefold() in answers.casefold()]
        assert ask("GET", "/status").json["devices"] == []


@pytest.mark.parametrize("key", ["key", "page_key"])
def test_with_a_key_they_are_named(talkative: LLM, peer: Peer, key: str) -> None:
    with serving(talkative, "edgellm-verifier", **{key: SHOWN}) as server:
        ask, headers = asker(server), {"Authorization": f"Bearer {SHOWN}"}
        (device,) = ask("GET", "/status", headers=headers).json["devices"]
        assert (device["name"], device["short"]) == (peer.name, peer.id.short)
        message = ask("POST", "/v1/chat/completions", conversation(), headers).error["message"]
        assert peer.name in message
        assert "10.0.0.9" in message


def test_words_are_replaced_whole_and_this_machine_is_no_secret(peer: Peer) -> None:
    assert redact("127.0.0.1:8080, [::1]:7 and layers 1.2.3 of v1.2.3.4.5", [peer]) == (
        "127.0.0.1:8080, [::1]:7 and layers 1.2.3 of v1.2.3.4.5"
    )
    assert redact("GRANDMA'S ATTIC, not Grandma's attics", [peer]) == "device 1, not Grandma's attics"
    assert json.loads(redact(json.dumps({"at": "http://[fd00::7]:50151/x"}), [peer])) == {"at": "http://device 1/x"}
