"""The calls of a reply told apart from its text, while it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from edgellm.engine import ToolCall
from edgellm.llm.tools.formats import ToolFormat
from edgellm.llm.tools.toolbox import Toolbox
from edgellm.spec.stream import Utf8
from edgellm.spec.types import Channel, Token


def split_calls(
    tokens: Iterable[Token], toolbox: Toolbox, text_of: Callable[[int], bytes], cut: Callable[[], bool] = lambda: False
) -> Iterator[Token | ToolCall]:
    """Yield the tokens of a reply and its calls, each as soon as it is certain. The calls' tokens have no text.

    `text_of` returns the bytes of a token, of control tokens too. `cut` returns, after the last token, whether the
    reply broke off: an open call is no call then. Tokens whose text may begin a call are held back. An unreadable call
    is yielded as text at the end.
    """
    style, tools = toolbox.format, {str(tool["function"]["name"]): tool for tool in toolbox.tools}
    openings = [opening.encode() for opening in style.openings]
    held: list[tuple[Token, bytes]] = []
    calling, started = bool(toolbox.opening()), False
    buffer, decoder, called = toolbox.opening(), Utf8(), False
    last: Token | None = None
    for token in tokens:
        raw = text_of(token.id) if style.everywhere else token.piece or text_of(token.id)
        if not style.everywhere and token.channel is not Channel.ANSWER:
            yield token
            continue
        last = token
        if calling:
            buffer += decoder.feed(raw)
            yield replace(token, piece=b"")
            if not style.whole and (b"}" in raw or b"]" in raw):  # Calls in JSON end with a bracket.
                calls, rest = style.parse(buffer, tools, False)
                yield from calls
                called = called or bool(calls)
                buffer = rest if calls else buffer
            continue
        held.append((token, raw))
        text = b"".join(part for _, part in held)
        at = _opening(text, openings, leading=style.leading and started)
        if at is not None:
            calling, buffer = True, decoder.feed(text if style.everywhere else text[at:])
            for one, part in held:
                yield replace(one, piece=b"" if style.everywhere else one.piece[: max(0, at)])
                at -= len(part)
            held = []
            continue
        keep = 0 if style.leading and started else _pending(text, openings, style)
        while held and len(text) - len(held[0][1]) >= keep:
            text = text[len(held[0][1]) :]
            one, part = held.pop(0)
            started = started or bool(part.strip())
            yield one
    for one, _ in held:
        yield one
    if calling and last is not None:
        calls, rest = style.parse(buffer + decoder.end(), tools, not cut())
        yield from calls
        called = called or bool(calls)
        rest = style.closing.sub("", rest, count=1) if called else rest
        if rest.strip() not in ("", toolbox.opening().strip()) and not (style.everywhere and called):
            yield replace(last, piece=rest.encode())


def _opening(text: bytes, openings: Sequence[bytes], *, leading: bool) -> int | None:
    """Return the beginning of calls in `text`, if any; with `leading` it is too late for calls."""
    if leading:
        return None
    if b"{" in openings:  # A bracket counts only at the beginning of the answer.
        blanks = len(text) - len(text.lstrip())
        return blanks if any(map(text.lstrip().startswith, openings)) else None
    found = [at for opening in openings if (at := text.find(opening)) >= 0]
    return min(found, default=None)


def _pending(text: bytes, openings: Sequence[bytes], style: ToolFormat) -> int:
    """Return how many bytes at the end of `text` may belong to the beginning of a call."""
    if style.everywhere:  # The header before the opening belongs to the call.
        after = text.rfind(b"<|message|>")
        starts = [at for name in (b"<|start|>", b"<|channel|>") if (at := text.find(name, max(after, 0))) >= 0]
        return len(text) - min(starts, default=len(text))
    if style.leading and not text.strip():
        return len(text)
    most = min(len(text), max(map(len, openings)) - 1)
    return next((n for n in range(most, 0, -1) if any(one.startswith(text[-n:]) for one in openings)), 0)
