"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field, JsonValue, model_validator
from starlette.responses import Response

from edgellm.engine import ToolCall
from edgellm.http.dialects.dialect import Dialect, chat_request, reply_responses
from edgellm.http.handlers import RequestHandler
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.builder import BlockResponseBuilder, Json, WrittenReply, named_events, summary_of
from edgellm.http.schemas.errors import ErrorInfo, error_responses, invalid_request
from edgellm.http.schemas.request_model import (
    MAX_ITEMS,
    MAX_TEXT,
    MAX_TOKENS,
    MostTokens,
    ReplyRequest,
    RequestModel,
    Stops,
    Temperature,
    TopK,
    TopP,
    Types,
)
from edgellm.http.schemas.requests import MEDIA, TOOL_NAME, ChatRequest, ContentPart
from edgellm.spec.types import Channel, Summary

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_TEXTS = ("text", *MEDIA)
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
_NAMES = {"think": "thinking"}


Texts = Annotated[str, Field(max_length=MAX_TEXT)] | Annotated[list[ContentPart], Field(max_length=1000)]


class AnthropicBlock(ContentPart):
    """A block of a message's content."""

    type: str = Field(max_length=100, description=f"One of {', '.join(_BLOCKS)}.")
    thinking: str = Field("", max_length=MAX_TEXT, description="A thought, which most models do not get back.")
    signature: str = Field("", max_length=MAX_TEXT, description="Accepted and not checked.")
    data: str = Field("", max_length=MAX_TEXT, description="A thought that cannot be read, which is left out.")
    id: str = Field("", max_length=MAX_TEXT)
    name: str = Field("", max_length=MAX_TEXT)
    input: JsonValue = Field({}, description="The arguments of a call: an object; other data is taken as well.")
    tool_use_id: str = Field("", max_length=MAX_TEXT)
    content: Texts = Field("", description="The result of a call, whole or in blocks of text.")
    is_error: bool = False

    _types: ClassVar[Types] = {"content": _TEXTS}


