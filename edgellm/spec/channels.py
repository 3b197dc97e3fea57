"""The thoughts and the answer of a reply, told apart while its tokens arrive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from edgellm.engine.chat.thinking import ThinkingMarkup
from edgellm.spec.types import Channel, Source, Token

_CHANNEL_NAME = re.compile(rb"<\|channel\|>\s*(\w+)")


class _Place(Enum):
    """A place in a reply: before its first visible text, in a thought, in the answer, in a message's header."""

    START = auto()
    THINKING = auto()
    ANSWER = auto()
    HEADER = auto()


@dataclass(slots=True)
class _Held:
    """A token that is not yielded yet: the rest of its text, and the `piece` that is known to be shown in `channel`."""

    token: Token
    rest: bytes
    piece: bytes = b""
    channel: Channel | None = None


class ChannelSplitter:
    """A filter that assigns tokens of a reply to channels, and removes the markup.

    Markup may be one token or several, begin and end within tokens, or consist of control tokens, whose piece is empty.
    A token whose bytes may begin markup is held back until the following bytes are known.
    """

    def __init__(
        self, markup: ThinkingMarkup | None = None, *, opened: bool = False,
        control_text: Callable[[int], bytes] = lambda _: b"",
    ) -> None:  # fmt: skip
        """Begin a reply; it has no thoughts if `markup` is None. `opened`: the prompt ends within a thought.
        `control_text` returns the text of a control token."""
        self.reason = "no thoughts are looked for" if markup is None else f"the model thinks: {markup.reason}"
        """The reason why thoughts are looked for, or not."""
        self.thinks = markup is not None
        self._opened, self._control_text = opened, control_text
        self._place = _Place.ANSWER if markup is None else _Place.START
        self._markers: Mapping[_Place, Mapping[bytes, _Place]] = {} if markup is None else _markers(markup, opened)
        self._held: list[_Held] = []
        self._buffer = self._header = b""
        self._skips_blanks = False

    @property
    def channel(self) -> Channel:
        """Return the channel of the reply's end so far."""
        opened = self._place is _Place.START and self._opened
        return Channel.THINKING if opened or self._place in (_Place.THINKING, _Place.HEADER) else Channel.ANSWER

    def feed(self, token: Token) -> Iterator[Token]:
        """Yield the tokens whose channel is known with `token`, in order."""
        if not self._markers or not (self._markers[self._place] or self._held or self._skips_blanks):
            yield token
            return
        text = token.piece or self._control_text(token.id)
        self._held.append(_Held(token, text))
        self._buffer += text
        yield from self._advance(final=False)

    def end(self) -> Iterator[Token]:
        """Yield the tokens that are held back."""
        yield from self._advance(final=True)

    def close_thought(self) -> None:
        """Note that the markup which ends the thought was written by the caller, and the answer follows."""
        self._place, self._skips_blanks = _Place.ANSWER, True

    def _advance(self, *, final: bool) -> Iterator[Token]:
        while self._buffer:
            if self._skips_blanks:
                yield from self._take(_blanks(self._buffer), self.channel, shown=False)
                if not self._buffer:
                    break
                self._skips_blanks = False
            markers = self._markers[self._place]
            if self._place is _Place.START:
                blanks = _blanks(self._buffer)
                begun = self._buffer[blanks:]
                marker = next((marker for marker in markers if begun.startswith(marker)), None)
                if marker is None and not final and any(marker.startswith(begun) for marker in markers):
                    break
                if marker is None:
                    self._place = _Place.THINKING if self._opened else _Place.ANSWER
                    self._skips_blanks = self._opened
                    continue
                at = blanks
            else:
                at, marker = min(
                    ((at, marker) for marker in markers if (at := self._buffer.find(marker)) >= 0), default=(-1, None)
                )
            if marker is None:
                known = len(self._buffer) if final else self._decided(markers)
                yield from self._take(known, self.channel, shown=True)
                break
            yield from self._take(self._trimmed(at), self.channel, shown=self._place is not _Place.START)
            before = self.channel
            self._enter(markers[marker], marker)
            channel = Channel.THINKING if Channel.THINKING in (before, self.channel) else Channel.ANSWER
            yield from self._take(_blanks(self._buffer) + len(marker), channel, shown=False)
        yield from self._take(0, self.channel, shown=False)

    def _decided(self, markers: Mapping[bytes, _Place]) -> int:
        """Return the number of bytes in the buffer that cannot belong to a marker that is yet to be completed."""
        end, firsts = len(self._buffer), {marker[0] for marker in markers}
        for at in range(max(0, end - max(map(len, markers), default=1) + 1), end):
            if self._buffer[at] in firsts and any(marker.startswith(self._buffer[at:]) for marker in markers):
                return self._trimmed(at)
        return self._trimmed(end)

    def _trimmed(self, end: int) -> int:
        """Return `end`, or where the blanks before it begin, if they end a thought."""
        return len(self._buffer[:end].rstrip()) if self._place is _Place.THINKING else end

    def _take(self, count: int, channel: Channel, *, shown: bool) -> Iterator[Token]:
        """Take `count` bytes of `channel` out of the buffer; yield the tokens that end there."""
        if self._place is _Place.HEADER:
            self._header += self._buffer[:count]
            shown = False
        self._buffer = self._buffer[count:]
        while self._held and (count or not self._held[0].rest):
            held = self._held[0]
            part, held.rest = held.rest[:count], held.rest[count:]
            count -= len(part)
            if shown and part and held.token.piece:
                if held.channel not in (None, channel):
                    yield replace(held.token, piece=held.piece, channel=held.channel)
                    held.piece = b""
                held.piece, held.channel = held.piece + part, channel
            if not held.rest:
                token, found = held.token, held.channel or channel
                same = held.piece == token.piece and found is token.channel
                yield token if same else replace(token, piece=held.piece, channel=found)
                del self._held[0]

    def _enter(self, place: _Place, marker: bytes) -> None:
        if place is _Place.HEADER:
            self._header = marker
        elif self._place is _Place.HEADER:  # The channel that a header names last counts.
            names = _CHANNEL_NAME.findall(self._header)
            place = _Place.THINKING if names and names[-1] != b"final" else _Place.ANSWER
        self._skips_blanks = place in (_Place.THINKING, _Place.ANSWER) and place is not self._place
        self._place = place


