"""A reply as an iterator of tokens, which can be cancelled at any time and ends at stop sequences."""

import codecs
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Self, TypeAlias, TypeVar

from edgellm.engine import Stop
from edgellm.engine.chat.prompt import ThinkingMarkup
from edgellm.errors import EdgeError, Stopped
from edgellm.spec.stats import Summary
from edgellm.spec.types import UNVERIFIED, Channel, Event, Explanation, Notice, PromptProgress, Source, Token

_Other = TypeVar("_Other")


class Utf8:
    """A decoder of byte pieces, which may end within characters; wrong bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str:
        """Return the characters that `piece` completes."""
        return self._decoder.decode(piece)

    @property
    def has_partial(self) -> bool:
        """Return whether the pieces so far end within a character."""
        return bool(self._decoder.getstate()[0])

    def end(self) -> str:
        """Return the replacement of a character that never became whole."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Whole characters of one channel, and their tokens: several where a character spans several."""

    text: str
    tokens: tuple[Token, ...]

    @property
    def channel(self) -> Channel:
        return self.tokens[0].channel

    def parts(self) -> Iterator[tuple[Token, str]]:
        """Yield the tokens, of which the last one has the text."""
        yield from ((token, "") for token in self.tokens[:-1])
        yield self.tokens[-1], self.text


def whole_characters(events: Iterable[Token | _Other]) -> Iterator[TextDelta | _Other]:
    """Yield the tokens among the events in deltas that end with a character; other events as they are."""
    decoder, text, tokens = Utf8(), "", list[Token]()
    for event in events:
        if not isinstance(event, Token):
            yield event
            continue
        if tokens and tokens[0].channel is not event.channel:
            yield TextDelta(text + decoder.end(), tuple(tokens))
            text, tokens = "", []
        tokens.append(event)
        text += decoder.feed(event.piece)
        if not decoder.has_partial:
            yield TextDelta(text, tuple(tokens))
            text, tokens = "", []
    if tokens:
        yield TextDelta(text + decoder.end(), tuple(tokens))


def cut_at_stops(
    stops: Sequence[str], events: Generator[Event, None, None], stats: Summary, openings: Sequence[str] = ()
) -> Generator[Event, None, None]:
    """Yield the same events up to the first complete sequence of `stops` in the answer, which is not yielded; or up to
    one of the `openings` of turns in unverified tokens.

    A token whose bytes may begin a stop sequence is held back until the following bytes are known. A sequence may begin
    and end within tokens: the bytes before it are yielded as a shorter token. `stats` records the sequence.
    """
    wanted = [(stop.encode(), stop) for stop in stops]
    unchecked = [*wanted, *((opening.encode(), "") for opening in openings)]
    held: list[Token] = []
    try:
        for event in events:
            if not isinstance(event, Token) or event.channel is not Channel.ANSWER:
                yield event
                continue
            held.append(event)
            sequences = unchecked if event.source in UNVERIFIED else wanted
            text = b"".join(token.piece for token in held)
            if (found := _first(sequences, text)) is not None:
                start, stop = found
                stats.cut(len(text) - start, stop)
                yield from _truncated(held, start)
                return
            while held and len(text) - len(held[0].piece) >= held_bytes([data for data, _ in sequences], text):
                text = text[len(held[0].piece) :]
                yield held.pop(0)
    except EdgeError:  # A lost verifier must not lose tokens.
        yield from held
        raise
    finally:
        events.close()
    yield from held


def _first(sequences: Sequence[tuple[bytes, str]], text: bytes) -> tuple[int, str] | None:
    """Return the place and the name of the sequence that is complete first; of two that end together the longer."""
    found = [(at + len(data), at, stop) for data, stop in sequences if (at := text.find(data)) >= 0]
    return min(found)[1:] if found else None


def held_bytes(sequences: Collection[bytes], text: bytes) -> int:
    """Return how many bytes at the end of `text` may be the beginning of a sequence."""
    most = min(len(text), max(map(len, sequences), default=1) - 1)
    return next((n for n in range(most, 0, -1) if any(data.startswith(text[-n:]) for data in sequences)), 0)


def _truncated(tokens: Sequence[Token], end: int) -> Generator[Token, None, None]:
    """Yield the tokens that hold the first `end` bytes; the last of them is cut."""
    for token in tokens:
        if end <= 0:
            return
        yield token if len(token.piece) <= end else replace(token, piece=token.piece[:end])
        end -= len(token.piece)


