"""Ollama's API: `/api/chat`, `/api/generate`, and the calls about models."""

import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from time import perf_counter_ns, time
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from pydantic import BeforeValidator, Field, JsonValue
from starlette.responses import Response

from edgellm.engine import ModelFile, ToolCall
from edgellm.engine.chat.prompt import find_markup
from edgellm.http.dialects import ABOUT, LATEST, Dialect, chat_request, plain_name
from edgellm.http.model_host import keep_alive_seconds
from edgellm.http.replies import RequestHandler
from edgellm.http.schemas import fields
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.errors import ApiError
from edgellm.http.schemas.fields import ReplyRequest, RequestModel, Schema, Types
from edgellm.http.schemas.requests import CallOfMessage, ChatRequest, ToolSchema
from edgellm.http.schemas.responses import Json, ModelInfo, Pieces, Writer, WrittenReply, json_bytes, summary_of
from edgellm.llm import LLM
from edgellm.spec.sampling import sampling_of
from edgellm.spec.stats import Summary
from edgellm.spec.stream import Reply, TextDelta
from edgellm.spec.types import Channel

API_VERSION = "0.13.0"
"""The version of Ollama whose API this follows, which clients ask for before they use it."""
_NEVER = "9999-12-31T00:00:00Z"
_LINES = "application/x-ndjson"
Images = Annotated[list[JsonValue], Field(description="Refused in the last question: the models here read only text.")]
Longest = Annotated[
    Annotated[fields.MostTokens, BeforeValidator(lambda value: -1 if value == 0 and value is not False else value)]
    | None,
    Field(description="The longest reply; below 1: what fits."),
]


class OllamaOptions(fields.SamplingFields):
    """The options that have an effect here."""

    num_predict: Longest = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None

    def named(self) -> dict[str, Any]:
        """Return the options that are given, by their names in OpenAI's API."""
        penalties = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        named = {"max_tokens": self.num_predict, **penalties, **self.sampling()}
        return {name: value for name, value in named.items() if value is not None}


class OllamaMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = Field("", description="The thought before an assistant's content.")
    images: Images = Field([])
    tool_calls: list[CallOfMessage] = Field([])
    tool_call_id: str = ""
    tool_name: str = Field("", description="The function whose result is the content.")

    def message(self) -> dict[str, Any]:
        """Return the turn as a message of a chat completion."""
        return {
            "role": self.role, "content": _content(self.content, self.images), "reasoning_content": self.thinking,
            "tool_calls": [call.model_dump() for call in self.tool_calls], "tool_call_id": self.tool_call_id,
            "name": self.tool_name,
        }  # fmt: skip


class OllamaRequest(ReplyRequest):
    """The parameters of both kinds of replies."""

    model: str = Field(max_length=500, description="The name from /api/tags, with or without :latest.")
    stream: bool = Field(True, description="Send lines of JSON as they are written.")
    options: OllamaOptions | None = None
    format: Literal["", "json"] | Schema = Field("", description="json: any object; or the JSON schema of the reply.")
    think: bool | Annotated[str, Field(max_length=40)] | None = Field(None, description="On, off, or a level.")
    keep_alive: fields.KeepAlive = None

    def chat(self, messages: Sequence[Json], **more: Any) -> ChatRequest:
        """Return the request for a chat completion of `messages`, with `more` parameters."""
        more |= {} if self.options is None else self.options.named()
        more["think" if isinstance(self.think, bool) else "reasoning_effort"] = self.think
        if self.format:
            more["response_format"] = {"type": "json_object"}
        if not isinstance(self.format, str):
            more["response_format"] = {"type": "json_schema", "schema": self.format}
        return chat_request(
            messages=messages, model=plain_name(self.model), stream=self.stream, keep_alive=self.keep_alive,
            require_verified=self.require_verified, **more,
        )  # fmt: skip


