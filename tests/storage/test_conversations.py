"""Conversations on disk: kept, found again, and gone when they are removed."""

from __future__ import annotations

import random
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edgellm.errors import HistoryUnusable, InvalidOption
from edgellm.storage import chat_log
from edgellm.storage.chat_log import Conversation, Conversations
from tests.storage.chats import change


@pytest.fixture
def store(tmp_path: Path) -> Conversations:
    return Conversations(tmp_path / "history")


def begun(*texts: str, ago: float = 0.0) -> Conversation:
    turns = tuple((("user", "assistant")[at % 2], text) for at, text in enumerate(texts))
    made = Conversation.new()
    return Conversation(made.id, datetime.now(UTC) - timedelta(seconds=ago), turns, page='{"nodes": []}')


def test_what_is_kept_is_found_again_by_the_user_alone(store: Conversations) -> None:
    old, new = begun("Where?", "There.", ago=60), begun("Ein Glas\n\nWhere is é?", "Here\ud800.")
    for one in (new, old):
        store.save(one)
    assert [one.id for one in store.all()] == [new.id, old.id]
    assert store.latest().turns[1] == ("assistant", "Here?.")
    assert store.latest().title == "Where is é?"
    assert store.find(old.id[:5]) == old
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    longer = old.with_turns([*old.turns, ("user", "Why?"), ("assistant", "So.")])
    store.save(longer)
    assert [one.id for one in store.all()] == [old.id, new.id]
    assert store.latest().turns == longer.turns
    store.remove(longer)
    assert [one.id for one in store.all()] == [new.id]
    store.clear()
    assert store.all() == []


def test_one_that_is_not_there_or_not_alone_is_told(store: Conversations) -> None:
    for call in (store.latest, lambda: store.find("ab"), lambda: store.find("")):
        with pytest.raises(InvalidOption):
            call()
    for conversation_id in ("abcd0000", "abcd0001"):
        store.save(replace(begun("Where?"), id=conversation_id))
    with pytest.raises(InvalidOption, match="There are 2 conversations"):
        store.find("abcd")


def test_the_oldest_go_and_too_long_a_one_is_not_kept(store: Conversations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_log, "MAX_CONVERSATIONS", 3)
    kept = [begun(str(number), ago=100 - number) for number in range(5)]
    for one in kept:
        store.save(one)
    assert [one.id for one in store.all()] == [one.id for one in reversed(kept[2:])]
    with pytest.raises(HistoryUnusable, match="can be stored"):
        store.save(kept[4].with_turns([("user", "a" * 2**20)]))
    assert store.latest() == kept[4]


def stored(turns: str) -> str:
    return f'{{"turns": {turns}, "name": "", "page": ""}}'


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]x", "3", "[" * 9999, "[]", b"\xff", '{"turns": []}', stored("1"), stored("[[1]]"),
        stored('[["god", "?"]]'), stored('[["user", "a", "b"]]'),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_passed_over(store: Conversations, text: object) -> None:
    store.save(begun("Where?"))
    when = int(datetime.now(UTC).timestamp() * 1e6)
    change(store, "INSERT INTO conversation VALUES ('00000000', ?, ?)", when, text)
    change(store, "INSERT INTO conversation VALUES ('\x1b[2J', ?, ?)", when, stored("[]"))
    assert [one.title for one in store.all()] == ["Where?"]
    assert store.get("00000000") is None


def test_a_conversation_that_was_removed_leaves_no_trace(store: Conversations) -> None:
    """Also not where SQLite moved it from one page to another."""
    rng = random.Random(7)
    marks: dict[str, str] = {}
    for number in range(300):
        one = begun(f"<{number:05}>" * rng.choice([5, 30, 150, 900]))
        if marks and rng.random() < 0.6:
            one = replace(one, id=rng.choice(list(marks)))
        store.save(one)
        marks[one.id] = f"<{number:05}>"
    for one in store.all():
        if rng.random() < 0.7:
            store.remove(one)
            del marks[one.id]
    found = b"".join(path.read_bytes() for path in store.folder.iterdir())
    assert {mark for number in range(300) if (mark := f"<{number:05}>").encode() in found} == {*marks.values()}
