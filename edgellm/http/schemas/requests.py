"""Requests: OpenAI's parameters that have an effect here, and a few of our own."""

import json
import reprlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from edgellm.engine import Message, ToolCall
from edgellm.engine.grammar.json_schema import unkept, without_descriptions
from edgellm.errors import InvalidOption
from edgellm.http.schemas import fields
from edgellm.http.schemas.body import json_text
from edgellm.http.schemas.errors import invalid_request
from edgellm.http.schemas.fields import MAX_TOKENS, ReplyRequest, RequestModel, Schema, Types
from edgellm.llm import LLM
from edgellm.spec.params import ANY_TOOL, GATES, MAX_BIAS, MAX_LOGPROBS, ReplyOptions
from edgellm.spec.stream import Reply

MAX_CHOICES = 16


class UnloadRequest(RequestModel):
    model: str = Field(max_length=500, description="The name from /v1/models.")


class PhoneIn(RequestModel):
    """A phone that asks for a key, by the code on the computer's screen."""

    code: str = Field(max_length=20)
    name: str = Field("", max_length=200)


class StreamOptions(RequestModel):
    include_usage: bool = Field(False, description="Send the usage in a last chunk, which has no choices.")


class NamedSchema(RequestModel):
    schema_: Schema = Field({}, alias="schema", description="The schema is always kept.")
    _accepted = ("name", "description", "strict")


class ReplyFormat(RequestModel):
    """The form of a reply in other APIs, which OpenAI's chat completions take as llama.cpp does."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Schema | None = Field(None, alias="schema")
    _accepted = ("name", "description", "strict")


class ResponseFormat(ReplyFormat):
    json_schema: NamedSchema | None = None


class GenerationRequest(ReplyRequest, fields.SamplingFields):
    """The parameters that chat completions and completions share."""

    stream: bool = Field(False, description="Send server-sent events, with [DONE] at the end.")
    stream_options: StreamOptions | None = None
    frequency_penalty: fields.Penalty = Field(0.0, description="Subtracted for each time in the reply.")
    presence_penalty: fields.Penalty = Field(0.0, description="Subtracted for tokens that the reply has.")
    logit_bias: dict[
        Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
    ] = Field({}, description="Amounts added to the logits of tokens, by their ids.")
    n: fields.Whole = Field(1, ge=1, le=MAX_CHOICES, description="How many replies to write, one after the other.")
    response_format: ResponseFormat | None = Field(None, description="json_object or json_schema: valid JSON.")
    return_progress: bool = Field(False, description="As in llama.cpp: prompt_progress while a prompt is read.")
    keep_alive: fields.KeepAlive = None
    budget: float | None = Field(None, ge=0.0, le=1.0, description="Our extension: share of drafted chunks to verify.")
    gate: str = Field("auto", max_length=20, description=f"Our extension, chooses the chunks: {', '.join(GATES)}.")
    retrieval: str = Field("auto", max_length=200, description="Our extension: auto, off, or sources of copied drafts.")
    _accepted = ("user", "add_generation_prompt")

    @model_validator(mode="before")
    @classmethod
    def _one_schema(cls, data: Any) -> Any:
        """Take other servers' names of a JSON schema for `response_format`."""
        if not isinstance(data, dict):
            return data
        named = {name: data[name] for name in ("json_schema", "guided_json") if data.get(name)}
        outputs = data.get("structured_outputs")
        given = {name: value for name, value in outputs.items() if value} if isinstance(outputs, dict) else {}
        if given:
            if given.keys() not in ({"json"}, {"json_object"}):
                raise invalid_request(
                    f"structured_outputs has {reprlib.repr(sorted(given))}, and only json and json_object are supported"
                    " here. Leave the others out.", "structured_outputs",
                )  # fmt: skip
            named["structured_outputs"] = given.get("json", {"type": "object"})
        if not named:
            return {**data, "structured_outputs": None} if isinstance(outputs, dict) else data
        name, schema = next(iter(named.items()))
        if len(named) > 1 or data.get("response_format"):
            raise invalid_request("There are several schemas of the reply. Give response_format alone.", name)
        form = {"type": "json_schema", "schema": _parsed(schema, name)}
        return {key: value for key, value in data.items() if key != name} | {"response_format": form}

    def reply_schema(self) -> str | None:
        """Return the JSON schema of the reply; None where any text will do."""
        if (form := self.response_format) is None:
            return None
        schema = form.schema_ if form.json_schema is None else form.json_schema.schema_
        if schema is None and form.type == "text":
            return None
        if schema is None and form.type == "json_schema":
            raise invalid_request("The form json_schema has no schema. Give it.", "response_format")
        return json.dumps({"type": "object"} if schema is None else without_descriptions(schema))

    def unkept(self) -> list[str]:
        """Return the keywords of the schema that the reply may break. Raises InvalidOption for an invalid schema."""
        return [] if (schema := self.reply_schema()) is None else unkept(schema)

    @abstractmethod
    def options(self, defaults: ReplyOptions, context_length: int) -> ReplyOptions:
        """Return `defaults`, changed by this request's parameters. Raises ApiError where they contradict each other."""

    def _options(self, defaults: ReplyOptions, context_length: int, most: int | None, **more: Any) -> ReplyOptions:
        """Return `defaults`, changed by the parameters that have an option's name, `more` options and the longest
        reply."""
        if self.stream_options is not None and not self.stream:
            raise invalid_request(
                "stream_options is given, but stream is not true. Set stream to true, or leave stream_options out.",
                "stream_options",
            )
        given = {name: getattr(self, name) for name in type(self).model_fields if hasattr(defaults, name)} | {
            "seed": None if self.seed in (None, -1) else self.seed & (2**64 - 1),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "max_tokens": most or context_length, "max_total": most, "json_schema": self.reply_schema(),
            "logit_bias": {int(token): amount for token, amount in self.logit_bias.items()},
            "retrieval": self.retrieval if self.retrieval != "auto" else defaults.retrieval,
        }  # fmt: skip
        try:
            return replace(defaults, **given | more)
        except InvalidOption as error:
            name = error.what.partition(" ")[0]
            raise invalid_request(str(error), name if name in given else None) from None

    @abstractmethod
    def writes(self, pair: LLM) -> list[Callable[..., Reply]]:
        """Return for each prompt a function that takes the options and begins a reply of `pair`."""


