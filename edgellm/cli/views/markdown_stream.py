"""Markdown on a terminal, rendered while it is written: finished blocks are printed once, the open block is redrawn."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from html import unescape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token as MarkdownToken
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableDataElement
from rich.segment import Segment, Segments
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from edgellm.cli.views.console import THOUGHT, TokenWriter, harmless

if TYPE_CHECKING:
    from rich.console import JustifyMethod

_A_SECOND, _SHARE = 12, 4.0
"""The most drawings of the open block a second, and the least pause, in times of the last drawing's duration."""
_PARSER = (
    MarkdownIt("commonmark", {"html": False})  # a tag is shown as text
    .enable(["strikethrough", "table"])
    .disable(["reference", "image"])  # neither would be shown in full
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
    """Writes a reply with its Markdown rendered. A thread draws the open block, so no token waits for a drawing."""

    def __init__(self) -> None:
        self._thoughts = TokenWriter()
        self._console = Console(
            file=sys.stdout, theme=_THEME, markup=False, highlight=False, emoji=False, color_system="standard"
        )
        self._source, self._begun = "", False  # the text from the open block on; whether a block has been printed
        self._live: Live | None = None
        self._drawn, self._drawn_of = _joined([[]]), ("", False)
        self._next_drawing = 0.0

    def write(self, text: str, source: str) -> None:
        """Write more of the answer, or of the thought before it."""
        if source == THOUGHT:
            self._thoughts.write(text, source)
            return
        if not text:
            return
        self._source += harmless(text)
        if "\n" in text:  # without a line break, no block has ended
            self._print_finished()
        if self._live is None:
            self._live = _Live(
                get_renderable=self._end_of_open, console=self._console, refresh_per_second=_A_SECOND, transient=True,
                redirect_stdout=False, redirect_stderr=False, vertical_overflow="crop",
            )  # fmt: skip
            self._live.start()

    def pause(self) -> None:
        """End a thought's line, and take the open block off the screen, so that something else can be printed."""
        self._thoughts.end_line()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def end_line(self) -> None:
        """Print the open block, and end its line."""
        self.pause()
        self._source += "\n"
        self._print_finished()
        self._print(self._source)
        self._source, self._begun = "", False

    def draw(self) -> None:
        """Draw the text so far."""
        self._next_drawing = 0.0
        if self._live is not None:
            self._live.refresh()

    def _print_finished(self) -> None:
        """Print the blocks before the last one. A line that has not ended may become anything, and is not looked at."""
        lines = self._source.split("\n")
        tokens = _PARSER.parse("\n".join(lines[:-1]))
        cuts = [0, *sorted({token.map[0] for token in tokens if token.map and token.level == 0})[1:]]
        for start, end in pairwise(cuts):
            self._print("\n".join(lines[start:end]))
        self._source, self._next_drawing = "\n".join(lines[cuts[-1] :]), 0.0

    def _print(self, block: str) -> None:
        if lines := self._rendered(block):
            self._console.print(_joined([*([[]] if self._begun else []), *lines, []]), soft_wrap=True)
            self._begun = True

    def _end_of_open(self) -> Segments:
        """Return the last lines of the open block, as many as the screen has."""
        now, began = (self._source, self._begun), time.perf_counter()
        if now != self._drawn_of and began >= self._next_drawing:
            shown = self._rendered(self._source)[-max(1, self._console.height - 2) :]
            self._drawn, self._drawn_of = _joined([[], *shown] if self._begun else shown or [[]]), now
            self._next_drawing = began + (1.0 + _SHARE) * (time.perf_counter() - began)
        return self._drawn

    def _rendered(self, text: str) -> list[list[Segment]]:
        """Return the rendered lines of a text, or its source where they would lack a word."""
        tokens = _PARSER.parse(text)
        options = self._console.options.update(width=max(1, self._console.width - 1), height=None)
        lines = list(Segment.split_lines(self._console.render(_Page(tokens), options)))
        indent = max(accumulate(_INDENTS.get(token.tag, 0) * token.nesting for token in tokens), default=0)
        lost = _letters(text) - _letters("".join(part.text for line in lines for part in line))
        if lost or 2 * indent > self._console.width:
            plain = Text(text, no_wrap=True, overflow="ignore")
            lines = list(Segment.split_lines(self._console.render(plain, options)))
        lines = [_stripped(line) for line in lines]
        filled = [at for at, line in enumerate(lines) if line]
        return lines[filled[0] : filled[-1] + 1] if filled else []


class _Live(Live):
    """A live display that is written again only where it has changed."""

    _shown: RenderableType | None = None

    def refresh(self) -> None:
        wanted = self.get_renderable()
        if wanted is not self._shown or not self.is_started:
            self._shown = wanted
            super().refresh()


def _joined(lines: list[list[Segment]]) -> Segments:
    first, *others = lines
    return Segments([*first, *(part for line in others for part in (Segment.line(), *line))])


def _letters(text: str) -> Counter[str]:
    """Count letters and digits but for the numbers of list items. Rendered Markdown has fewer than its source where a
    table has too many cells, a link has a title, or something is nested too deeply for the parser."""
    return Counter(filter(str.isalnum, unescape(_ITEM_NUMBER.sub("", text))))


def _stripped(line: Sequence[Segment]) -> list[Segment]:
    kept = list(line)
    while kept and not kept[-1].text.strip():
        kept.pop()
    return [*kept[:-1], Segment(kept[-1].text.rstrip(), kept[-1].style)] if kept else kept


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, JustifyMethod]] = {}


class _Cell(TableDataElement):
    """A cell that folds a long word instead of cutting it off."""

    def __init__(self, justify: JustifyMethod) -> None:
        super().__init__(justify)
        self.content = Text("", justify=justify, overflow="fold")


class _Code(CodeBlock):
    """Code between its fences, as it can be copied. The terminal folds long lines; within a list, this class does."""

    def __init__(self, lexer_name: str, theme: str, token: MarkdownToken) -> None:
        super().__init__(lexer_name, theme)
        self._token = token

    @classmethod
    def create(cls, markdown: Markdown, token: MarkdownToken) -> _Code:
        return _Code(token.info.partition(" ")[0] or "text", markdown.code_theme, token)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = Syntax("", self.lexer_name, theme=self.theme).highlight(str(self.text).removesuffix("\n"))
        code.rstrip()
        fence, nested = self._token.markup, self._token.level > 0
        for text in (Text(fence + self._token.info, "dim"), code, Text(fence, "dim")):
            if text.plain:
                yield Text.assemble(text, no_wrap=not nested, overflow="fold" if nested else "ignore")


class _Page(Markdown):
    """Parsed Markdown without links that a terminal hides; lines end where the text has them end."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements, "heading_open": _Heading, "fence": _Code, "code_block": _Code, "td_open": _Cell,
        "th_open": _Cell,
    }  # fmt: skip

    def __init__(self, tokens: list[MarkdownToken]) -> None:
        super().__init__("", "ansi_dark", hyperlinks=False)
        self.parsed = [one.copy(children=one.children and list(_shown(one.children))) for one in tokens]


def _shown(tokens: Sequence[MarkdownToken]) -> Iterator[MarkdownToken]:
    for token in tokens:
        if token.type == "softbreak":
            yield MarkdownToken("hardbreak", "br", 0)
        elif token.info != "auto":  # `<https://...>` is its own address, and is shown once
            yield token
