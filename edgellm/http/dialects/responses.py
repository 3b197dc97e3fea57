"""OpenAI's Responses API: `/v1/responses`, stateless, or continued from an earlier response that this server keeps."""

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from fastapi import FastAPI, Request
from pydantic import BeforeValidator, Field, JsonValue
from starlette.responses import Response

from edgellm.engine import ToolCall
from edgellm.http.dialects import ABOUT, Dialect, chat_request
from edgellm.http.middleware import MAX_BYTES
from edgellm.http.replies import RequestHandler
from edgellm.http.schemas import fields
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.errors import ApiError
from edgellm.http.schemas.fields import ReplyRequest, RequestModel, Types
from edgellm.http.schemas.requests import PARTS, ChatRequest, ContentPart, FunctionSchema, Parts, ReplyFormat
from edgellm.http.schemas.responses import BlockWriter, Json, Pieces, WrittenReply, summary_of
from edgellm.spec.stats import Summary
from edgellm.spec.types import Channel

Turn: TypeAlias = dict[str, Any]
"""A message of a chat completion."""
_PARTS = (*PARTS, "reasoning_text", "summary_text")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_ITEMS = ("message", "reasoning", "additional_tools", *_CALLS, *(f"{name}_output" for name in _CALLS))
_TOOLS = ("function", "custom", "namespace")
_TEXT_ARGUMENT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _flat(namespace: str, name: str) -> str:
    """Return the one name that a model knows a tool by."""
    return f"{namespace}__{name}" if namespace else name


