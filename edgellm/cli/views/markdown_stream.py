"""Markdown on a terminal, rendered while it is written: finished blocks are printed once, the open one is redrawn."""

from __future__ import annotations

import enum
import re
import sys
import threading
import time
from collections import Counter
from html import unescape
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token as MarkdownToken
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableDataElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from edgellm.cli.views.console import THOUGHT, TokenWriter, harmless

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import JustifyMethod

_PAUSE, _SHARE = 0.04, 4.0
"""Seconds between two drawings: at least these, and at least so many times what the last one took."""
_CODE_LINES = 24
"""Lines from which on the beginning of a code block counts as finished."""
_PARSER = (
    MarkdownIt("commonmark", {"html": False})  # a tag is text, and not left out
    .enable(["strikethrough", "table"])
    .disable(["reference", "image"])  # which would not be shown in full
)
_INDENTS = {"blockquote": 4, "ul": 3, "ol": 3}
"""Columns by which lines are indented; half of the screen at most, so that words are not broken."""
_ITEM_NUMBER = re.compile(r"(?<![^\s>])\d{1,9}[.)](?!\S)")
_THEME = Theme(
    {
        "markdown.code": "cyan", "markdown.h1": "bold underline", "markdown.h2": "bold underline",
        "markdown.h3": "bold", "markdown.h4": "bold italic", "markdown.h6": "italic", "markdown.block_quote": "italic",
        "markdown.item.number": "bold", "markdown.table.border": "dim", "markdown.table.header": "bold",
        "markdown.link": "", "markdown.link_url": "underline",
    }
)  # fmt: skip


class MarkdownWriter:
    """Writes a reply to a terminal on stdout as `TokenWriter` does, with its Markdown rendered.

    A thread draws, so that no token waits for a drawing.
    """

    def __init__(self) -> None:
        self._thoughts = TokenWriter()
        self._console = Console(file=sys.stdout, theme=_THEME, markup=False, highlight=False, emoji=False)
        self._screen = _OpenLines(self._console)
        self._source = ""  # from the beginning of the open block on
        self._follows = _Follows.NOTHING
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, text: str, source: str) -> None:
        """Write more of the answer, or of the thought before it."""
        if source == THOUGHT:
            self._thoughts.write(text, source)
            return
        with self._lock:
            self._source += harmless(text)
        self._changed.set()
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._draw_changes, name="edgellm-markdown", daemon=True)
            self._thread.start()

    def end_line(self) -> None:
        """Print what is open, and end its line. Code that is interrupted so goes on as code."""
        self._thoughts.end_line()
        if self._thread is not None:
            self._ended.set()
            self._changed.set()
            self._thread.join()
            self._thread = None
        self._source += "\n"
        self._print_finished()
        last = next((token for token in _PARSER.parse(self._source) if token.level == 0), None)
        if last is not None and last.type == "fence" and not _is_closed(last):
            self._print(self._source, _Follows.CODE)
            self._source = self._source.split("\n")[_start(last)] + "\n"
        else:
            self._print(self._source, _Follows.BLOCK)
            self._source = ""

    def draw(self) -> None:
        """Draw what has been written so far."""
        with self._lock:
            self._print_finished()
            parts, rest = _finished(self._source + "\n")  # as if the line that is being written had ended
            lines, follows = [], self._follows
            for text, next_follows in [*parts, (rest, _Follows.BLOCK)]:
                lines += self._rendered(text, follows)
                follows = next_follows
            self._screen.show(lines)

    def _draw_changes(self) -> None:
        """Draw each change until `end_line` is called."""
        try:
            while not self._ended.is_set():
                self._changed.wait()
                self._changed.clear()
                began = time.perf_counter()
                self.draw()
                self._ended.wait(max(_PAUSE, _SHARE * (time.perf_counter() - began)))
        except (OSError, ValueError):  # the terminal is gone, as the other thread finds out when it prints
            return

    def _print_finished(self) -> None:
        parts, self._source = _finished(self._source)
        for part in parts:
            self._print(*part)

    def _print(self, text: str, follows: _Follows) -> None:
        """Print what will not change any more."""
        if lines := self._rendered(text, self._follows):
            self._screen.show(lines)
            self._screen.keep(len(lines))
            self._follows = follows

    def _rendered(self, text: str, follows: _Follows) -> list[list[Segment]]:
        tokens = _PARSER.parse(text)
        if not tokens:
            return []
        options = self._console.options.update(width=max(1, self._console.width - 1), height=None)
        continued = follows is _Follows.CODE
        lines = list(Segment.split_lines(self._console.render(_Page(tokens, continued=continued), options)))
        indent = max(accumulate(_INDENTS.get(token.tag, 0) * token.nesting for token in tokens))
        lost = _letters(text) - _letters("".join(part.text for line in lines for part in line))
        if not continued and (lost or 2 * indent > self._console.width):
            plain = Text(text, no_wrap=True, overflow="ignore")
            lines = list(Segment.split_lines(self._console.render(plain, options)))
        lines = [_stripped(line) for line in lines]
        while lines and not lines[-1]:
            lines.pop()
        while lines and not lines[0]:
            del lines[0]
        return [[], *lines] if lines and follows is _Follows.BLOCK else lines


