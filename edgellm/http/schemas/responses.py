"""Responses: models as /openapi.json describes them, the events of a reply, and the base of what writes them, one
class for each API."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field
from pydantic_core import PydanticSerializationError, to_json

from edgellm.engine import ToolCall
from edgellm.http.schemas.errors import ApiError
from edgellm.llm.tools.values import write_json
from edgellm.spec.stats import Summary
from edgellm.spec.stream import TextDelta
from edgellm.spec.types import Channel, Notice, PromptProgress

Json: TypeAlias = Mapping[str, Any]
"""A JSON object."""
_T = TypeVar("_T")


class ModelInfo(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["edgellm"] = "edgellm"
    context_length: int | None = Field(description="Tokens of a prompt and its reply; null while it is not in memory.")
    loaded: bool = Field(description="Whether the model is in memory. Others are loaded when a request names them.")
    device: str | None = Field(
        default=None, description="The paired device that verifies with the model; null: this one."
    )
    embeds: bool = Field(default=False, description="Whether the model embeds texts, and writes no replies.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


FIGURES = (
    "finish_reason", "stopped_by", "seed", "rounds", "tokens_per_round", "drafted", "share_verified",
    "share_verified_thinking", "acceptance_rate", "mean_acceptance_length", "verifier_passes_per_token",
    "share_offloaded", "retrieved", "rtt_ms_p50", "bytes_up", "bytes_down",
)  # fmt: skip
"""Figures of a `Summary` in our extension of a reply, and the median wait for a verdict of a verifier behind a link."""


Event: TypeAlias = TextDelta | ToolCall | Notice | PromptProgress | Summary


@dataclass(frozen=True, slots=True)
class WrittenReply:
    """A reply that has ended: its events, and its summary."""

    events: Sequence[Event]
    summary: Summary

    def all(self, kind: type[_T]) -> list[_T]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def calls(self) -> list[ToolCall]:
        return self.all(ToolCall)

    @property
    def text(self) -> str:
        """Return the answer, without the blanks around it if there are calls."""
        text = self._text(Channel.ANSWER)
        return text.strip() if self.calls else text

    @property
    def thought(self) -> str:
        return self._text(Channel.THINKING).rstrip()

    @property
    def turns_left_out(self) -> int:
        """Return how many turns of the conversation were left out."""
        return sum(notice.turns_left_out for notice in self.all(Notice))

    def _text(self, channel: Channel) -> str:
        return "".join(delta.text for delta in self.all(TextDelta) if delta.channel is channel)


def summary_of(summary: Summary) -> Json:
    """Return the figures of a reply that our extension has, as in `FIGURES`."""
    found = {name: getattr(summary, name, None) for name in FIGURES}
    found |= {"rtt_ms_p50": summary.rtt_ms, "stopped_by": summary.stopped_by or None}
    return {name: rounded(value) if isinstance(value, float) else value for name, value in found.items()}


def rounded(value: float | None) -> float | None:
    """Return a figure with the four decimals that responses have."""
    return None if value is None else round(float(value), 4)


def json_bytes(data: Json) -> bytes:
    """Return the JSON of `data`. Whatever clients or models wrote into it, it is valid UTF-8."""
    try:
        return to_json(data, inf_nan_mode="null")
    except PydanticSerializationError:  # half a surrogate pair
        return write_json(data).encode()


Pieces: TypeAlias = Iterator[Json]
"""The pieces of a stream, each the JSON of an event or a line."""


class Writer(ABC):
    """Writes the replies to one request in the form of one API, whole or in pieces."""

    media_type: ClassVar[str] = "text/event-stream"
    last_bytes: ClassVar[bytes] = b""
    """The bytes behind the last piece of a stream."""
    names: ClassVar[Mapping[str, str]] = {}
    """Parameters that are called otherwise than in OpenAI's chat completions."""

    def __init__(self, model: str) -> None:
        """`model` is the name in the request."""
        self.model = model

    def begin(self, model: str, piece: Callable[[int], bytes]) -> None:  # noqa: ARG002
        """Take the name of the model that writes, and a function that returns a token's bytes, before all else."""
        self.model = model

    def waiting(self) -> bytes:
        """Return the bytes that say that a stream has not begun yet."""
        return b": waiting\n\n"

    def framed(self, piece: Json) -> bytes:
        """Return the bytes of a piece: a server-sent event, whose name is its `type` if it has one."""
        name = b"event: %b\n" % piece["type"].encode() if "type" in piece else b""
        return b"%bdata: %b\n\n" % (name, json_bytes(piece))

    def pieces(self, event: Event, *, last: bool = True) -> Pieces:
        """Yield the pieces for an event of the stream; `last`: no other choice follows this one."""
        match event:
            case TextDelta():
                yield from self.delta(event)
            case ToolCall():
                yield from self.call(event)
            case Summary():
                yield from self.close(event, last=last)
            case _:
                yield from self.aside(event)

    def stream(self, written: WrittenReply) -> Pieces:
        """Yield the pieces for a reply that has ended."""
        yield from self.open(written.summary)
        for event in (*written.events, written.summary):
            yield from self.pieces(event)

    def open(self, summary: Summary) -> Pieces:  # noqa: ARG002
        """Yield the pieces before a choice's first token; `summary` has the figures of the prompt."""
        yield from ()

    @abstractmethod
    def delta(self, delta: TextDelta) -> Pieces: ...

    @abstractmethod
    def call(self, call: ToolCall) -> Pieces: ...

    def aside(self, event: Notice | PromptProgress) -> Pieces:  # noqa: ARG002
        yield from ()

    @abstractmethod
    def close(self, summary: Summary, *, last: bool) -> Pieces:
        """Yield the pieces after a choice's last token, and after the `last` choice the end of the stream."""

    @abstractmethod
    def failure(self, error: ApiError) -> Json:
        """Return the piece that ends a stream which an error has broken off."""

    @abstractmethod
    def whole(self, written: Sequence[WrittenReply]) -> Json:
        """Return the response with one choice for each of `written`."""