class ResponsesTool(FunctionSchema):
    type: Literal["function", "custom", "namespace"]
    tools: "list[ResponsesTool]" = Field([], description="The tools of a namespace.")

    _types: ClassVar[Types] = {"tools": _TOOLS}

    def all(self, namespace: str = "") -> "Iterator[CallableTool]":
        """Yield the tool, or those of a namespace. A custom one takes a text, as the argument of a function."""
        if self.type == "namespace":
            for tool in self.tools:
                yield from tool.all(_flat(namespace, self.name))
            return
        function = self.model_dump(include={"description", "parameters", "strict"}, exclude_unset=True)
        if custom := self.type == "custom":
            function["parameters"] = _TEXT_ARGUMENT
        yield CallableTool(namespace, self.name, custom, {"name": _flat(namespace, self.name), **function})


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool of a namespace that a model may call by its `function`."""

    namespace: str
    name: str
    custom: bool
    function: Json

    def item(self, call: ToolCall) -> dict[str, Any]:
        """Return the item of a call in the output."""
        kind, prefix = ("custom_tool_call", "ctc") if self.custom else ("function_call", "fc")
        text = str(call.values().get("input", call.arguments)) if self.custom else call.arguments
        return {
            "id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "completed", "call_id": call.id,
            "name": self.name, **({"namespace": self.namespace} if self.namespace else {}),
            "input" if self.custom else "arguments": text,
        }  # fmt: skip


def _text_of_data(output: Any) -> Any:
    """Return data other than texts and parts, which some tools return, as a text."""
    return json.dumps(output, ensure_ascii=False) if isinstance(output, dict) else output


class ResponsesItem(RequestModel):
    """An item of the input, as clients write it or as it came in an output."""

    type: str = Field("message", max_length=100, description=f"One of {', '.join(_ITEMS)}.")
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | Parts = ""
    id: str = ""
    call_id: str = ""
    namespace: str = ""
    name: str = ""
    arguments: JsonValue = Field("{}", description="A JSON object, as text; any other text or data is taken as well.")
    input: str = Field("", description="The text of a call of a custom tool.")
    action: JsonValue = Field(None, description="The arguments of a call of the local shell.")
    output: Annotated[str | Parts, BeforeValidator(_text_of_data)] = Field("", description="The result of a call.")
    summary: Parts = Field([])
    tools: list[ResponsesTool] = Field([], description="Tools besides those of the request.")

    _types: ClassVar[Types] = {"content": _PARTS, "output": _PARTS, "summary": _PARTS, "tools": _TOOLS}
    _accepted = ("status", "encrypted_content")  # a thought that cannot be read is left out

    def add_to(self, turns: list[Turn]) -> None:
        """Add the item to `turns`: thoughts, texts and calls that follow each other are one turn."""
        if self.type == "additional_tools":
            return
        if self.type.endswith("_output"):
            content = ContentPart.sent_on(self.output)
            turns.append({"role": "tool", "tool_call_id": self.call_id or self.id, "content": content})
            return
        if self.type == "message" and self.role != "assistant":
            turns.append({"role": self.role, "content": ContentPart.sent_on(self.content)})
            return
        last = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
        if last is None or (self.type not in _CALLS and (last["content"] or last["tool_calls"])):
            last = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
            turns.append(last)
        if self.type == "reasoning":
            last["reasoning_content"] += ContentPart.plain(self.content) or ContentPart.plain(self.summary)
        elif self.type == "message":
            last["content"] += ContentPart.plain(self.content)
        else:
            last["tool_calls"].append({"id": self.call_id or self.id, "function": self._called()})

    def _called(self) -> Json:
        if self.type == "local_shell_call":
            return {"name": "local_shell", "arguments": self.action}
        given = {"input": self.input} if self.type == "custom_tool_call" else self.arguments
        return {"name": _flat(self.namespace, self.name), "arguments": given}


class ResponsesToolChoice(RequestModel):
    type: Literal["function", "custom"]
    name: str = Field(max_length=200)


class ResponsesText(RequestModel):
    format: ReplyFormat | None = None


class ResponsesReasoning(RequestModel):
    effort: str | None = Field(None, max_length=40, description="Level of thinking; none: no thought.")


class ResponsesRequest(ReplyRequest, fields.SamplingFields):
    input: str | list[ResponsesItem]
    instructions: str = Field("", description="The system prompt; not kept for later requests.")
    previous_response_id: str | None = Field(None, max_length=200, description="Continue that conversation.")
    store: bool = Field(True, description="Keep the conversation in this process, to be continued.")
    stream: bool = False
    max_output_tokens: fields.MostTokens | None = Field(None, description="The longest reply, with its thought.")
    tools: list[ResponsesTool] = Field([])
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: dict[str, str] = Field({}, description="Sent back.")
    prompt: None = Field(None, description="Not supported: send the text itself.")

    _types: ClassVar[Types] = {"input": _ITEMS, "tools": _TOOLS, "tool_choice": ("function", "custom")}
    _accepted = ("user",)

    def turns(self) -> list[Turn]:
        """Return the input as messages of a chat completion."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        turns: list[Turn] = []
        for item in self.input:
            item.add_to(turns)
        return turns

    def callable(self) -> dict[str, CallableTool]:
        """Return the tools, also those that items of the input bring, by the names that the model knows them by."""
        items = () if isinstance(self.input, str) else self.input
        given = [*self.tools, *(tool for item in items for tool in item.tools)]
        return {one.function["name"]: one for tool in given for one in tool.all()}

    def chat(self, turns: Sequence[Turn]) -> ChatRequest:
        """Return the request for a chat completion of the conversation `turns`."""
        form = None if self.text is None else self.text.format
        choice: JsonValue = self.tool_choice if isinstance(self.tool_choice, str) else None
        if isinstance(self.tool_choice, ResponsesToolChoice):
            choice = {"type": "function", "function": {"name": self.tool_choice.name}}
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = [{"type": "function", "function": one.function} for one in self.callable().values()]
        messages = [*system, *turns] or [{"role": "user", "content": ""}]  # refused as an empty prompt
        return chat_request(
            model=self.model, require_verified=self.require_verified, messages=messages, stream=self.stream,
            max_tokens=self.max_output_tokens, tools=tools,
            tool_choice=choice, reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if form is None else form.model_dump(by_alias=True),
            truncation=self.truncation, **self.sampling(),
        )  # fmt: skip


class ConversationStore:
    """The conversations of past responses, in memory, for the event loop; the least recently used are forgotten
    first."""

    def __init__(self, most_characters: int = MAX_BYTES) -> None:
        self._most_characters = most_characters
        self._kept: OrderedDict[str, tuple[list[Turn], int]] = OrderedDict()
        self._characters = 0

    def turns(self, response: str | None) -> list[Turn]:
        """Return the conversation up to a response, none for None. Raises ApiError (400) where it is not kept."""
        if response is None:
            return []
        if response not in self._kept:
            message = f"The response {response!r} is not kept here. Send the conversation itself, in input."
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        self._kept.move_to_end(response)
        return list(self._kept[response][0])

    def keep(self, response: str, turns: list[Turn]) -> None:
        """Keep a conversation, which ends with the response of that id."""
        size = sum(len(str(turn)) for turn in turns)
        self._kept[response] = (turns, size)
        self._characters += size
        while self._characters > self._most_characters:
            _, (_, freed) = self._kept.popitem(last=False)
            self._characters -= freed


