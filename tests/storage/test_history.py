"""Past conversations: kept whole, bounded, counted, and forgotten when asked."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.storage import History
from edgellm.storage.chats import history as module


def said(history: History) -> list[tuple[str, str]]:
    return [(past.question, past.reply) for past in history.recent()]


def test_what_was_said_is_there_again_oldest_first(history: History) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    assert history.recent() == []
    history.add("Where is my mug?", "On the shelf.")
    history.add("And the drill?", "Ben has it.")
    first, second = History(history.folder).recent()
    assert (first.question, first.reply) == ("Where is my mug?", "On the shelf.")
    assert second.question == "And the drill?"
    assert before <= first.when <= second.when <= datetime.now(UTC)


def test_the_data_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    assert History().path == tmp_path / "data" / "history" / "conversations.jsonl"
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_plain_json(history: History) -> None:
    history.add("a\nb", "Größe\x00\u2028")
    (line,) = history.path.read_bytes().decode().removesuffix("\n").split("\n")
    assert json.loads(line)["question"] == "a\nb"
    assert "Größe" in line


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
    monkeypatch.setattr(module, "MOST_BYTES", 4096)
    sizes = []
    for number in range(200):
        history.add(f"question {number}", "reply")
        sizes.append(history.path.stat().st_size)
        assert history.recent()[-1].question == f"question {number}"
    assert 4096 - 100 < max(sizes) <= 4096
    assert min(after for before, after in pairwise(sizes) if after < before) > 2048 - 100
    numbers = [int(past.question.split()[1]) for past in history.recent()]
    assert numbers == list(range(numbers[0], 200))
    assert not history.path.with_name("conversations.jsonl.new").exists()


@pytest.mark.parametrize("text", ["a" * 10_000, "\0" * 3000, "ü" * 5000, "\0" * 500 + "a" * 10_000])
def test_of_a_text_too_long_the_beginning_is_kept(history: History, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 4096)
    for _ in range(3):
        history.add(text, text)
        assert history.path.stat().st_size <= 4096
    past = history.recent()[-1]
    assert past.question == past.reply
    assert text.startswith(past.question)
    assert len(json.dumps(past.question, ensure_ascii=False).encode()) > 500


def test_a_file_that_is_far_too_large_is_read_from_its_end_and_mended(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        history.add(f"question {number}", "reply")
    monkeypatch.setattr(module, "MOST_BYTES", 4096)
    found = history.recent(10**9)
    assert 30 < len(found) < 60
    assert found[-1].question == "question 199"
    history.add("new", "r")
    assert history.path.stat().st_size <= 2048
    assert said(history)[-1] == ("new", "r")


def test_what_a_crash_left_beside_is_in_nobodys_way(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2048)
    history.add("q", "r")
    beside = history.path.with_name("conversations.jsonl.new")
    beside.write_bytes(b"half a co")
    for number in range(40):
        history.add(f"question {number}", "r")
    assert not beside.exists()
    assert b"half a co" not in history.path.read_bytes()


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


def test_off_asks_nobody(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has turned it off is not bothered with what is wrong there."""
    history.turn_off()
    history.path.mkdir()
    history.add("q", "r")
    assert history.recent() == []
    monkeypatch.setattr(module, "PATIENCE", 0)
    with FileLock(history.folder / "lock"):
        history.add("q", "r")


def test_turned_off_while_waiting_is_off(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = History._locked

    @contextmanager
    def wait(self: History) -> Iterator[None]:
        with locked(self):
            self.turn_off()
            yield

    monkeypatch.setattr(History, "_locked", wait)
    history.add("q", "r")
    assert not history.path.exists()


def test_off_can_be_said_before_anything_is_there(history: History) -> None:
    history.turn_off()
    history.add("q", "r")
    assert not history.path.exists()


def test_clear_removes_what_was_said_from_the_disk(history: History) -> None:
    assert history.clear() == 0
    assert not history.folder.parent.exists()
    history.add("a secret", "r")
    history.add("a secret", "r")
    history.path.with_name("conversations.jsonl.new").write_text("half a secret")
    history.turn_off()
    assert history.clear() == 2
    assert not any(b"secret" in path.read_bytes() for path in history.folder.iterdir())
    assert not history.on
    assert history.clear() == 0
    history.turn_on()
    assert history.recent() == []


def test_facts_tell_how_much_and_from_when_to_when(history: History) -> None:
    facts = history.facts()
    assert (facts.conversations, facts.size, facts.first, facts.last) == (0, 0, None, None)
    history.add("q", "r")
    line = history.path.read_text()
    history.path.write_text(line + line.replace("2", "1", 1))
    history.path.with_name("conversations.jsonl.new").write_text("left")
    facts = history.facts()
    assert (facts.path, facts.on, facts.conversations) == (history.path, True, 2)
    assert facts.size == history.path.stat().st_size + 4
    assert facts.first is not None
    assert facts.last is not None
    assert facts.first.year + 1000 == facts.last.year
