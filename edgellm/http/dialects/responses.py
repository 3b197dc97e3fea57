"""OpenAI's Responses API: `/v1/responses`, stateless, or continued from an earlier response that this server keeps."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from fastapi import FastAPI, Request
from pydantic import Field, JsonValue
from starlette.responses import Response

from edgellm.engine import ToolCall
from edgellm.http.dialects import Dialect, chat_request, replies
from edgellm.http.replies import RequestHandler
from edgellm.http.schemas import fields
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.errors import ApiError, error_responses, invalid_request
from edgellm.http.schemas.fields import MAX_ITEMS, ReplyRequest, RequestModel, Text, Types
from edgellm.http.schemas.requests import (
    MEDIA,
    ChatRequest,
    ContentPart,
    FunctionSchema,
    NamedSchema,
)
from edgellm.http.schemas.responses import BlockWriter, Json, Pieces, WrittenReply, summary_of
from edgellm.spec.stats import Summary
from edgellm.spec.types import Channel

Turn: TypeAlias = dict[str, Any]
"""A message of a chat completion."""
_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_READ = (*_PARTS, *MEDIA)
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_NAMES = {"reasoning_effort": "reasoning.effort"}
_MOST_KEPT = 256  # responses that can be continued
_MOST_CHARACTERS = 2**24  # characters of all kept conversations


class ResponsesPart(ContentPart):
    annotations: list[JsonValue] = Field([], description="Accepted as they came.")
    logprobs: list[JsonValue] = Field([], description="Accepted as they came.")

    _param: ClassVar[str] = "input"


Parts = Text | Annotated[list[ResponsesPart], Field(max_length=1000)]


class ResponsesItem(RequestModel):
    """An item of the input, as clients write it or as it came in an output."""

    type: str = Field("message", max_length=100, description=f"One of {', '.join(_ITEMS)}.")
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Parts = ""
    id: Text = ""
    status: str = Field("", max_length=40)
    call_id: Text = ""
    name: Text = ""
    arguments: JsonValue = Field("{}", description="A JSON object, as text; any other text or data is taken as well.")
    output: Parts = Field("", description="The result of a call.")
    summary: list[ResponsesPart] = Field([], max_length=1000)

    _types: ClassVar[Types] = {"content": _READ, "output": _READ, "summary": _READ}


class ResponsesTool(FunctionSchema):
    type: Literal["function"]


class ResponsesToolChoice(RequestModel):
    type: Literal["function"]
    name: str = Field(max_length=200)


class ResponsesFormat(NamedSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class ResponsesText(RequestModel):
    format: ResponsesFormat | None = None


class ResponsesReasoning(RequestModel):
    effort: str | None = Field(None, max_length=40, description="Level of thinking; none: no thought.")


class ResponsesRequest(ReplyRequest, fields.SamplingFields):
    input: Text | Annotated[list[ResponsesItem], Field(max_length=4096)]
    instructions: Text = Field("", description="The system prompt; not kept for later requests.")
    previous_response_id: str | None = Field(None, max_length=200, description="Continue that conversation.")
    store: bool = Field(True, description="Keep the conversation in this process, to be continued.")
    stream: bool = False
    max_output_tokens: fields.MostTokens | None = Field(None, description="The longest reply, with its thought.")
    tools: list[ResponsesTool] = Field([], max_length=MAX_ITEMS)
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: dict[str, str] = Field({}, max_length=64, description="Sent back.")
    user: fields.Unused = None
    background: Literal[False] = False
    conversation: None = Field(None, description="Not supported: use previous_response_id.")
    prompt: None = Field(None, description="Not supported: send the text itself.")

    _types: ClassVar[Types] = {"input": _ITEMS, "tools": ("function",), "tool_choice": ("function",)}

    def turns(self) -> list[Turn]:
        """Return the input as messages of a chat completion."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        turns: list[Turn] = []
        for item in self.input:
            _add_item(turns, item)
        return turns

    def chat(self, turns: Sequence[Turn]) -> ChatRequest:
        """Return the request for a chat completion of the conversation `turns`."""
        effort = None if self.reasoning is None else self.reasoning.effort
        choice: JsonValue = self.tool_choice if isinstance(self.tool_choice, str) else None
        if isinstance(self.tool_choice, ResponsesToolChoice):
            choice = {"type": "function", "function": {"name": self.tool_choice.name}}
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
            for tool in self.tools
        ]
        return chat_request(
            model=self.model, require_verified=self.require_verified, messages=[*system, *turns], stream=self.stream,
            max_tokens=self.max_output_tokens, tools=tools, tool_choice=choice, reasoning_effort=effort,
            parallel_tool_calls=self.parallel_tool_calls, response_format=self._response_format(),
            truncation=self.truncation, **self.sampling(),
        )  # fmt: skip

    def _response_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if "schema_" not in form.model_fields_set:
            raise invalid_request("text.format has no schema. Give it.", "text.format.schema")
        return {"type": "json_schema", "json_schema": {"schema": form.schema_}}


