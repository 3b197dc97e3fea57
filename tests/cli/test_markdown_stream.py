"""Markdown while it is written: the screen at the end is the same however the text came, and no word is lost."""

import io
import re
import sys
from collections import Counter
from html import unescape

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from edgellm.cli.views.console import THOUGHT
from edgellm.cli.views.markdown_stream import MarkdownWriter
from tests.waiting import until

_STEP = re.compile(r"\x1b\[(\d*)([AK])|\x1b\[[\d;?]*[mhl]|.", re.DOTALL)


class Screen(io.StringIO):
    """A terminal that knows what it shows, and how often a row was written again."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        self.width, self.height = width, height
        self.rows, self.row, self.column = [""], 0, 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        super().write(text)
        for step in _STEP.finditer(text):
            if step[2] == "A":
                self.row = max(self.row - int(step[1] or 1), len(self.rows) - self.height, 0)
            elif step[2] == "K":
                self.rows[self.row] = ""
            elif step[0] == "\r":
                self.column = 0
            elif step[0] == "\n" or (not step[0].startswith("\x1b") and self.column == self.width):
                self.row, self.column = self.row + 1, 0
                self.rows.extend([""] * (self.row + 1 - len(self.rows)))
            if not step[0].startswith("\x1b") and step[0] not in "\r\n":
                self.rows[self.row] = self.rows[self.row][: self.column].ljust(self.column) + step[0]
                self.column += 1
        return len(text)

    @property
    def shown(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows).rstrip()


def shown(pieces: list[str], monkeypatch: pytest.MonkeyPatch, width: int = 60, height: int = 12) -> Screen:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", str(height))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", screen := Screen(width, height))
    writer = MarkdownWriter()
    for piece in pieces:
        writer.write(piece, "accepted")
        writer.draw()
    writer.end_line()
    return screen


PARTS = st.sampled_from(
    ["mug", "shelf", "ladder ", "Ünder", "1", "23", "> ", "- ", "1. ", "+ ", "  ", "    ", "\t",
     "\n", "\n\n", "\n> ", "\n- ",
     "|", " | ", "|-", "\n| a | b |\n|---|---|\n", "|film|day|drill", "`", "```\n",
     "*", "**", "_", "~~", "[", "](", ")", ' "', "<",
     ">", "</b>", "&amp;", "&copy;", "\\", "# ", "\n===\n", "\n---\n", "http://x.y/z", "[mug]: ", "!["]
)  # fmt: skip
DEEP = st.tuples(st.sampled_from(["> ", "- ", "1. ", "> - ", "12) "]), st.integers(1, 40)).map(
    lambda one: one[0] * one[1] + "drill"
)
STEPS = st.integers(1, 30).map(lambda count: "".join(f"{'  ' * level}- film\n" for level in range(count)))
WIDE = st.tuples(st.integers(1, 30), st.integers(1, 30)).map(
    lambda counts: f"{'|mug' * counts[0]}|\n{'|-' * counts[0]}|\n{'|shelf' * counts[1]}|\n"
)


TEXTS = st.lists(PARTS | DEEP | STEPS | WIDE, max_size=24).map("".join)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.data(), st.integers(20, 60))
def test_the_screen_is_the_same_however_the_text_came(
    monkeypatch: pytest.MonkeyPatch, text: str, data: st.DataObject, width: int
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=60)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    # rows that have left the screen could not be mended
    assert shown(pieces, monkeypatch, width, 2_000).shown == shown([text], monkeypatch, width, 2_000).shown


@settings(deadline=None, max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.integers(10, 60))
@example("".join(f"{'  ' * level}- film\n" for level in range(12)), 60)
@example(">" * 25 + " film", 80)
@example("| a | b |\n|---|---|\n| x | y | extra |", 60)
@example('[mug](http://x.y/z "shelf")', 60)
@example("".join(f"|{letter}" for letter in "abcdefghijklmnop") + "|\n" + "|-" * 16 + "|\n" + "|shelf" * 16 + "|", 30)
@example("1. mug\n1. shelf\n1. drill", 60)
def test_no_word_is_lost(monkeypatch: pytest.MonkeyPatch, text: str, width: int) -> None:
    missing = Counter(re.findall(r"[^\W\d_]", unescape(text))) - Counter(shown([text], monkeypatch, width, 30).shown)
    assert not missing


@pytest.mark.parametrize(
    "text", ["> " * 11 + "drill", "> - " * 6 + "drill", "".join("  " * i + "- drill\n" for i in range(15))]
)
def test_deep_text_keeps_half_of_the_screen(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert shown([text], monkeypatch, 80).shown.split() == text.split()
    assert "drill" in shown([text], monkeypatch, 30).shown


def test_finished_blocks_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [f"Paragraph {number} is **here**.\n\n- one\n- two\n\n" for number in range(60)]
    pieces = [word + " " for word in "".join(blocks).split(" ")]
    written = shown(pieces, monkeypatch).getvalue()
    assert written.rindex("Paragraph 7 is") < written.index("Paragraph 9 is")


def test_of_a_block_that_is_longer_than_the_screen_its_end_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"value_{number} = {number}\n" for number in range(100)]
    screen = shown(["```python\n", *lines, "```\n"], monkeypatch)
    assert screen.shown.count("value_") == 100
    assert screen.getvalue().count("value_7 ") <= 12


def test_code_that_a_notice_interrupts_is_shown_whole_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown([], monkeypatch)
    writer = MarkdownWriter()
    writer.write("```python\n# one **two**\n", "accepted")
    writer.draw()
    writer.pause()
    screen.write("a notice\n")
    writer.write("# three **four**\n```\nEnd **here**.", "accepted")
    writer.end_line()
    assert screen.shown == "a notice\n```python\n# one **two**\n# three **four**\n```\n\nEnd here."


def test_a_thought_stays_and_the_answer_is_drawn_without_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown([], monkeypatch)
    writer = MarkdownWriter()
    writer.write("a **thought**", THOUGHT)
    writer.pause()
    writer.write("an **ans", "accepted")
    writer.write("wer**", "accepted")
    until(lambda: screen.shown == "a **thought**\nan answer")
    writer.end_line()


def test_a_control_character_does_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = shown(["a \x1b]52;c;aGk=\x07 `\x9b2J`\n```\x1b[2J\n\x1b[2J\n```"], monkeypatch)
    assert not re.search(r"\x1b[^\[]|\x1b\[2J|\x07|\x9b", screen.getvalue())