class _Follows(enum.Enum):
    """The text before the open block: none, another block, an item of the same list, lines of the same code."""

    NOTHING = enum.auto()
    BLOCK = enum.auto()
    ITEM = enum.auto()
    CODE = enum.auto()


def _finished(source: str) -> tuple[list[tuple[str, _Follows]], str]:
    """Cut Markdown that is being written; return its finished parts, each with its relation to what follows, and the
    rest.

    Finished are the blocks before the last one, of a list the items before the last one, and of long code its
    beginning. A line that has not ended may become anything, and is not looked at.
    """
    lines = source.split("\n")
    tokens = [token for token in _PARSER.parse("\n".join(lines[:-1])) if token.map]
    blocks = [token for token in tokens if token.level == 0]
    items = {_start(token) for token in tokens if token.type == "list_item_open" and token.level == 1}
    starts = {_start(block): _Follows.BLOCK for block in blocks}
    ends = sorted((dict.fromkeys(items, _Follows.ITEM) | starts).items())[1:]
    again = ""
    if blocks and blocks[-1].type == "fence" and (count := _code_lines(blocks[-1])):
        ends.append((_start(blocks[-1]) + 1 + count, _Follows.CODE))
        again = lines[_start(blocks[-1])] + "\n"
    parts, at = [], 0
    for end, follows in ends:
        parts.append(("\n".join(lines[at:end]), follows))
        at = end
    return parts, again + "\n".join(lines[at:])


def _letters(text: str) -> Counter[str]:
    """Count the letters and digits of Markdown, or of what is shown of it: the same but for the numbers of list items.

    What is shown has fewer where a table has more cells than its header or more columns than the screen, a link has a
    title, or something is nested too deeply for the parser.
    """
    return Counter(filter(str.isalnum, unescape(_ITEM_NUMBER.sub("", text))))


def _start(token: MarkdownToken) -> int:
    """Return the line at which a block begins."""
    return token.map[0] if token.map else 0


def _is_closed(fence: MarkdownToken) -> bool:
    """Return whether a code block has its last line, the fence."""
    lines = fence.content.removesuffix("\n").count("\n") + 1 if fence.content else 0
    return fence.map is not None and fence.map[1] - fence.map[0] - 1 > lines


def _code_lines(fence: MarkdownToken) -> int:
    """Return after how many lines a long code block can be cut: not within a text or a comment, as then the rest would
    be highlighted wrongly. 0 if nowhere."""
    count = fence.content.count("\n")
    if count < _CODE_LINES:
        return 0
    lexer = Syntax("", _language(fence)).lexer
    if lexer is None:
        return count - 1
    line = found = 0
    for kind, text in lexer.get_tokens(fence.content):
        line += text.count("\n")
        if text.endswith("\n") and line < count and not {"String", "Comment"} & set(kind):
            found = line
    return found


def _language(fence: MarkdownToken) -> str:
    return fence.info.partition(" ")[0] or "text"


def _stripped(line: Sequence[Segment]) -> list[Segment]:
    """Return a line without the blanks at its end."""
    kept = list(line)
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept


