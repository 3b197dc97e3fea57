"""A phone gets a key to the page for a code from the user's screen, once, and loses it when it is revoked."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from edgellm.http.middleware import Keys
from edgellm.http.server import HttpServer
from edgellm.rpc.trust.identity import DeviceID
from edgellm.rpc.trust.trust import Peers, Phone
from tests.http.conftest import Answer, asker, conversation, serving
from tests.http.test_streaming import Scripted, endless
from tests.waiting import until

API, PAGE = "a" * 43, "p" * 43


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def server(store: object, said: list[str]) -> Iterator[HttpServer]:
    with serving(Scripted(endless), "made-up", key=API, page_key=PAGE, on_event=said.append) as opened:
        yield opened


def ask(server: HttpServer, method: str, path: str, body: object = None, key: str = "", **headers: str) -> Answer:
    return asker(server)(method, path, body, headers | ({"Authorization": f"Bearer {key}"} if key else {}))


def pair(server: HttpServer, code: str, name: str = "iPhone", key: str = "", **headers: str) -> Answer:
    return ask(server, "POST", "/phones", {"code": code, "name": name}, key, **headers)


def phones() -> list[Phone]:
    return [one for one in Peers().with_phones() if isinstance(one, Phone)]


def test_a_code_is_good_for_one_phone_whose_key_opens_the_page_and_no_more(server: HttpServer) -> None:
    for other in ("", API, "x" * 43):
        assert ask(server, "POST", "/phones/code", key=other).status == 401
    code = ask(server, "POST", "/phones/code", key=PAGE).json["code"]
    paired = pair(server, code.lower().replace("-", " "))
    assert (paired.status, paired.json["name"], paired.headers["cache-control"]) == (201, "iPhone", "no-store")
    key = paired.json["key"]
    for path in ("/status", "/v1/models", "/conversations"):
        assert ask(server, "GET", path, key=key).status == 200
    assert ask(server, "POST", "/phones/code", key=key).status == 401  # it invites no others
    assert key not in Peers().path.read_text()
    assert pair(server, code).error["code"] == "wrong_code"
    assert pair(server, server.keys.new_code()).json["name"] == "iPhone-2"
    Peers().rename(phones()[0].id, "Anna's")
    again = pair(server, server.keys.new_code(), key=key)  # the same phone once more
    assert again.json["name"] == "Anna's"
    assert ask(server, "GET", "/status", key=key).status == 401
    assert ask(server, "GET", "/status", key=again.json["key"]).status == 200
    assert [one.name for one in phones()] == ["Anna's", "iPhone-2"]
    assert Peers().all() == []


def test_a_code_allows_few_minutes_and_wrong_guesses_and_is_not_spent_by_mistyped_ones(
    server: HttpServer, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = DeviceID(bytes(32)).short
    server.keys.new_code()
    code = server.keys.new_code()  # in place of the first one
    for _ in range(3 * Keys.GUESSES):
        assert pair(server, code[:-1] + ("0" if code[-1] != "0" else "1")).error["code"] == "mistyped_code"
    for _ in range(Keys.GUESSES - 1):
        assert pair(server, wrong).status == 401
    assert said == []
    assert pair(server, wrong).status == 401
    assert len(said) == 1
    assert pair(server, code).status == 401
    assert pair(server, server.keys.new_code()).status == 201
    monkeypatch.setattr(Keys, "CODE_SECONDS", 0.0)
    assert pair(server, server.keys.new_code()).error["code"] == "wrong_code"  # too old
    assert said[1:] == [f"iPhone has the page now, until: edgellm peers rm {phones()[0].id.short}"]


def test_pages_of_other_origins_spend_no_code_and_strangers_send_little(server: HttpServer) -> None:
    code = server.keys.new_code()
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
        assert pair(server, code, **headers).status == 403
    assert pair(server, code, "x" * 5000).status == 413
    assert pair(server, code, "\x1b[2J\n").status == 201
    assert phones()[0].name == "[2J"


@pytest.mark.parametrize("stream", [True, False])
def test_a_revoked_phone_is_shut_out_in_the_middle_of_a_reply(server: HttpServer, stream: bool) -> None:
    key = pair(server, server.keys.new_code()).json["key"]
    with ThreadPoolExecutor(1) as thread:
        reply = thread.submit(ask, server, "POST", "/v1/chat/completions", conversation(stream=stream), key)
        until(lambda: server._handler.admission.running)
        Peers().remove(phones()[0].id)
        assert b"[DONE]" not in reply.result().body
    until(lambda: not server._handler.admission.running)
    for path in ("/status", "/conversations"):
        assert ask(server, "GET", path, key=key).error["code"] == "invalid_api_key"


def test_when_it_asked_last_is_kept_and_without_a_list_that_can_be_read_no_phone_is_known(server: HttpServer) -> None:
    key = pair(server, server.keys.new_code()).json["key"]
    then = datetime.now(UTC) - timedelta(hours=1)
    kept: Any = json.loads(Peers().path.read_text())
    kept["phones"][0]["seen"] = then.isoformat()
    Peers().path.write_text(json.dumps(kept))
    assert ask(server, "GET", "/status", key=key).status == 200
    assert phones()[0].seen - then > timedelta(minutes=59)
    Peers().path.write_text("{")
    assert [ask(server, "GET", "/status", key=one).status for one in (key, PAGE)] == [401, 200]
