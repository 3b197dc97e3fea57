"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, Request
from pydantic import Field, JsonValue
from starlette.responses import Response

from edgellm.engine import ToolCall
from edgellm.http.dialects import ABOUT, Dialect, chat_request
from edgellm.http.replies import RequestHandler
from edgellm.http.schemas import fields
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.errors import ApiError
from edgellm.http.schemas.fields import MAX_TOKENS, ReplyRequest, RequestModel, Schema, Types
from edgellm.http.schemas.requests import MEDIA, ChatRequest, ContentPart, FunctionSchema, Parts, ReplyFormat
from edgellm.http.schemas.responses import BlockWriter, Json, Pieces, WrittenReply, summary_of
from edgellm.spec.stats import Summary
from edgellm.spec.types import Channel

_TEXTS = ("text", *MEDIA)
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class AnthropicBlock(ContentPart):
    """A block of a message's content."""

    type: str = Field(max_length=100, description=f"One of {', '.join(_BLOCKS)}.")
    thinking: str = Field("", description="A thought, which most models do not get back.")
    id: str = ""
    name: str = ""
    input: JsonValue = Field({}, description="The arguments of a call: an object; other data is taken as well.")
    tool_use_id: str = ""
    content: str | Parts = Field("", description="The result of a call, whole or in blocks of text.")

    _types: ClassVar[Types] = {"content": _TEXTS}
    _accepted = ("signature", "data", "is_error")