def _parsed(schema: Any, name: str) -> Any:
    """Return a JSON schema, which some clients send as a text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(json_text(schema))
    except (ValueError, RecursionError):
        raise invalid_request(f"{name} is no JSON. Give a JSON schema.", name) from None


MEDIA = (
    "image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "file", "input_file", "document",
)  # fmt: skip
"""Types of parts that are no text. A picture in the last question is refused, and left out of the history: a reply that
does not know what is asked would be wrong, but a conversation need not end for one."""
PARTS = ("text", "input_text", "output_text", "refusal", *MEDIA)


class ContentPart(RequestModel):
    """A part of a message's content."""

    type: str = Field(max_length=100, description="A type of text; media in the last question are refused.")
    text: str = ""
    refusal: str = Field("", description="The text of a refusal.")
    source: JsonValue = Field(None, description="The source of a document, which is read if it is a plain text.")
    _accepted: ClassVar[Collection[str]] = ("annotations", "logprobs")  # in a response that is sent back

    @model_validator(mode="after")
    def _read_document(self) -> Self:
        if self.type == "document" and isinstance(self.source, dict) and self.source.get("type") == "text":
            self.type, self.text = "text", str(self.source.get("data", ""))
        return self

    def unknown(self, path: str = "") -> Iterator[str]:
        yield from (path + self.type,) if self.type in MEDIA else super().unknown(path)

    def shown(self) -> str:
        """Return the part as a text."""
        what = self.type.removeprefix("input_").removesuffix("_url")
        return f"[{what} left out]" if self.type in MEDIA else self.text or self.refusal

    @staticmethod
    def plain(parts: "str | Sequence[ContentPart]") -> str:
        """Return the text of a content, which is whole or in parts."""
        return parts if isinstance(parts, str) else "".join(part.shown() for part in parts)

    @staticmethod
    def sent_on(parts: "str | Sequence[ContentPart]") -> str | list[dict[str, Any]]:
        """Return a content as a chat completion has it."""
        return parts if isinstance(parts, str) else [
            {"type": part.type if part.type in MEDIA else "text", "text": part.shown()} for part in parts
        ]  # fmt: skip


Parts = list[ContentPart]
TOOL_NAME = r"^[\w.-]{1,128}$"