# Arguments: the statistics to update, whether to explain, the cancellation flag, and the progress callback.
Writer: TypeAlias = Callable[
    [Summary, bool, Callable[[], bool], Callable[[PromptProgress], None]], Generator[Event, None, None]
]


class Reply(Iterator[Token]):
    """An iterator over the tokens of one reply. Nothing is computed before the first one is requested.

    `cancel` may be called from any thread. A reply may be dropped before its end.
    """

    def __init__(
        self, write: Writer, *, prompt_tokens: int, seed: int, prepared: float = 0.0,
        preface: Sequence[Notice | Explanation] = (),
    ) -> None:  # fmt: skip
        """Prepare the reply; `prepared` seconds have gone into the request already. `preface` is delivered first."""
        self.prompt_tokens, self._seed, self._prepared = prompt_tokens, seed, prepared
        self._write, self._preface = write, preface
        self._listeners: dict[type, Callable[[Any], None]] = {}  # by the type of what they are told
        self._stats: Summary | None = None
        self._events: Generator[Event, None, None] | None = None
        self._should_stop = Stop()
        self._lock = threading.RLock()
        self._done_callbacks: list[weakref.finalize[..., Reply]] = []

    def __next__(self) -> Token:
        with self._lock:
            if self._events is None:
                self._start()
            try:
                for event in self._events or ():
                    if isinstance(event, Token):
                        return event
                    self._deliver(event)
            except Stopped:  # A stop ends the reply without an error.
                pass
            except BaseException:
                self._finish()
                raise
            self._finish()
            raise StopIteration

    @property
    def summary(self) -> Summary:
        """Return the reply's statistics: final after the last token, partial before it."""
        return self._stats or Summary(self.prompt_tokens, self._seed)

    @property
    def told(self) -> list[str]:
        """Return the explanations that were known before the reply began."""
        return [one.text for one in self._preface if isinstance(one, Explanation)]

    def listen(
        self, on_notice: Callable[[Notice], None] | None = None,
        on_explain: Callable[[Explanation], None] | None = None,
        on_progress: Callable[[PromptProgress], None] | None = None,
    ) -> None:  # fmt: skip
        """Set callbacks, which are called in the iterating thread: `on_progress` while a long prompt is read, the
        others between tokens. Explanations are made only if `on_explain` is set before the first token."""
        wanted = {Notice: on_notice, Explanation: on_explain, PromptProgress: on_progress}
        self._listeners |= {kind: listener for kind, listener in wanted.items() if listener is not None}

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the reply has ended, or was cancelled, closed or dropped."""
        self._done_callbacks.append(weakref.finalize(self, callback))

    def cancel(self) -> None:
        """Cancel the reply: no token follows. Returns at once, even while another thread waits for a token."""
        self._should_stop.set()
        if self._lock.acquire(blocking=False):
            try:
                self._finish()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Cancel the reply, and wait until other threads have left it."""
        self._should_stop.set()
        with self._lock:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _start(self) -> None:
        if not self._should_stop():
            for event in self._preface:
                self._deliver(event)
            self._stats = Summary(self.prompt_tokens, self._seed, self._prepared)
            self._events = self._write(self._stats, Explanation in self._listeners, self._should_stop, self._deliver)

    def _deliver(self, event: Notice | Explanation | PromptProgress) -> None:
        if (listener := self._listeners.get(type(event))) is not None:
            listener(event)

    def _finish(self) -> None:
        """Close the generator, with the lock held, unless it is running: a signal handler may interrupt this very
        thread."""
        if self._events is not None:
            if inspect.getgeneratorstate(self._events) == inspect.GEN_RUNNING:
                return
            self._events.close()
        for end in self._done_callbacks:
            end()


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

    def _decided(self, markers: Collection[bytes]) -> int:
        """Return the number of bytes in the buffer that cannot belong to a marker that is yet to be completed."""
        return self._trimmed(len(self._buffer) - held_bytes(markers, self._buffer))

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
        openers = dict.fromkeys((b"<|start|>", b"<|channel|>"), _Place.HEADER)
        inside = openers | {b"<|end|>": _Place.HEADER}
        return {
            _Place.START: openers | {b"<|message|>": _Place.ANSWER},
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