def _add_item(turns: list[Turn], item: ResponsesItem) -> None:
    """Add an item of the input to `turns`: thoughts, texts and calls that follow each other are one turn."""
    if item.type == "function_call_output":
        turns.append({"role": "tool", "tool_call_id": item.call_id, "content": ContentPart.plain(item.output)})
        return
    if item.type == "message" and item.role != "assistant":
        turns.append({"role": item.role, "content": ContentPart.plain(item.content)})
        return
    last = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    if last is None or (item.type != "function_call" and (last["content"] or last["tool_calls"])):
        last = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
        turns.append(last)
    if item.type == "reasoning":
        last["reasoning_content"] += ContentPart.plain(item.content) or ContentPart.plain(item.summary)
    elif item.type == "message":
        last["content"] += ContentPart.plain(item.content)
    else:
        last["tool_calls"].append({"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}})


class ConversationStore:
    """The conversations of past responses, in memory; the least recently used are forgotten first."""

    def __init__(self, most: int = _MOST_KEPT, most_characters: int = _MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._kept: OrderedDict[str, tuple[list[Turn], int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def turns(self, response: str | None) -> list[Turn]:
        """Return the conversation up to a response, none for None. Raises ApiError (400) where it is not kept."""
        if response is None:
            return []
        with self._lock:
            if response not in self._kept:
                message = f"The response {response!r} is not kept here. Send the conversation itself, in input."
                raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
            self._kept.move_to_end(response)
            return list(self._kept[response][0])

    def keep(self, response: str, turns: list[Turn]) -> None:
        """Keep a conversation, which ends with the response of that id."""
        size = sum(len(str(turn)) for turn in turns)
        with self._lock:
            self._kept[response] = (turns, size)
            self._characters += size
            while len(self._kept) > self._most or (self._characters > self._most_characters and self._kept):
                _, (_, freed) = self._kept.popitem(last=False)
                self._characters -= freed


class ResponsesWriter(BlockWriter):
    """Writes a response, whole or as events."""

    def __init__(self, request: ResponsesRequest, keep: Callable[[str, Turn], None]) -> None:
        """`keep` is called with the response's id and its message once it is written."""
        super().__init__(request.model or "")
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._request, self._keep = request, keep
        self._number = 0  # the next event's number
        self._output: list[Json] = []
        self._item = ""  # the id of the item being written

    def open(self, prompt_tokens: int) -> Pieces:  # noqa: ARG002
        reply = self._reply("in_progress")
        yield self._event("created", response=reply)
        yield self._event("in_progress", response=reply)

    def begin_block(self, channel: Channel) -> Pieces:
        item = _text_item(channel, None)
        self._item = item["id"]
        yield self._event("output_item.added", output_index=len(self._output), item=item)
        yield self._part_event("content_part.added", part=_text_part(channel, ""))

    def block_text(self, channel: Channel, text: str) -> Json:
        return self._part_event(f"{_KINDS[channel][2]}.delta", delta=text, **_logprobs(channel))

    def end_block(self, channel: Channel, text: str) -> Pieces:
        item = _text_item(channel, text, self._item)
        yield self._part_event(f"{_KINDS[channel][2]}.done", text=text, **_logprobs(channel))
        yield self._part_event("content_part.done", part=_text_part(channel, text))
        yield self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def call_block(self, call: ToolCall) -> Pieces:
        item, index = _call_item(call), len(self._output)
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("output_item.added", output_index=index, item=begun)
        yield self._event("function_call_arguments.delta", delta=call.arguments, **where)
        yield self._event("function_call_arguments.done", arguments=call.arguments, name=call.name, **where)
        yield self._event("output_item.done", output_index=index, item=item)
        self._output.append(item)

    def end(self, summary: Summary) -> Pieces:
        reply = self._ended(summary)
        yield self._event(reply["status"], response=reply)

    def failure(self, error: ApiError) -> Json:
        told = {"code": error.code or "server_error", "message": error.message}
        return self._event("failed", response=self._reply("failed", error=told))

    def whole(self, written: Sequence[WrittenReply]) -> Json:
        (one,) = written
        *_, end = self.stream(one)
        reply: Json = end["response"]
        return reply

    def _ended(self, summary: Summary) -> Json:
        """Return the whole response, and keep it for later requests."""
        texts = {"message": "", "reasoning": ""}
        for item in self._output:
            texts[item["type"]] = texts.get(item["type"], "") + "".join(
                part["text"] for part in item.get("content", ())
            )
        calls = [
            {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
            for item in self._output
            if item["type"] == "function_call"
        ]
        text, thought = texts["message"], texts["reasoning"]
        self._keep(self._id, {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": calls})
        cut = {"reason": "max_output_tokens"} if summary.finish_reason == "length" else None
        reply = self._reply("completed" if cut is None else "incomplete", incomplete_details=cut, usage={
            "input_tokens": summary.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": summary.tokens, "output_tokens_details": {"reasoning_tokens": summary.thinking_tokens},
            "total_tokens": summary.prompt_tokens + summary.tokens,
        })  # fmt: skip
        return {**reply, "edgellm": {"summary": summary_of(summary)}}

    def _reply(self, status: str, **fields: Any) -> Json:
        asked = self._request
        form = None if asked.text is None else asked.text.format
        shown: dict[str, Any] = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)
        effort = None if asked.reasoning is None else asked.reasoning.effort
        choice = asked.tool_choice
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": None, "instructions": asked.instructions or None,
            "max_output_tokens": asked.max_output_tokens, "metadata": asked.metadata, "model": self.model,
            "output": list(self._output), "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id, "reasoning": {"effort": effort, "summary": None},
            "store": asked.store, "temperature": asked.temperature, "text": {"format": shown},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump(exclude_unset=True) for tool in asked.tools], "top_p": asked.top_p,
            "truncation": asked.truncation, "usage": None, **fields,
        }  # fmt: skip

    def _event(self, name: str, /, **fields: Any) -> Json:
        self._number += 1
        return {"type": f"response.{name}", "sequence_number": self._number - 1, **fields}

    def _part_event(self, name: str, /, **fields: Any) -> Json:
        return self._event(name, item_id=self._item, output_index=len(self._output), content_index=0, **fields)


_KINDS = {Channel.THINKING: ("reasoning", "rs", "reasoning_text"), Channel.ANSWER: ("message", "msg", "output_text")}
"""For each channel the type of its items, the prefix of their ids, and the type of their parts."""


def _logprobs(channel: Channel) -> dict[str, Any]:
    return {} if channel is Channel.THINKING else {"logprobs": []}


def _text_part(channel: Channel, text: str) -> Json:
    more: dict[str, Any] = {} if channel is Channel.THINKING else {"annotations": []}
    return {"type": _KINDS[channel][2], "text": text, **more, **_logprobs(channel)}


def _text_item(channel: Channel, text: str | None, name: str = "") -> Json:
    """Return the item of a thought or an answer, with the id `name`; `text` is None while it is being written."""
    kind, prefix, _ = _KINDS[channel]
    return {
        "id": name or f"{prefix}_{secrets.token_hex(12)}", "type": kind,
        "status": "in_progress" if text is None else "completed",
        "content": [] if text is None else [_text_part(channel, text)],
        **({"summary": []} if channel is Channel.THINKING else {"role": "assistant"}),
    }  # fmt: skip


def _call_item(call: ToolCall) -> Json:
    return {
        "id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed", "call_id": call.id,
        "name": call.name, "arguments": call.arguments,
    }  # fmt: skip


def _add(app: FastAPI, handler: RequestHandler) -> None:
    store = ConversationStore()

    @app.post("/v1/responses", tags=["OpenAI"], summary="Reply to a conversation, perhaps a kept one",
              response_class=Response, responses=replies() | error_responses())  # fmt: skip
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        turns = [*store.turns(body.previous_response_id), *await in_reader(body.turns)]

        def keep(response: str, message: Turn) -> None:
            if body.store:
                store.keep(response, [*turns, message])

        asked = await in_reader(body.chat, turns)
        return await handler.reply(asked, request, ResponsesWriter(body, keep), body.unknown(), _NAMES)


DIALECT = Dialect(_add)
