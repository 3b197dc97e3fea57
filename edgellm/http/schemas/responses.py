"""Responses: models as /openapi.json describes them, the events of a reply, and the base of what writes them, one
class for each API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NotRequired, TypeAlias, TypeVar

from pydantic import BaseModel, Field
from pydantic_core import PydanticSerializationError, to_json
from typing_extensions import TypedDict

from edgellm.engine import ToolCall
from edgellm.http.schemas.errors import ErrorInfo
from edgellm.spec.stats import Summary
from edgellm.spec.types import Channel, Notice, PromptProgress, Source, Token
from edgellm.valid_json import write_json

Json: TypeAlias = Mapping[str, Any]
"""A JSON object."""
_T = TypeVar("_T")


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    models: dict[str, Literal["ok", "away"]] | None = Field(
        None, description="Whether each model in memory can answer; away: no server behind a gateway has it now. Null"
        " without any, and where clients need a key."
    )  # fmt: skip


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


class Unloaded(BaseModel):
    model: str
    unloaded: bool = Field(description="false: requests use it, and it is removed after them.")


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: dict[Literal["reasoning_tokens"], int]


class Timings(TypedDict):
    """llama.cpp's timings: the prompt up to the first token, then the later tokens. The verifier tested `draft_n`
    drafted tokens and accepted `draft_n_accepted` of them."""

    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class TokenInfo(TypedDict):
    """A token, who wrote it, and its channel. `text` is the characters that it completes."""

    id: int
    text: str
    source: Source
    channel: Channel
    confidence: float | None
    round: int


class ReplySummary(TypedDict):
    """Figures that llama.cpp has no names for, from a `Summary`. `rtt_ms_p50` is the median wait for a verdict of a
    verifier behind a link, to and from which the bytes went."""

    finish_reason: str
    stopped_by: str | None
    seed: int
    rounds: int
    tokens_per_round: float | None
    drafted: int
    share_verified: float | None
    share_verified_thinking: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    verifier_passes_per_token: float | None
    share_offloaded: float | None
    retrieved: int
    rtt_ms_p50: float | None
    bytes_up: int
    bytes_down: int


class Extension(TypedDict):
    """Our extension of a whole reply: its tokens with their sources, notices on the way, figures, and how many turns
    truncation left out, if any. A chunk has one of the first three, its notice as a text."""

    tokens: list[TokenInfo]
    notices: list[str]
    summary: ReplySummary
    turns_left_out: NotRequired[int]


class Completion(TypedDict):
    """A reply to a chat or a text. `choices` are as OpenAI's own documentation describes them."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: Usage
    timings: Timings
    edgellm: Extension


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Whole characters of one channel, and their tokens: several where a character spans several."""

    text: str
    tokens: tuple[Token, ...]

    @property
    def channel(self) -> Channel:
        return self.tokens[0].channel if self.tokens else Channel.ANSWER


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
    """Return the figures of a reply that our extension has, as in `ReplySummary`."""
    found = {name: getattr(summary, name, None) for name in ReplySummary.__annotations__}
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

    def pieces(self, event: Event, *, last: bool) -> Pieces:
        """Yield the pieces for an event of the stream; `last`: no other choice follows this one."""
        match event:
            case TextDelta():
                yield from self.delta(event)
            case ToolCall():
                yield from self.call(event)
            case PromptProgress():
                yield from self.progress(event)
            case Notice():
                yield from self.notice(event)
            case _:
                yield from self.close(event, last=last)

    def open(self, prompt_tokens: int) -> Pieces:  # noqa: ARG002
        """Yield the pieces before a choice's first token."""
        yield from ()

    @abstractmethod
    def delta(self, delta: TextDelta) -> Pieces: ...

    @abstractmethod
    def call(self, call: ToolCall) -> Pieces: ...

    def notice(self, notice: Notice) -> Pieces:  # noqa: ARG002
        yield from ()

    def progress(self, progress: PromptProgress) -> Pieces:  # noqa: ARG002
        yield from ()

    @abstractmethod
    def close(self, summary: Summary, *, last: bool) -> Pieces:
        """Yield the pieces after a choice's last token, and after the `last` choice the end of the stream."""

    @abstractmethod
    def failure(self, info: ErrorInfo) -> Json:
        """Return the piece that ends a stream which an error has broken off."""

    @abstractmethod
    def whole(self, written: Sequence[WrittenReply]) -> Json:
        """Return the response with one choice for each of `written`."""


class BlockWriter(Writer):
    """Writes a stream of blocks, each begun by the first characters of its channel, and ended by the next block."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._channel: Channel | None = None  # None before the first block
        self._written = ""  # the block's text so far
        self._space = ""  # blanks held back until text follows: the line break before a call is no block
        self._called = False

    def delta(self, delta: TextDelta) -> Pieces:
        channel, text = delta.channel, delta.text
        if channel is not self._channel:
            text = text if channel is Channel.THINKING else self._space + text
            if not text.strip():
                self._space = "" if channel is Channel.THINKING else text
                return
            yield from self._end()
            yield from self.begin_block(channel)
            self._channel, self._written, self._space = channel, "", ""
        self._written += text
        if text:
            yield self.block_text(channel, text)

    def call(self, call: ToolCall) -> Pieces:
        self._called = True
        yield from self._end()
        yield from self.call_block(call)

    def close(self, summary: Summary, *, last: bool) -> Pieces:
        yield from self._end()
        if last:
            yield from self.end(summary, self._called)

    def _end(self) -> Pieces:
        channel, self._channel = self._channel, None
        if channel is not None:
            yield from self.end_block(channel, self._written)

    @abstractmethod
    def begin_block(self, channel: Channel) -> Pieces: ...

    @abstractmethod
    def block_text(self, channel: Channel, text: str) -> Json: ...

    @abstractmethod
    def end_block(self, channel: Channel, text: str) -> Pieces: ...

    @abstractmethod
    def call_block(self, call: ToolCall) -> Pieces: ...

    @abstractmethod
    def end(self, summary: Summary, called: bool) -> Pieces:
        """Yield the pieces that end the stream; `called`: the reply has calls."""