class AnthropicTurn(RequestModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[AnthropicBlock]

    _types: ClassVar[Types] = {"content": (*_BLOCKS, *MEDIA)}

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the turn as messages of a chat completion: results of calls have messages of their own there."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        kinds = ("tool_use", "tool_result", "thinking", "redacted_thinking")
        calls, results, thoughts, _ = ([one for one in self.content if one.type == kind] for kind in kinds)
        said = [one for one in self.content if one.type not in kinds]
        if self.role == "assistant":
            called = [{"id": one.id, "function": {"name": one.name, "arguments": one.input}} for one in calls]
            thought = "".join(one.thinking for one in thoughts)
            text = ContentPart.plain(said)
            yield {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": called}
            return
        for one in results:
            yield {"role": "tool", "tool_call_id": one.tool_use_id, "content": ContentPart.sent_on(one.content)}
        if said or not (results or self.role == "system"):
            yield {"role": self.role, "content": ContentPart.sent_on(said)}


class AnthropicTool(FunctionSchema):
    type: Literal["custom"] = Field("custom", description="Tools that a server runs are not there.")
    parameters: Schema = Field({}, alias="input_schema", description="The JSON schema of the arguments.")


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
    _accepted = ("display",)  # thoughts are always shown

    def think(self) -> bool | int | None:
        if self.type == "enabled":
            return True if self.budget_tokens is None else self.budget_tokens
        return False if self.type == "disabled" else None


class AnthropicOutput(RequestModel):
    format: ReplyFormat | None = None


class AnthropicPrompt(ReplyRequest):
    """The parameters of the model's prompt."""

    messages: list[AnthropicTurn] = Field(min_length=1)
    system: str | Parts = Field("", description="The system prompt, whole or in blocks of text.")
    tools: list[AnthropicTool] = Field([])
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = Field(None, description="If it is left out, as the server was started.")

    _types: ClassVar[Types] = {"tools": ("custom",), "system": _TEXTS}

    def chat(self, **more: Any) -> ChatRequest:
        """Return the request as one for a chat completion, with `more` of its parameters."""
        system = self.system if isinstance(self.system, str) else "\n".join(block.shown() for block in self.system)
        turns = [message for turn in self.messages for message in turn.messages()]
        choice = self.tool_choice
        return chat_request(
            model=self.model,
            require_verified=self.require_verified,
            messages=[*([{"role": "system", "content": system}] if system else []), *turns],
            tools=[{"function": one.model_dump(include={"name", "description", "parameters"})} for one in self.tools],
            tool_choice=None if choice is None else choice.choice(),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            think=None if self.thinking is None else self.thinking.think(),
            continue_final_message=self.messages[-1].role == "assistant",
            **more,
        )


class AnthropicRequest(AnthropicPrompt, fields.SamplingFields):
    max_tokens: fields.MostTokens = Field(description="The longest reply, with its thought.")
    stream: bool = False
    stop_sequences: fields.Stops = None
    output_config: AnthropicOutput | None = Field(None, description="format: the reply is JSON, valid by its schema.")
    output_format: ReplyFormat | None = Field(None, description="The former place of output_config.format.")
    _accepted = ("metadata",)

    def completion(self) -> ChatRequest:
        """Return the request as one for a chat completion."""
        form = self.output_format if self.output_config is None else self.output_config.format
        return self.chat(
            **self.sampling() | {"stop": self.stop_sequences or self.stop}, max_tokens=self.max_tokens,
            stream=self.stream, response_format=None if form is None else form.model_dump(by_alias=True),
        )  # fmt: skip


_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def _error(error: ApiError) -> Json:
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class AnthropicWriter(BlockWriter):
    """Writes a message, whole or as events."""

    names: ClassVar = {"think": "thinking"}

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._content: list[Json] = []

    def open(self, summary: Summary) -> Pieces:
        yield {"type": "message_start", "message": self._message(summary, 0, stop_reason=None, stop_sequence=None)}

    def begin_block(self, channel: Channel) -> Pieces:
        thinks = channel is Channel.THINKING
        yield self._of_block("start", content_block={"type": "thinking", "thinking": "", "signature": ""} if thinks else
                             {"type": "text", "text": ""})  # fmt: skip

    def block_text(self, channel: Channel, text: str) -> Json:
        name = "thinking" if channel is Channel.THINKING else "text"
        return self._of_block("delta", delta={"type": f"{name}_delta", name: text})

    def end_block(self, channel: Channel, text: str) -> Pieces:
        if channel is Channel.THINKING:
            yield self._of_block("delta", delta={"type": "signature_delta", "signature": ""})
            yield self._stop_block({"type": "thinking", "thinking": text, "signature": ""})
        else:
            yield self._stop_block({"type": "text", "text": text, "citations": None})

    def call_block(self, call: ToolCall) -> Pieces:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield self._of_block("start", content_block=block)
        yield self._of_block("delta", delta={"type": "input_json_delta", "partial_json": call.arguments})
        yield self._stop_block(block | {"input": call.values()})

    def end(self, summary: Summary) -> Pieces:
        yield {
            "type": "message_delta", "delta": self._stop(summary), "usage": _usage(summary, summary.tokens),
            "edgellm": {"summary": summary_of(summary)},
        }  # fmt: skip
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Json:
        return _error(error)

    def whole(self, written: Sequence[WrittenReply]) -> Json:
        (one,) = written
        list(self.stream(one))
        message = self._message(one.summary, one.summary.tokens, **self._stop(one.summary))
        return message | {"edgellm": {"summary": summary_of(one.summary)}}

    def _message(self, summary: Summary, tokens: int, **stop: str | None) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self.model, "content": [*self._content],
            **stop, "usage": _usage(summary, tokens),
        }  # fmt: skip

    def _of_block(self, what: str, **fields: Json) -> Json:
        return {"type": f"content_block_{what}", "index": len(self._content), **fields}

    def _stop_block(self, block: Json) -> Json:
        piece = self._of_block("stop")
        self._content.append(block)
        return piece

    def _stop(self, summary: Summary) -> dict[str, str | None]:
        """Return the reason why a reply ended, and the stop sequence that ended it."""
        if summary.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if summary.stopped_by:
            return {"stop_reason": "stop_sequence", "stop_sequence": summary.stopped_by}
        return {"stop_reason": "tool_use" if self.called else "end_turn", "stop_sequence": None}


def _usage(summary: Summary, tokens: int) -> Json:
    """Return the usage after `tokens` of a reply: the input tokens are those that were read."""
    cached = summary.cached_tokens
    return {
        "input_tokens": summary.prompt_tokens - cached, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached, "output_tokens": tokens,
    }  # fmt: skip


def _add(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/messages", tags=["Anthropic"], summary="Reply to a conversation",
              response_class=Response, response_description=ABOUT)  # fmt: skip
    async def messages(body: AnthropicRequest, request: Request) -> Response:
        asked = await in_reader(body.completion)
        return await handler.reply(asked, request, AnthropicWriter(body.model or ""), body.unknown())

    @app.post("/v1/messages/count_tokens", tags=["Anthropic"], summary="The tokens of a conversation",
              response_model=dict[str, int])  # fmt: skip
    async def count_tokens(body: AnthropicPrompt, request: Request) -> Response | dict[str, int]:
        count = await handler.count_tokens(await in_reader(body.chat), request, body.unknown())
        return count if isinstance(count, Response) else {"input_tokens": count}


DIALECT = Dialect(_add, "/v1/messages", _error)