class OllamaChatRequest(OllamaRequest):
    messages: list[OllamaMessage] = Field([], description="Without any, the model is only loaded.")
    tools: list[ToolSchema] = Field([])

    _types: ClassVar[Types] = {"tools": ("function",)}

    def request(self) -> ChatRequest:
        """Return the request for a chat completion."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools]
        return self.chat([message.message() for message in self.messages], tools=tools)


class TextRequest(ChatRequest):
    """A request for a reply to a text in the chat template; `raw`, or by a model without one, for its continuation."""

    raw: bool = False

    def writes(self, pair: LLM) -> list[Callable[..., Reply]]:
        if not self.raw and pair.prompt_writer.model.chat_template_source:
            return super().writes(pair)
        return [partial(pair.complete, "\n\n".join(turn.content for turn in self.turns()))]


class OllamaGenerateRequest(OllamaRequest):
    prompt: str = Field("", description="Without a text, the model is only loaded.")
    system: str = ""
    raw: bool = Field(False, description="Continue the prompt without the chat template.")
    images: Images = Field([])

    def request(self) -> ChatRequest:
        """Return the request for a reply, in the chat template or without."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": _content(self.prompt, self.images)}
        return self.chat([*system, question], kind=TextRequest, raw=self.raw)


class OllamaModelName(RequestModel):
    model: str | None = Field(None, max_length=500)
    name: str | None = Field(None, max_length=500, description="The former name of model.")


def _error(error: ApiError) -> Json:
    return {"error": error.message}


class OllamaWriter(Writer):
    """Writes a reply, whole or as lines of JSON; figures are in the last one. Durations are in nanoseconds."""

    media_type, names = _LINES, {"reasoning_effort": "think"}

    def __init__(self, model: str, *, chat: bool) -> None:
        """`chat`: the text is in a message."""
        super().__init__(model)
        self._chat, self._began, self._calls = chat, perf_counter_ns(), 0

    def waiting(self) -> bytes:
        return self.framed(self.line(done=False))

    def framed(self, piece: Json) -> bytes:
        return json_bytes(piece) + b"\n"

    def delta(self, delta: TextDelta) -> Pieces:
        if delta.text:
            thinks = delta.channel is Channel.THINKING
            yield self.line("" if thinks else delta.text, delta.text if thinks else "", done=False)

    def call(self, call: ToolCall) -> Pieces:
        yield self.line(calls=[_call_out(self._calls, call)], done=False)
        self._calls += 1

    def close(self, summary: Summary, *, last: bool) -> Pieces:
        if last:
            yield self.line(done=True, **self._figures(summary))

    def failure(self, error: ApiError) -> Json:
        return _error(error)

    def whole(self, written: Sequence[WrittenReply]) -> Json:
        (one,) = written
        calls = [_call_out(*numbered) for numbered in enumerate(one.calls)]
        return self.line(one.text, one.thought, calls, done=True, **self._figures(one.summary))

    def line(self, text: str = "", thought: str = "", calls: Sequence[Json] = (), **fields: Any) -> Json:
        """Return a line of a stream, or a whole answer."""
        head = {"model": self.model, "created_at": _time()}
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if not self._chat:
            return {**head, "response": text, **more, **fields}
        more |= {"tool_calls": calls} if calls else {}
        return {**head, "message": {"role": "assistant", "content": text, **more}, **fields}

    def _figures(self, summary: Summary) -> dict[str, Any]:
        return {
            "done_reason": "length" if summary.finish_reason == "length" else "stop",
            "total_duration": perf_counter_ns() - self._began, "load_duration": 0,
            "prompt_eval_count": summary.prompt_tokens,
            "prompt_eval_duration": int((summary.ttft_ms or 0.0) * 1e6),
            "eval_count": summary.tokens, "eval_duration": int(summary.seconds_decoding * 1e9),
            "edgellm": {"summary": summary_of(summary)},
        }  # fmt: skip


def _call_out(index: int, call: ToolCall) -> Json:
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": call.values()}}


def _content(text: str, images: Sequence[JsonValue]) -> str | list[Json]:
    return [{"type": "text", "text": text}, *({"type": "image"} for _ in images)] if images else text