class AnthropicTurn(RequestModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=MAX_TEXT)] | Annotated[list[AnthropicBlock], Field(max_length=1000)]

    _types: ClassVar[Types] = {"content": (*_BLOCKS, *MEDIA)}

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the turn as messages of a chat completion: results of calls have messages of their own there."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        blocks = self.content
        text = "".join(block.text for block in blocks if block.type == "text")
        if self.role == "assistant":
            calls = [
                {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
                for block in blocks
                if block.type == "tool_use"
            ]
            thought = "".join(block.thinking for block in blocks)
            yield {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": calls}
            return
        results = [block for block in blocks if block.type == "tool_result"]
        for block in results:
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": ContentPart.plain(block.content)}
        if text or not results:
            yield {"role": self.role, "content": text}


class AnthropicTool(RequestModel):
    type: Literal["custom"] = Field("custom", description="Tools that a server runs are not there.")
    name: str = Field(pattern=TOOL_NAME)
    description: str = Field("", max_length=MAX_TEXT)
    input_schema: dict[str, JsonValue] = Field({}, description="The JSON schema of the arguments.")
    strict: bool = Field(False, description="Accepted; arguments are not forced to fit the schema.")

    def function(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str = Field("", max_length=200)
    disable_parallel_tool_use: bool = False

    def choice(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class AnthropicThinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="The most tokens of a thought.")
    display: str = Field("", max_length=40, description="Accepted; thoughts are always shown.")

    def think(self) -> bool | int | None:
        if self.type == "enabled":
            return True if self.budget_tokens is None else self.budget_tokens
        return False if self.type == "disabled" else None


class AnthropicFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class AnthropicOutput(RequestModel):
    format: AnthropicFormat | None = None


class AnthropicMetadata(RequestModel):
    user_id: JsonValue = Field(None, description="Accepted, but neither used nor passed on.")


class AnthropicPrompt(ReplyRequest):
    """The parameters of the model's prompt."""

    messages: list[AnthropicTurn] = Field(min_length=1, max_length=4096)
    system: Texts = Field("", description="The system prompt, whole or in blocks of text.")
    tools: list[AnthropicTool] = Field([], max_length=MAX_ITEMS)
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = Field(None, description="If it is left out, as the server was started.")

    _types: ClassVar[Types] = {"tools": ("custom",), "system": _TEXTS}

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> Self:
        if self.messages[-1].role == "assistant":
            raise invalid_request(
                "The last message is the assistant's, and replies cannot be begun for it. Let the last one be the"
                " user's.", "messages",
            )  # fmt: skip
        return self

    def chat(self, **more: Any) -> ChatRequest:
        """Return the request as one for a chat completion, with `more` of its parameters."""
        system = self.system if isinstance(self.system, str) else "\n".join(block.text for block in self.system)
        turns = [message for turn in self.messages for message in turn.messages()]
        choice = self.tool_choice
        return chat_request(
            model=self.model,
            require_verified=self.require_verified,
            messages=[*([{"role": "system", "content": system}] if system else []), *turns],
            tools=[tool.function() for tool in self.tools],
            tool_choice=None if choice is None else choice.choice(),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            think=None if self.thinking is None else self.thinking.think(),
            **more,
        )


class AnthropicRequest(AnthropicPrompt):
    max_tokens: MostTokens = Field(description="The longest reply, with its thought.")
    stream: bool = False
    temperature: Temperature | None = Field(None, description="0 is greedy; null: as the model wants.")
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Stops = None
    metadata: AnthropicMetadata | None = None
    output_config: AnthropicOutput | None = Field(None, description="format: the reply is JSON, valid by its schema.")
    output_format: AnthropicFormat | None = Field(None, description="The former place of output_config.format.")

    def completion(self) -> ChatRequest:
        """Return the request as one for a chat completion."""
        form = self.output_format if self.output_config is None else self.output_config.format
        schema = None if form is None else {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        return self.chat(
            max_tokens=self.max_tokens, stream=self.stream, temperature=self.temperature, top_p=self.top_p,
            top_k=self.top_k, stop=self.stop_sequences, response_format=schema,
        )  # fmt: skip


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: dict[Literal["type", "message"], str]


_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def _error(info: ErrorInfo) -> Json:
    kind = _TYPES.get(info.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": info.message}}


class AnthropicResponseBuilder(BlockResponseBuilder):
    """Builds a message, whole or as events."""

    def __init__(self, model: str, _piece: Callable[[int], bytes]) -> None:
        super().__init__()
        self._id, self._model = f"msg_{secrets.token_hex(12)}", model
        self._index = -1  # index of the block being written
        self._prompt_tokens = 0

    def opening(self, prompt_tokens: int) -> list[bytes]:
        self._prompt_tokens = prompt_tokens
        return named_events({"type": "message_start", "message": self._reply([], (None, None), 0)})

    def begin_block(self, channel: Channel) -> list[bytes]:
        if channel is Channel.THINKING:
            return self._start({"type": "thinking", "thinking": "", "signature": ""})
        return self._start({"type": "text", "text": ""})

    def block_text(self, channel: Channel, text: str) -> list[bytes]:
        if channel is Channel.THINKING:
            return self._delta({"type": "thinking_delta", "thinking": text})
        return self._delta({"type": "text_delta", "text": text})

    def end_block(self, channel: Channel, text: str) -> list[bytes]:  # noqa: ARG002
        signed = self._delta({"type": "signature_delta", "signature": ""}) if channel is Channel.THINKING else []
        return [*signed, *named_events({"type": "content_block_stop", "index": self._index})]

    def call_block(self, call: ToolCall) -> list[bytes]:
        return [
            *self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}),
            *self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            *named_events({"type": "content_block_stop", "index": self._index}),
        ]

    def end(self, summary: Summary, called: bool) -> list[bytes]:
        reason, sequence = _stop_reason(summary, called)
        event = {
            "type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._usage(summary.tokens), "edgellm": {"summary": summary_of(summary)},
        }  # fmt: skip
        return named_events(event, {"type": "message_stop"})

    def failure(self, info: ErrorInfo) -> list[bytes]:
        return named_events(_error(info))

    def whole(self, written: Sequence[WrittenReply]) -> Json:
        (one,) = written
        self._prompt_tokens = one.summary.prompt_tokens
        content: list[Json] = []
        if one.thought:
            content.append({"type": "thinking", "thinking": one.thought, "signature": ""})
        if one.text.strip():
            content.append({"type": "text", "text": one.text, "citations": None})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.values()} for call in one.calls
        ]
        reply = self._reply(content, _stop_reason(one.summary, bool(one.calls)), one.summary.tokens)
        return {**reply, "edgellm": {"summary": summary_of(one.summary)}}

    def _reply(self, content: Sequence[Json], stop: tuple[StopReason | None, str | None], tokens: int) -> Json:
        reason, sequence = stop
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "stop_reason": reason, "stop_sequence": sequence, "usage": self._usage(tokens),
        }  # fmt: skip

    def _usage(self, tokens: int) -> Json:
        return {
            "input_tokens": self._prompt_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": tokens,
        }  # fmt: skip

    def _start(self, block: dict[str, Any]) -> list[bytes]:
        self._index += 1
        return named_events({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> list[bytes]:
        return named_events({"type": "content_block_delta", "index": self._index, "delta": delta})


def _stop_reason(summary: Summary, called: bool) -> tuple[StopReason, str | None]:
    """Return the reason why a reply ended, and the stop sequence that ended it."""
    if summary.finish_reason == "length":
        return "max_tokens", None
    if summary.stopped_by:
        return "stop_sequence", summary.stopped_by
    return ("tool_use" if called else "end_turn"), None


def _add(app: FastAPI, handler: RequestHandler) -> None:
    errors = error_responses(model=AnthropicError)

    @app.post("/v1/messages", tags=["Anthropic"], summary="Reply to a conversation",
              response_class=Response, responses=reply_responses("text/event-stream") | errors)  # fmt: skip
    async def messages(body: AnthropicRequest, request: Request) -> Response:
        asked = await in_reader(body.completion)
        return await handler.reply(asked, request, AnthropicResponseBuilder, body.unknown(), _NAMES)

    @app.post("/v1/messages/count_tokens", tags=["Anthropic"], summary="The tokens of a conversation",
              response_model=dict[str, int], responses=errors)  # fmt: skip
    async def count_tokens(body: AnthropicPrompt, request: Request) -> Response | dict[str, int]:
        count = await handler.count_tokens(await in_reader(body.chat), request, body.unknown())
        return count if isinstance(count, Response) else {"input_tokens": count}


DIALECT = Dialect(("/v1/messages",), _error, _add)