class BlockWriter(Writer):
    """Writes one reply in blocks of one channel's text or a call. Blanks wait for text: there are none before a call or
    another channel, and none alone."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.called = False
        self.cut = False  # whether the block that ends is cut at the longest reply
        self._channel, self._written, self._blanks = Channel.ANSWER, "", ""

    def delta(self, delta: TextDelta) -> Pieces:
        if delta.channel is not self._channel:
            yield from self._end()
            self._channel = delta.channel
        text = self._blanks + delta.text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            yield from self._add(shown)

    def call(self, call: ToolCall) -> Pieces:
        self.called = True
        yield from self._end()
        yield from self.call_block(call)

    def close(self, summary: Summary, *, last: bool) -> Pieces:  # noqa: ARG002
        if self._written and self._blanks and self._channel is Channel.ANSWER:
            yield from self._add(self._blanks)
        self.cut = summary.finish_reason == "length"
        yield from self._end()
        yield from self.end(summary)

    def _add(self, text: str) -> Pieces:
        if not self._written:
            yield from self.begin_block(self._channel)
        self._written += text
        yield self.block_text(self._channel, text)

    def _end(self) -> Pieces:
        if self._written:
            yield from self.end_block(self._channel, self._written)
        self._written = self._blanks = ""

    @abstractmethod
    def begin_block(self, channel: Channel) -> Pieces: ...

    @abstractmethod
    def block_text(self, channel: Channel, text: str) -> Json: ...

    @abstractmethod
    def end_block(self, channel: Channel, text: str) -> Pieces: ...

    @abstractmethod
    def call_block(self, call: ToolCall) -> Pieces: ...

    @abstractmethod
    def end(self, summary: Summary) -> Pieces:
        """Yield the pieces that end the stream."""
