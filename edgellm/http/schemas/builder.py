"""The parts of a reply, and the interface of the builders that make responses of them, one for each API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

from edgellm.engine import ToolCall
from edgellm.http.schemas.errors import ErrorInfo
from edgellm.spec.types import Channel, Notice, PromptProgress, Summary, Token
from edgellm.valid_json import write_json


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Whole characters of one channel, and the tokens that they come from: several where a character is made of
    several."""

    text: str
    tokens: tuple[Token, ...]

    @property
    def channel(self) -> Channel:
        return self.tokens[0].channel if self.tokens else Channel.ANSWER


@dataclass(frozen=True, slots=True)
class WrittenReply:
    """A reply that has ended: its text, the notices on the way, and its summary."""

    deltas: Sequence[TextDelta]
    notices: Sequence[Notice]
    summary: Summary
    calls: Sequence[ToolCall] = ()

    def text(self, channel: Channel = Channel.ANSWER) -> str:
        return "".join(delta.text for delta in self.deltas if delta.channel is channel)


def turns_left_out(notices: Iterable[Notice]) -> int:
    """Return how many turns of the conversation the `notices` of a reply say were left out."""
    return sum(notice.turns_left_out for notice in notices)


def json_lines(*data: BaseModel | Mapping[str, Any]) -> list[bytes]:
    """Return each of `data` as a line of JSON, without the fields that are not set."""
    return [json_bytes(one) + b"\n" for one in data]


def events(*data: BaseModel | Mapping[str, Any]) -> list[bytes]:
    """Return each of `data` as a server-sent event, without the fields that are not set."""
    return [b"data: %b\n\n" % json_bytes(one) for one in data]


def named_events(*data: Mapping[str, Any]) -> list[bytes]:
    """Return each of `data` as a server-sent event whose name is its `type`."""
    return [b"event: %b\ndata: %b\n\n" % (one["type"].encode(), json_bytes(one)) for one in data]


def json_bytes(data: BaseModel | Mapping[str, Any]) -> bytes:
    """Return the JSON of `data`, of a model without the fields that are not set. Whatever clients or models wrote into
    it, it is valid UTF-8."""
    try:
        if isinstance(data, BaseModel):
            return data.model_dump_json(exclude_unset=True).encode()
        return to_json(data, inf_nan_mode="null")
    except PydanticSerializationError:  # half a surrogate pair
        plain = data.model_dump(exclude_unset=True) if isinstance(data, BaseModel) else data
        return write_json(plain).encode()


class ResponseBuilder(ABC):
    """Builds the responses to one request in the form of one API, whole or as the pieces of a stream: one choice after
    another."""

    media_type: ClassVar[str] = "text/event-stream"

    def waiting(self) -> list[bytes]:
        """Return the pieces that say that a stream has not begun yet; none in an API that has no place for them."""
        return [b": waiting\n\n"] if self.media_type == "text/event-stream" else []

    @abstractmethod
    def opening(self, prompt_tokens: int) -> list[bytes]:
        """Return the pieces before a choice's first token."""

    @abstractmethod
    def delta(self, delta: TextDelta) -> list[bytes]:
        """Return the pieces for some characters."""

    @abstractmethod
    def call(self, call: ToolCall) -> list[bytes]:
        """Return the pieces for a call of a tool."""

    def notice(self, notice: Notice) -> list[bytes]:  # noqa: ARG002
        """Return the pieces for a notice; none in an API that has no place for it."""
        return []

    def progress(self, progress: PromptProgress) -> list[bytes]:  # noqa: ARG002
        """Return the pieces for a part of the prompt that was read; none in an API that has no place for it."""
        return []

    @abstractmethod
    def closing(self, summary: Summary, *, last: bool = True) -> list[bytes]:
        """Return the pieces after a choice's last token, and after the `last` choice the end of the stream."""

    @abstractmethod
    def failure(self, info: ErrorInfo) -> list[bytes]:
        """Return the pieces that end a stream which an error has broken off."""

    @abstractmethod
    def whole(self, written: Sequence[WrittenReply]) -> BaseModel:
        """Return the response with one choice for each of `written`."""


MakeBuilder: TypeAlias = Callable[[str, Callable[[int], bytes]], ResponseBuilder]
"""Makes the builder of one request. It is given the model's name, and a function that returns the bytes of a token."""