class ResponsesWriter(BlockWriter):
    """Writes a response, whole or as events."""

    names: ClassVar = {"reasoning_effort": "reasoning.effort"}

    def __init__(self, request: ResponsesRequest, keep: Callable[[str, Turn], None]) -> None:
        """`keep` is called with the response's id and its message once it is written."""
        super().__init__(request.model or "")
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self._request, self._keep = request, keep
        self._number = 0  # the next event's number
        self._output: list[Json] = []
        self._texts = dict.fromkeys(Channel, "")
        self._calls: list[Json] = []
        self._tools = request.callable()
        self._item: dict[str, Any] = {}  # the item that is being written

    def open(self, summary: Summary) -> Pieces:  # noqa: ARG002
        reply = self._reply("in_progress")
        yield self._event("created", response=reply)
        yield self._event("in_progress", response=reply)

    def begin_block(self, channel: Channel) -> Pieces:
        self._item = _text_item(channel)
        yield self._event("output_item.added", output_index=len(self._output), item=self._item)
        yield self._part_event("content_part.added", part=_text_part(channel, ""))

    def block_text(self, channel: Channel, text: str) -> Json:
        return self._part_event(f"{_KINDS[channel][2]}.delta", delta=text, **_logprobs(channel))

    def end_block(self, channel: Channel, text: str) -> Pieces:
        part = _text_part(channel, text)
        item = self._item | {"status": "incomplete" if self.cut else "completed", "content": [part]}
        yield self._part_event(f"{_KINDS[channel][2]}.done", text=text, **_logprobs(channel))
        yield self._part_event("content_part.done", part=part)
        yield self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._texts[channel] += text

    def call_block(self, call: ToolCall) -> Pieces:
        tool = self._tools.get(call.name) or CallableTool("", call.name, False, {})
        item, index, name = tool.item(call), len(self._output), "input" if tool.custom else "arguments"
        part = "custom_tool_call_input" if tool.custom else "function_call_arguments"
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        yield self._event("output_item.added", output_index=index, item={**item, "status": "in_progress", name: ""})
        yield self._event(f"{part}.delta", delta=item[name], **where)
        yield self._event(f"{part}.done", **{name: item[name]}, name=item["name"], **where)
        yield self._event("output_item.done", output_index=index, item=item)
        self._output.append(item)
        self._calls.append({"id": call.id, "function": {"name": call.name, "arguments": call.arguments}})

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
        texts = {"content": self._texts[Channel.ANSWER], "reasoning_content": self._texts[Channel.THINKING]}
        self._keep(self._id, {"role": "assistant", **texts, "tool_calls": self._calls})
        cut = {"reason": "max_output_tokens"} if summary.finish_reason == "length" else None
        reply = self._reply("completed" if cut is None else "incomplete", incomplete_details=cut, usage={
            "input_tokens": summary.prompt_tokens, "input_tokens_details": {"cached_tokens": summary.cached_tokens},
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
        return self._event(name, item_id=self._item["id"], output_index=len(self._output), content_index=0, **fields)


_KINDS = {Channel.THINKING: ("reasoning", "rs", "reasoning_text"), Channel.ANSWER: ("message", "msg", "output_text")}
"""For each channel the type of its items, the prefix of their ids, and the type of their parts."""


def _logprobs(channel: Channel) -> dict[str, Any]:
    return {} if channel is Channel.THINKING else {"logprobs": []}


def _text_part(channel: Channel, text: str) -> Json:
    more: dict[str, Any] = {} if channel is Channel.THINKING else {"annotations": []}
    return {"type": _KINDS[channel][2], "text": text, **more, **_logprobs(channel)}


def _text_item(channel: Channel) -> dict[str, Any]:
    """Return the item of a thought or an answer that begins."""
    kind, prefix, _ = _KINDS[channel]
    more: dict[str, Any] = {"summary": []} if channel is Channel.THINKING else {"role": "assistant"}
    return {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", "content": [], **more}


def _add(app: FastAPI, handler: RequestHandler) -> None:
    store = ConversationStore()

    @app.post("/v1/responses", tags=["OpenAI"], summary="Reply to a conversation, perhaps a kept one",
              response_class=Response, response_description=ABOUT)  # fmt: skip
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        turns = [*store.turns(body.previous_response_id), *await in_reader(body.turns)]

        def keep(response: str, message: Turn) -> None:
            if body.store:
                store.keep(response, [*turns, message])

        asked = await in_reader(body.chat, turns)
        return await handler.reply(asked, request, ResponsesWriter(body, keep), body.unknown())


DIALECT = Dialect(_add)
