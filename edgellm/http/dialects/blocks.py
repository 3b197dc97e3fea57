"""What the builders of replies in blocks share: thoughts, texts and calls that follow each other."""

from __future__ import annotations

from abc import abstractmethod

from edgellm.engine import ToolCall
from edgellm.http.schemas.builder import ResponseBuilder, TextDelta
from edgellm.spec.types import Channel, Summary


class BlockResponseBuilder(ResponseBuilder):
    """Builds a stream of blocks. One is begun by the first characters of its channel, and ended by the next block."""

    def __init__(self) -> None:
        self._channel: Channel | None = None  # of the block being written
        self._written = ""  # its text so far
        self._space = ""  # held back until a text follows it: the line break before a call is no block
        self._called = False

    def delta(self, delta: TextDelta) -> list[bytes]:
        channel, text = delta.channel, delta.text
        began: list[bytes] = []
        if channel is not self._channel:
            text = text if channel is Channel.THINKING else self._space + text
            if not text.strip():
                self._space = "" if channel is Channel.THINKING else text
                return []
            began = [*self._end(), *self.begin_block(channel)]
            self._channel, self._written, self._space = channel, "", ""
        self._written += text
        return [*began, *self.block_text(channel, text)] if text else began

    def call(self, call: ToolCall) -> list[bytes]:
        self._called = True
        return [*self._end(), *self.call_block(call)]

    def closing(self, summary: Summary, *, last: bool = True) -> list[bytes]:
        return [*self._end(), *(self.end(summary, self._called) if last else [])]

    @abstractmethod
    def begin_block(self, channel: Channel) -> list[bytes]:
        """Return the pieces that begin a block of text or thought."""

    @abstractmethod
    def block_text(self, channel: Channel, text: str) -> list[bytes]:
        """Return the pieces for some characters of the block."""

    @abstractmethod
    def end_block(self, channel: Channel, text: str) -> list[bytes]:
        """Return the pieces that end the block with all of its `text`."""

    @abstractmethod
    def call_block(self, call: ToolCall) -> list[bytes]:
        """Return the pieces for a whole call."""

    @abstractmethod
    def end(self, summary: Summary, called: bool) -> list[bytes]:
        """Return the pieces that end the stream; `called`: the reply has calls."""

    def _end(self) -> list[bytes]:
        if (channel := self._channel) is None:
            return []
        self._channel = None
        return self.end_block(channel, self._written)