def _markers(markup: ThinkingMarkup, opened: bool) -> dict[_Place, dict[bytes, _Place]]:
    """Return the markup that can occur at each place, and the place after it."""
    if markup.channels:
        heads = dict.fromkeys((b"<|start|>", b"<|channel|>"), _Place.HEADER)
        inside = heads | {b"<|end|>": _Place.HEADER}
        return {
            _Place.START: heads | {b"<|message|>": _Place.ANSWER},
            _Place.THINKING: inside,
            _Place.ANSWER: inside,
            _Place.HEADER: {b"<|message|>": _Place.ANSWER},
        }
    closing = {markup.closing.encode(): _Place.ANSWER}
    around = dict.fromkeys((text.encode() for text in markup.hidden), _Place.ANSWER)
    return {
        _Place.START: {markup.opening.encode(): _Place.THINKING} | (closing if opened else around),
        _Place.THINKING: closing,
        _Place.ANSWER: around,
    }


def _blanks(text: bytes) -> int:
    return len(text) - len(text.lstrip())


def split_text(markup: ThinkingMarkup, text: str) -> tuple[str, str]:
    """Return the thought and the answer in a reply's whole text, which may lack the opening that its prompt had. An
    answer that mentions the markup stays whole."""
    thought, closing, _ = text.partition(markup.closing)
    opened = not markup.channels and bool(closing) and markup.opening not in thought
    splitter, whole = ChannelSplitter(markup, opened=opened), Token(0, text.encode(), Source.VERIFIER)
    parts = dict.fromkeys(Channel, b"")
    for token in [*splitter.feed(whole), *splitter.end()]:
        parts[token.channel] += token.piece
    return parts[Channel.THINKING].decode().rstrip(), parts[Channel.ANSWER].decode()