class _OpenLines:
    """Lines at the end of a terminal that still change. Only those are written again that do, and behind them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: list[tuple[str, int]] = []  # with control sequences, and columns without
        self._gone = 0  # lines before them that have left the screen

    def show(self, lines: Sequence[Sequence[Segment]]) -> None:
        """Show these lines in place of those that were shown."""
        new, old = [self._line(line) for line in lines][self._gone :], self._shown
        start = 0
        while start < min(len(old), len(new)) and old[start] == new[start]:
            start += 1
        if start == len(new) < len(old):
            start = max(0, start - 1)
        if start == len(old) - 1 < len(new) and new[start][0].startswith(old[start][0]):
            parts = [new[start][0][len(old[start][0]) :], *(text for text, _ in new[start + 1 :])]
            text = "\n".join(parts)
        else:
            text = "\n".join(text for text, _ in new[start:])
            if start < len(old):
                up = self._rows(old[start:]) - 1
                text = "\r" + (f"\x1b[{up}A" if up else "") + "\x1b[J" + text
            elif start and text:
                text = "\n" + text
        self._write(text)
        self._shown = new
        while self._rows(self._shown) >= self._console.height > 1:
            del self._shown[0]
            self._gone += 1

    def keep(self, count: int) -> None:
        """Leave these `count` lines as they are; further ones come below. Of those, some may have left the screen,
        too."""
        if self._shown:
            self._write("\n")
        self._shown, self._gone = [], max(0, self._gone - count)

    def _rows(self, lines: Sequence[tuple[str, int]]) -> int:
        """Return the rows that lines take on the screen, which folds long ones."""
        return sum(max(1, ceil(columns / self._console.width)) for _, columns in lines)

    def _line(self, line: Sequence[Segment]) -> tuple[str, int]:
        kept = Segment.remove_color(line) if self._console.no_color else line
        parts = (
            part.style.render(part.text, color_system=ColorSystem.STANDARD) if part.style else part.text
            for part in kept
            if not part.control
        )
        return "".join(parts), Segment.get_line_length(list(line))

    def _write(self, text: str) -> None:
        if text:
            self._console.file.write(text)
            self._console.file.flush()


class _Heading(Heading):
    """A heading that is not centred."""

    LEVEL_ALIGN: ClassVar[dict[str, JustifyMethod]] = {}


class _Cell(TableDataElement):
    """A cell that folds a long word instead of cutting it off."""

    def __init__(self, justify: JustifyMethod) -> None:
        super().__init__(justify)
        self.content = Text("", justify=justify, overflow="fold")


class _Code(CodeBlock):
    """Code between its fences, as it can be copied. Its long lines are folded by the terminal, within a list here."""

    def __init__(self, lexer_name: str, theme: str, first: str, last: str, nested: bool) -> None:
        super().__init__(lexer_name, theme)
        self._first, self._last, self._nested = first, last, nested

    @classmethod
    def create(cls, markdown: Markdown, token: MarkdownToken) -> _Code:
        """Return the element of a token; a page says whether its fences are shown."""
        first, last = token.meta.get("fences", ("", ""))
        return _Code(_language(token), markdown.code_theme, first, last, token.level > 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the fences and the code."""
        code = Syntax("", self.lexer_name, theme=self.theme).highlight(str(self.text).removesuffix("\n"))
        code.rstrip()
        for text in (Text(self._first, "dim"), code, Text(self._last, "dim")):
            if text.plain:
                yield Text.assemble(text, no_wrap=not self._nested, overflow="fold" if self._nested else "ignore")


class _Page(Markdown):
    """Parsed Markdown, without links that a terminal hides."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements, "heading_open": _Heading, "fence": _Code, "code_block": _Code, "td_open": _Cell,
        "th_open": _Cell,
    }  # fmt: skip

    def __init__(self, tokens: list[MarkdownToken], *, continued: bool) -> None:
        """`continued`: they begin within a code block, whose first line has been shown."""
        super().__init__("", "ansi_dark", hyperlinks=False)
        for number, token in enumerate(tokens):
            if token.type == "fence":
                first = "" if continued and not number else f"{token.markup}{token.info}"
                token.meta["fences"] = (first, token.markup if _is_closed(token) else "")
        self.parsed = [one.copy(children=one.children and list(_shown(one.children))) for one in tokens]


def _shown(tokens: Sequence[MarkdownToken]) -> Iterator[MarkdownToken]:
    """Yield the tokens of a text as they are shown: lines end where the text has them end, and `<https://...>`, which
    is its own address, has that once."""
    for token in tokens:
        if token.type == "softbreak":
            yield MarkdownToken("hardbreak", "br", 0)
        elif token.info != "auto":
            yield token
