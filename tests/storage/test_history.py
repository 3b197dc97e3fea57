"""Past conversations: kept whole, bounded, counted, and forgotten when asked."""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from contextlib import AbstractContextManager, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.storage import History, chat_log, database
from tests.storage.chats import change, raw, said

TEXTS = st.text() | st.text(st.sampled_from('a\ud800\udfff\0\n\r\u2028"\\'))


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=4))
@settings(max_examples=60)
def test_every_text_comes_back(texts: list[tuple[str, str]]) -> None:
    """Whole, but for lone surrogates, which no UTF-8 can hold."""

    def whole(text: str) -> str:
        return "".join("\ufffd" if 0xD800 <= ord(character) < 0xE000 else character for character in text)

    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "history")
        for question, reply in texts:
            history.add(question, reply)
        assert said(history) == [(whole(question), whole(reply)) for question, reply in texts]


def test_the_limit_counts_bytes_and_keeps_the_newest(history: History) -> None:
    for question in ("one", "two", "a much longer question", "ü"):
        history.add(question, "r")
    assert [past.question for past in history.recent(3 + 4 + 4)] == ["one", "two", "ü"]
    assert [past.question for past in history.recent(3)] == ["ü"]
    assert history.recent(2) == []


def test_it_stays_bounded_and_the_oldest_go(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_log, "MAX_BYTES", 4096)
    sizes = []
    for number in range(200):
        history.add(f"question {number}", "reply")
        sizes.append(history.facts().size)
        assert history.recent()[-1].question == f"question {number}"
    assert 4096 - 100 < max(sizes) <= 4096
    assert min(after for before, after in pairwise(sizes) if after < before) > 2048 - 100
    numbers = [int(past.question.split()[1]) for past in history.recent()]
    assert numbers == list(range(numbers[0], 200))
    assert b"question 0" not in history.path.read_bytes()


@pytest.mark.parametrize("text", ["\0" * 3000, "ü" * 5000])
def test_of_a_text_too_long_the_beginning_is_kept(history: History, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(chat_log, "MAX_BYTES", 4096)
    for _ in range(3):
        history.add(text, text)
        assert history.facts().size <= 4096
    past = history.recent()[-1]
    assert past.question == past.reply
    assert text.startswith(past.question)
    assert len(past.question.encode()) > 500


def test_off_keeps_what_is_there_and_neither_adds_nor_reads(history: History) -> None:
    assert history.on
    history.add("before", "r")
    history.turn_off()
    history.turn_off()
    other = History(history.folder)
    assert not other.on
    other.add("meanwhile", "r")
    assert other.recent() == []
    facts = other.facts()
    assert (facts.on, facts.conversations) == (False, 1)
    other.turn_on()
    other.turn_on()
    assert history.on
    history.add("after", "r")
    assert [past.question for past in history.recent()] == ["before", "after"]


def test_off_asks_nobody(history: History) -> None:
    """Whoever has turned it off is not bothered with what is wrong there."""
    history.turn_off()
    history.path.mkdir()
    history.add("q", "r")
    assert history.recent() == []


def test_turned_off_while_waiting_is_off(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    history.add("before", "r")
    asked = threading.Event()
    opened = database.PrivateDatabase.writing

    def writing(*args: Any, **more: Any) -> AbstractContextManager[sqlite3.Connection]:
        asked.set()
        return opened(*args, **more)

    monkeypatch.setattr(database.PrivateDatabase, "writing", writing)
    with closing(raw(history)) as db:
        db.execute("BEGIN IMMEDIATE")
        adding = threading.Thread(target=history.add, args=("meanwhile", "r"))
        adding.start()
        assert asked.wait(60)
        history.turn_off()
        db.execute("COMMIT")
    adding.join()
    history.turn_on()
    assert said(history) == [("before", "r")]


def test_clear_removes_everything_from_the_disk(history: History) -> None:
    history.clear()
    assert not history.folder.parent.exists()
    history.add("a secret", "r")
    history.path.with_name(f"{history.path.name}.aside").write_text("a damaged secret")
    history.turn_off()
    history.clear()
    assert [path.name for path in history.folder.iterdir()] == ["off"]
    history.turn_on()
    assert history.recent() == []


def test_facts_tell_how_much_and_from_when_to_when(history: History) -> None:
    facts = history.facts()
    assert (facts.conversations, facts.size, facts.first, facts.last) == (0, 0, None, None)
    history.add("q", "r")
    size = history.facts().size
    history.add("q", "r")
    change(history, "UPDATE entry SET at = at - 86400000000 WHERE id = 1")
    history.path.with_name(f"{history.path.name}.aside").write_text("left")
    facts = history.facts()
    assert (facts.path, facts.on, facts.conversations) == (history.path, True, 2)
    assert facts.size == 2 * size + 4
    assert facts.first is not None
    assert facts.last is not None
    assert 0 <= (facts.last - facts.first).total_seconds() - 86400 < 60
