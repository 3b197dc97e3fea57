"""Conversations on disk: kept, found again, and gone when they are removed."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edgellm.errors import HistoryUnusable, InvalidOption
from edgellm.storage.chats import conversations
from edgellm.storage.chats.conversations import Conversation, Conversations


@pytest.fixture
def store(tmp_path: Path) -> Conversations:
    return Conversations(tmp_path / "conversations")


def begun(*texts: str, ago: float = 0.0) -> Conversation:
    turns = tuple((("user", "assistant")[at % 2], text) for at, text in enumerate(texts))
    made = Conversation.new()
    return Conversation(made.id, datetime.now(UTC) - timedelta(seconds=ago), turns)


def test_what_is_kept_is_found_again_by_the_user_alone(store: Conversations) -> None:
    old, new = begun("Where?", "There.", ago=60), begun("Ein Glas\n\nWhere is é?", "Here\ud800.")
    for one in (new, old):
        store.keep(one)
    assert [one.id for one in store.all()] == [new.id, old.id]
    assert store.latest().turns[1] == ("assistant", "Here?.")
    assert store.latest().title == "Where is é?"
    assert store.find(old.id[:5]) == old
    path = store.folder / f"{old.id}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    longer = old.said([*old.turns, ("user", "Why?"), ("assistant", "So.")])
    store.keep(longer)
    assert [one.id for one in store.all()] == [old.id, new.id]
    store.remove(longer)
    assert [one.id for one in store.all()] == [new.id]
    assert store.clear() == 1
    assert store.all() == []


def test_one_that_is_not_there_or_not_alone_is_told(store: Conversations) -> None:
    for call in (store.latest, lambda: store.find("ab"), lambda: store.find("")):
        with pytest.raises(InvalidOption):
            call()
    for number in range(20):
        store.keep(begun(str(number)))
    first = store.all()[0].id[0]
    shared = [one for one in store.all() if one.id.startswith(first)]
    if len(shared) > 1:
        with pytest.raises(InvalidOption, match=f"There are {len(shared)} conversations"):
            store.find(first)


def test_the_oldest_go_and_too_long_a_one_is_not_kept(store: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MOST", 3)
    kept = [begun(str(number), ago=100 - number) for number in range(5)]
    for one in kept:
        store.keep(one)
    assert [one.id for one in store.all()] == [one.id for one in reversed(kept[2:])]
    with pytest.raises(HistoryUnusable, match="can be kept"):
        store.keep(kept[4].said([("user", "a" * 2**20)]))
    assert store.latest() == kept[4]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"\xff", b"[" * 9999, b'{"when": "2020-01-01T00:00:00", "turns": []}',
        b'{"when": "2020-01-01T00:00:00+00:00", "turns": [["god", "?"]]}',
    ],
    ids=lambda data: repr(data)[:30],
)  # fmt: skip
def test_what_is_no_conversation_is_passed_over(store: Conversations, data: bytes) -> None:
    store.keep(begun("Where?"))
    (store.folder / "00000000.json").write_bytes(data)
    (store.folder / "notes.json").write_text("mine")
    assert len(store.all()) == 1
    store.clear()
    assert [path.name for path in store.folder.glob("*.json")] == ["notes.json"]


def test_a_link_is_not_followed(store: Conversations, tmp_path: Path) -> None:
    store.keep(begun("Where?"))
    (store.folder / "00000000.json").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("{}")
    assert [one.title for one in store.all()] == ["Where?"]
    assert store.clear() == 2
    assert (tmp_path / "elsewhere").read_text() == "{}"