def _time(seconds: float | None = None) -> str:
    """Return a time since the epoch, by default now, as Ollama writes it."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat().replace("+00:00", "Z")


def _details(file: ModelFile | None) -> Json:
    family = quantization = count = ""
    if file is not None:
        family, quantization = file.header.architecture, file.header.quantisation or ""
        size = file.header.n_params
        unit, letter = (10**9, "B") if size >= 10**9 else (10**6, "M") if size >= 10**6 else (1, "")
        count = f"{size / unit:.4g}{letter}"
    return {
        "parent_model": "", "format": "gguf", "family": family, "families": [family] if family else [],
        "parameter_size": count, "quantization_level": quantization,
    }  # fmt: skip


def _entry(name: str, created: float, file: ModelFile | None) -> dict[str, Any]:
    """Return a model in a list; its digest is of the name and the size, not of the file."""
    name, size = name if ":" in name else name + LATEST, 0 if file is None else file.header.file_size
    digest = hashlib.sha256(f"{name} {size}".encode()).hexdigest()
    return {
        "name": name, "model": name, "modified_at": _time(created), "size": size, "digest": digest,
        "details": _details(file),
    }  # fmt: skip


def _card(info: ModelInfo, file: ModelFile | None) -> Json:
    known: dict[str, Any] = {} if file is None else dict(file.header.metadata)
    plain: dict[str, JsonValue] = {name: value for name, value in known.items() if isinstance(value, (str, int, float))}
    template = str(plain.pop("tokenizer.chat_template", ""))
    thinks = find_markup(template, lambda _: False) is not None
    wanted = {} if file is None else sampling_of(file).figures()
    if file is not None:
        plain["general.parameter_count"] = file.header.n_params
    return {
        "modelfile": f"FROM {info.id}",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in wanted.items()),
        "template": template,
        "details": _details(file),
        "model_info": plain,
        "capabilities": ["embedding"] if info.embeds else ["completion", "tools", *(["thinking"] if thinks else [])],
        "modified_at": _time(info.created),
    }


def _add(app: FastAPI, handler: RequestHandler) -> None:
    async def answer(
        body: OllamaChatRequest | OllamaGenerateRequest, request: Request, *, chat: bool, empty: bool
    ) -> Response:
        writer = OllamaWriter(body.model, chat=chat)
        if not empty:
            asked = await in_reader(body.request)
            return await handler.reply(asked, request, writer, body.unknown())
        # load the model, or unload it if it shall not stay
        keep_alive = None if body.keep_alive is None else keep_alive_seconds(body.keep_alive)
        async with handler.models.lease(plain_name(body.model), keep_alive) as served:
            writer.begin(served.name, bytes)
        done = writer.line(done=True, done_reason="unload" if keep_alive == 0 else "load")
        return Response(writer.framed(done), media_type=_LINES if body.stream else "application/json")

    @app.post("/api/chat", tags=["Ollama"], summary="Reply to a conversation", response_class=Response,
              response_description=ABOUT)  # fmt: skip
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        return await answer(body, request, chat=True, empty=not body.messages)

    @app.post("/api/generate", tags=["Ollama"], summary="Reply to a text", response_class=Response,
              response_description=ABOUT)  # fmt: skip
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        return await answer(body, request, chat=False, empty=not body.prompt)

    @app.head("/api/tags", include_in_schema=False)
    @app.get("/api/tags", tags=["Ollama"], summary="The models that requests can name")
    async def tags() -> dict[str, list[dict[str, Any]]]:
        infos = await handler.models.infos()
        files = [(info, await handler.models.file(info.id)) for info in infos]
        return {"models": [_entry(info.id, info.created, file) for info, file in files]}

    @app.get("/api/ps", tags=["Ollama"], summary="The models in memory")
    async def running() -> dict[str, list[Json]]:
        models: list[Json] = []
        for loaded in handler.models.by_use():
            expires = _NEVER if loaded.expires_s is None else _time(time() + loaded.expires_s)
            pair, size = loaded.served.pair, sum(loaded.served.pair.memory.by_device.values())
            models.append({
                **_entry(loaded.name, time(), await handler.models.file(loaded.name)), "size": size,
                "expires_at": expires, "size_vram": size - pair.memory.by_device.get("CPU", 0),
                "context_length": pair.context_length,
            })  # fmt: skip
        if (embedder := handler.models.embedder) is not None:
            model = embedder.embedder.model
            models.append({
                **_entry(embedder.name, embedder.created, model.file), "expires_at": _NEVER,
                "size_vram": model.file.header.file_size if model.offloaded else 0,
                "context_length": embedder.embedder.positions,
            })  # fmt: skip
        return {"models": models}

    @app.post("/api/show", tags=["Ollama"], summary="What is known of a model")
    async def show(body: OllamaModelName) -> Json:
        name = plain_name(body.model or body.name) or handler.models.default_name or ""
        return _card(await handler.models.info(name), await handler.models.file(name))

    @app.head("/api/version", include_in_schema=False)
    @app.get("/api/version", tags=["Ollama"], summary="The version of the API")
    async def version() -> dict[str, str]:
        return {"version": API_VERSION, "edgellm": app.version}


DIALECT = Dialect(_add, "/api", _error)
