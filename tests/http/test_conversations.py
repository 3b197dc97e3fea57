"""Conversations over HTTP: the command line's own, for whoever has the page's key."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from edgellm.errors import HistoryUnusable
from edgellm.http.server import HttpServer
from edgellm.storage.chat_log import MAX_BYTES, Conversation, History
from tests.http.conftest import HOME, Answer, Ask, asker, configured

KEY, API_KEY = "p" * 43, "a" * 43
TURNS = [{"role": "user", "content": "Where is my mug?"}, {"role": "assistant", "content": "In the kitchen."}]


def asking(server: HttpServer, key: str | None = KEY) -> Ask:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def ask(method: str, path: str = "", body: object = None) -> Answer:
        return asker(server)(method, f"/conversations{path}", body, headers)

    return ask


@pytest.fixture
def server(store: History) -> Iterator[HttpServer]:
    events: list[str] = []
    with configured(page_key=KEY, on_event=events.append) as opened:
        yield opened
    assert events == []


def test_they_are_stored_where_the_command_line_finds_them(server: HttpServer, store: History) -> None:
    ask = asking(server)
    assert ask("GET").json == {"on": True, "data": []}
    made = ask("POST", "", {"turns": TURNS, "page": '{"a": 1}'})
    assert made.status == 201
    kept = store.find(made.json["id"])
    assert kept.turns == (("user", "Where is my mug?"), ("assistant", "In the kitchen."))
    assert made.json["title"] == kept.title == "Where is my mug?"
    cli = Conversation.new().with_turns([("system", "Be brief."), ("user", "A note.\n\nWhen?"), ("assistant", "Now.")])
    store.save(cli)
    assert [one["id"] for one in ask("GET").json["data"]] == [cli.id, kept.id]
    read = ask("GET", f"/{cli.id}").json
    assert [turn["role"] for turn in read["turns"]] == ["system", "user", "assistant"]
    assert (read["title"], read["name"], read["page"]) == ("When?", "", "")
    assert ask("PATCH", f"/{cli.id}", {"name": " My  notes "}).json["title"] == "My notes"
    assert store.find(cli.id) == replace(cli, name="My notes")
    assert ask("DELETE", f"/{cli.id}").status == 204
    assert [one.id for one in store.all()] == [kept.id]
    assert ask("GET", f"/{cli.id}").error["code"] == "conversation_not_found"


def test_a_removed_one_comes_back_as_it_was(server: HttpServer, store: History) -> None:
    ask = asking(server)
    old = Conversation("0123abcd", datetime.now(UTC) - timedelta(days=3), (("user", "?"), ("assistant", "!")), "N", "P")
    store.save(old)
    read = ask("GET", "/0123abcd").json
    ask("DELETE", "/0123abcd")
    assert ask("DELETE", "/0123abcd").status == 204
    assert ask("PUT", "/0123abcd", {name: read[name] for name in ("turns", "name", "page", "when")}).status == 200
    assert store.all() == [old]
    ahead = (datetime.now(UTC) + timedelta(days=900)).isoformat()
    ask("PUT", "/0123abcd", {"turns": TURNS, "when": ahead})
    assert store.all()[0].when <= datetime.now(UTC)


def test_search_looks_into_titles_and_turns_whatever_the_case(server: HttpServer, store: History) -> None:
    ask = asking(server)
    for question, reply in (("Straße?", "Left."), ("Where?", f"{'x ' * 99}the GARDEN shed{' y' * 99}"), ("a%b", "_")):
        store.save(Conversation.new().with_turns([("user", question), ("assistant", reply)]))
    [found] = ask("GET", "?search=garden").json["data"]
    assert found["title"] == "Where?"
    assert "the GARDEN shed" in found["excerpt"]
    assert len(found["excerpt"]) < 110
    assert [one["title"] for one in ask("GET", "?search=%25").json["data"]] == ["a%b"]
    assert [one["title"] for one in ask("GET", "?search=STRASSE").json["data"]] == []
    assert len(ask("GET", "?search=%20").json["data"]) == 3
    assert ask("GET", f"?search={'x' * 201}").status == 400


def test_a_state_that_changed_meanwhile_is_not_overwritten(server: HttpServer, store: History) -> None:
    ask = asking(server)
    made = ask("POST", "", {"turns": TURNS}).json
    changed = ask("PUT", f"/{made['id']}", {"turns": TURNS * 2, "replaces": made["when"]})
    assert changed.status == 200
    late = ask("PUT", f"/{made['id']}", {"turns": TURNS, "replaces": made["when"]})
    assert (late.status, late.error["code"]) == (409, "conversation_changed")
    assert len(store.find(made["id"]).turns) == 4
    ask("DELETE", f"/{made['id']}")
    late = ask("PUT", f"/{made['id']}", {"turns": TURNS, "replaces": changed.json["when"]})
    assert (late.status, late.error["code"], store.all()) == (409, "conversation_changed", [])


def test_only_the_pages_key_opens_them(store: History) -> None:
    store.save(Conversation.new().with_turns([("user", "A secret."), ("assistant", "Yes.")]))
    with configured(page_key=KEY) as without, configured(key=API_KEY, page_key=KEY) as with_key:
        for server, key in ((without, None), (without, "x" * 43), (without, ""), (with_key, API_KEY)):
            for method, path, body in (
                ("GET", "", None),
                ("POST", "", {"turns": TURNS}),
                ("DELETE", "/0123abcd", None),
            ):
                answer = asking(server, key)(method, path, body)
                assert (answer.status, answer.error["code"]) == (401, "page_key_required")
                assert b"secret" not in answer.body
        for server in (without, with_key):
            assert len(asking(server)("GET").json["data"]) == 1
            assert asker(server)("GET", "/status", None, {"Authorization": f"Bearer {KEY}"}).error["code"] == "loading"
        assert asker(with_key)("GET", "/status").status == 401
        crossing = {"Authorization": f"Bearer {KEY}", "Origin": "http://elsewhere.example"}
        assert asker(without)("GET", "/conversations", None, crossing).status == 403
        rebound = {"Authorization": f"Bearer {KEY}", "Host": "elsewhere.example"}
        assert asker(without)("GET", "/conversations", None, rebound).status == 403
    with HttpServer(HOME) as closed:
        assert asking(closed, "")("GET").error["code"] == "page_key_required"
    assert len(store.all()) == 1


def test_with_the_history_off_nothing_is_stored_or_read(server: HttpServer, store: History) -> None:
    ask = asking(server)
    one = Conversation.new().with_turns([("user", "?"), ("assistant", "!")])
    store.save(one)
    store.turn_off()
    assert ask("GET").json == {"on": False, "data": []}
    body = {"turns": TURNS}
    for method, path, sent in (
        ("GET", f"/{one.id}", None), ("POST", "", body), ("PUT", f"/{one.id}", body),
        ("PATCH", f"/{one.id}", {"name": "x"}),
    ):  # fmt: skip
        answer = ask(method, path, sent)
        assert (answer.status, answer.error["code"]) == (409, "history_off")
    assert ask("DELETE", f"/{one.id}").status == 204
    store.turn_on()
    assert store.all() == []


def test_a_store_that_cannot_be_used_is_reported(
    server: HttpServer, store: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = asking(server)
    long = ask("POST", "", {"turns": [*TURNS, {"role": "user", "content": "x" * MAX_BYTES}]})
    assert (long.status, long.error["code"]) == (413, "conversation_too_long")
    store.save(Conversation.new().with_turns([("user", "?")]))
    shutil.rmtree(store.path)
    store.path.touch()
    broken = ask("GET")
    assert (broken.status, broken.error["code"]) == (503, "history_unusable")
    assert "not a folder" in broken.error["message"]

    def refuse(*_: object, **_more: object) -> None:
        raise HistoryUnusable("The disk is full.", "Free some space.")

    monkeypatch.setattr(History, "save", refuse)
    assert ask("POST", "", {"turns": TURNS}).error["message"] == "The disk is full. Free some space."


FIRST, LAST = "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59+14:00"
DEEP = b'{"turns": ' + b"[" * 5000 + b"]" * 5000 + b"}"
MALFORMED: list[Any] = [
    {}, [], "x", 1, None, b"", b"{", b"\xff", DEEP, {"turns": None}, {"turns": "x"}, {"turns": {}}, {"turns": [1]},
    {"turns": [{}]}, {"turns": [{"role": "user"}]}, {"turns": [{"role": "tool", "content": ""}]},
    {"turns": [{"role": "user", "content": 1}]}, {"turns": [{"role": "user", "content": "x" * (MAX_BYTES + 1)}]},
    {"turns": [], "name": 1}, {"turns": [], "name": "x" * 201}, {"turns": [], "page": {}},
    {"turns": [], "when": "yesterday"}, {"turns": [], "when": "2026-01-01T00:00:00"}, {"turns": [], "when": 1e99},
    {"turns": [], "when": [2026]}, {"turns": [], "replaces": "x"},
    {"turns": [], "when": LAST}, {"turns": [], "when": "9999-12-31T23:59:59-14:00"}, {"turns": [], "when": FIRST},
]  # fmt: skip


@pytest.mark.parametrize(
    "body", MALFORMED, ids=lambda body: (body if isinstance(body, bytes) else json.dumps(body))[:40]
)
def test_malformed_requests_are_refused_in_words(server: HttpServer, store: History, body: Any) -> None:
    ask = asking(server)
    for method, path in (("POST", ""), ("PUT", "/0123abcd")):
        answer = ask(method, path, b"null" if body is None else body)
        if answer.status in (200, 201):  # what is too old is removed at once, and no time is later than now
            assert body["when"] == FIRST or store.all()[0].when <= datetime.now(UTC)
            continue
        assert answer.status in (400, 409, 413), answer.error
        message = answer.error["message"]
        assert message[0].isupper() or message.startswith(("turns", "name", "page", "when", "replaces")), message
        assert "Input should" not in message
        assert store.all() == []


@pytest.mark.parametrize(
    "name", ["0123ABCD", "0123abc", "0123abcde", "0123abcg", "..%2f..%2fx", "%00", "0123abcd%0a", "x" * 999]
)
def test_what_is_no_id_is_refused(server: HttpServer, name: str) -> None:
    ask = asking(server)
    for method, body in (("GET", None), ("PUT", {"turns": TURNS}), ("PATCH", {"name": "x"}), ("DELETE", None)):
        assert ask(method, f"/{name}", body).status in (400, 404)