class CalledFunction(RequestModel):
    """A call in the history, as some model wrote it."""

    name: str = ""
    arguments: Annotated[JsonValue, AfterValidator(json_text)] = Field(
        "{}", description="A JSON object, as text; any other text or data is taken as well."
    )
    _accepted = ("index",)  # in Ollama's API


class CallOfMessage(RequestModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction = CalledFunction.model_validate({})
    _accepted = ("index",)  # in deltas of a stream

    def call(self) -> ToolCall:
        written = self.function.arguments
        text = written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
        return ToolCall(self.function.name, text, self.id)


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts = Field("", description="Text, whole or in parts; may be null in an assistant's turn.")
    reasoning_content: str = Field("", description="The thought before an assistant's content.")
    tool_calls: list[CallOfMessage] = Field([], description="An assistant's calls of functions.")
    tool_call_id: str = Field("", description="The call whose result is the content of a tool's turn.")
    name: str = Field("", description="The function's name, in a tool's turn.")
    context: list[str] = Field(
        [], max_length=100, description="Texts before a user's question, which truncation keeps. Our extension."
    )

    _types: ClassVar[Types] = {"content": PARTS, "tool_calls": ("function",)}

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.role not in ("assistant", "tool") and "content" not in self.model_fields_set:
            raise invalid_request(f"A message of the role {self.role} has no content. Give it a text.", "messages")
        return self

    def message(self) -> Message:
        text = ContentPart.plain(self.content)
        if self.role == "tool":
            return Message("tool", text, call_id=self.tool_call_id, name=self.name)
        if self.role != "assistant":
            context = tuple(self.context) if self.role == "user" else ()
            return Message("system" if self.role == "developer" else self.role, text, context=context)
        return Message("assistant", text, self.reasoning_content, tuple(call.call() for call in self.tool_calls))


class FunctionSchema(RequestModel):
    name: str = Field(pattern=TOOL_NAME)
    description: str = ""
    parameters: Schema = Field({}, description="The JSON schema of the arguments.")
    _accepted = ("strict",)  # arguments are not forced to fit the schema


class ToolSchema(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionSchema


class ChosenFunction(RequestModel):
    name: str = Field(pattern=TOOL_NAME)


class ToolChoice(RequestModel):
    type: Literal["function"] = "function"
    function: ChosenFunction


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: fields.MostTokens | None = Field(None, description="The longest reply; null and -1: what fits.")
    max_completion_tokens: fields.MostTokens | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool = Field(False, description="Report the log-probability of each token.")
    top_logprobs: fields.Whole | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Report those of this many other tokens, too; needs logprobs."
    )
    reasoning_effort: str | None = Field(None, max_length=40, description="Level of thinking; none: no thought.")
    chat_template_kwargs: Schema = Field({}, max_length=100, description="Arguments such as enable_thinking.")
    enable_thinking: bool | None = Field(None, description="The argument of that name in chat_template_kwargs.")
    tools: list[ToolSchema] = Field([], description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = Field(
        "auto", description="Whether functions are called: none; auto, if the model likes; required; or one by name."
    )
    parallel_tool_calls: bool = Field(True, description="false: only the first call of a reply is returned.")
    think: bool | Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(
        None, description="Our extension: switches thoughts on or off, or limits their tokens."
    )
    truncation: Literal["auto", "disabled"] = Field("disabled", description="auto: leave out the oldest turns.")
    continue_final_message: bool = Field(False, description="Continue the last turn, the assistant's, as vLLM does.")

    _types: ClassVar[Types] = {"tools": ("function",), "tool_choice": ("function",)}

    @model_validator(mode="after")
    def _can_be_continued(self) -> Self:
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls):
            raise invalid_request(
                "continue_final_message is true, but the last message is no text of the assistant. Let it be one, or"
                " leave continue_final_message out.", "continue_final_message",
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _last_question_is_text(self) -> Self:
        asked = next((one.content for one in reversed(self.messages) if one.role == "user"), "")
        for part in () if isinstance(asked, str) else asked:
            if part.type in MEDIA:
                raise invalid_request(
                    f"The question has a part of type {part.type!r}, and the models here read only text. Leave that"
                    " part out.", "messages",
                )  # fmt: skip
        return self

    def parameter(self, name: str) -> str:
        """Return the request's parameter for `name`, a parameter of the model's template or `think`."""
        return name if name in ("reasoning_effort", "think") else f"chat_template_kwargs.{name}"

    def options(self, defaults: ReplyOptions, context_length: int) -> ReplyOptions:
        think = defaults.think if self.think is None else self.think
        arguments: dict[str, object] = {**defaults.template_args}
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        if self.enable_thinking is not None:
            arguments["enable_thinking"] = self.enable_thinking
        return self._options(
            defaults, context_length, self._max_tokens(), logprobs=self._logprobs(), think=think,
            template_args=arguments | self.chat_template_kwargs,
            tools=tuple(one.model_dump(exclude_unset=True) for one in self._callable()),
            tool_choice=self._choice(),
        )  # fmt: skip

    def reply_schema(self) -> str | None:
        schema = super().reply_schema()
        if schema is not None and self._choice() is not None:
            raise invalid_request(
                "response_format asks for JSON, and a call of the tools is none. Leave one of them out, or send"
                " tool_choice none.", "response_format",
            )  # fmt: skip
        return schema

    def unkept(self) -> list[str]:
        left_out = self.tool_choice == "auto" and len(self._callable()) < len(self.tools)
        return [*super().unkept(), *["tools"] * left_out]

    def _callable(self) -> list[ToolSchema]:
        """Return the tools that may be called: none where the reply follows a schema, as no call does."""
        return [] if self.tool_choice == "none" or self.reply_schema() is not None else self.tools

    def _choice(self) -> str | None:
        """Return the name of the function that must be called, or ANY_TOOL; None where the model decides."""
        if self.tool_choice in ("none", "auto"):
            return None
        names = [tool.function.name for tool in self.tools]
        if not isinstance(self.tool_choice, ToolChoice):
            if not names:
                raise invalid_request("tool_choice is 'required', and there are no tools. Send some.", "tool_choice")
            return ANY_TOOL
        if (name := self.tool_choice.function.name) not in names:
            raise invalid_request(f"tool_choice names {name!r}, which is not among the tools. Add it.", "tool_choice")
        return name

    def writes(self, pair: LLM) -> list[Callable[..., Reply]]:
        return [partial(pair.reply, self.turns())]

    def turns(self) -> list[Message]:
        """Return the conversation."""
        *turns, last = (message.message() for message in self.messages)
        return [*turns, replace(last, continued=self.continue_final_message)]

    def _max_tokens(self) -> int | None:
        given = {number for number in (self.max_tokens, self.max_completion_tokens) if number is not None}
        if len(given) > 1:
            raise invalid_request(
                f"max_tokens is {self.max_tokens}, but max_completion_tokens is {self.max_completion_tokens}. Give one"
                " of them.", "max_completion_tokens",
            )  # fmt: skip
        return next(iter(given), None)

    def _logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise invalid_request(
                f"top_logprobs is {self.top_logprobs}, but logprobs is not true. Set logprobs to true, or leave"
                " top_logprobs out.", "top_logprobs",
            )  # fmt: skip
        return (self.top_logprobs or 0) if self.logprobs else None


TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]


def as_list(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Return a text, or the ids of one text, as a list of one; return a list of several as it is."""
    if isinstance(given, str):
        return [given]
    ids = [one for one in given if isinstance(one, int)]
    return [ids] if ids else [one for one in given if not isinstance(one, int)]


class CompletionRequest(GenerationRequest):
    prompt: (
        str | TokenIds | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    ) = Field(
        description="A text to continue, or its token ids; a list of them: n choices for each. No chat template is"
        " applied."
    )
    max_tokens: fields.MostTokens = Field(16, description="The longest reply; -1: what fits.")
    logprobs: Annotated[
        Annotated[fields.Whole, Field(ge=0, le=MAX_LOGPROBS)] | None,
        BeforeValidator(lambda value: None if value is False else value),
    ] = Field(
        None, description="Report the log-probability of each token, and of this many others; false, as in chats: none."
    )

    def options(self, defaults: ReplyOptions, context_length: int) -> ReplyOptions:
        return self._options(defaults, context_length, self.max_tokens, logprobs=self.logprobs)

    def writes(self, pair: LLM) -> list[Callable[..., Reply]]:
        return [partial(pair.complete, prompt) for prompt in as_list(self.prompt)]
