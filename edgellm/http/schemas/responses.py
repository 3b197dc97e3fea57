"""Responses: OpenAI's objects, `timings` with llama.cpp's names, and our extension under `edgellm`.

A field of a chunk that is not set is absent from its JSON; one that is None is null.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from edgellm.engine import ToolCall
from edgellm.http.schemas.builder import ResponseBuilder, TextDelta, WrittenReply, events, turns_left_out
from edgellm.http.schemas.errors import ErrorInfo, ErrorResponse
from edgellm.spec.types import Channel, Logprobs, Notice, PromptProgress, Source, Summary, Token

Rounded: TypeAlias = Annotated[float, AfterValidator(lambda value: round(value, 4))]
Logprob: TypeAlias = Annotated[float, AfterValidator(lambda value: max(value, -9999.0))]  # OpenAI's value for log 0
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "stop"}


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


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class Timings(BaseModel):
    """llama.cpp's timings: the prompt up to the first token, then the later tokens. The verifier tested `draft_n`
    drafted tokens and accepted `draft_n_accepted` of them."""

    prompt_n: int
    prompt_ms: Rounded
    prompt_per_token_ms: Rounded
    prompt_per_second: Rounded
    predicted_n: int
    predicted_ms: Rounded
    predicted_per_token_ms: Rounded
    predicted_per_second: Rounded
    draft_n: int
    draft_n_accepted: int


class TokenInfo(BaseModel):
    """A token, who wrote it, and its channel. `text` is the characters that it completes; joined, they are the text of
    that channel."""

    id: int
    text: str
    source: Source
    channel: Channel
    confidence: Rounded | None
    round: int


class ReplySummary(BaseModel):
    """Figures that llama.cpp has no names for, from a `Summary`."""

    model_config = ConfigDict(from_attributes=True)

    finish_reason: str
    stopped_by: Annotated[str | None, BeforeValidator(lambda text: text or None)]
    seed: int
    rounds: int
    tokens_per_round: Rounded | None
    drafted: int
    share_verified: Rounded | None
    share_verified_thinking: Rounded | None
    acceptance_rate: Rounded | None
    mean_acceptance_length: Rounded | None
    verifier_passes_per_token: Rounded | None
    share_offloaded: Rounded | None
    retrieved: int
    rtt_ms_p50: Rounded | None = Field(validation_alias="rtt_ms")
    bytes_up: int
    bytes_down: int


class Extension(BaseModel):
    """Our extension of a whole reply: its tokens with their sources, notices on the way, and figures."""

    tokens: list[TokenInfo]
    notices: list[str]
    summary: ReplySummary
    turns_left_out: int = Field(0, description="Set where truncation left out any.")


class ChunkExtension(BaseModel):
    """Our extension of a chunk, in which one of these is set; with a notice that turns were left out, how many."""

    tokens: list[TokenInfo] | None = None
    notice: str | None = None
    turns_left_out: int | None = None
    summary: ReplySummary | None = None


def summary_extension(summary: Summary) -> ChunkExtension:
    """Return our extension of what ends a reply."""
    return ChunkExtension(summary=ReplySummary.model_validate(summary))


class TopLogprob(BaseModel):
    token: str
    logprob: Logprob
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[Logprob]
    top_logprobs: list[dict[str, Logprob]]
    text_offset: list[int]


class FunctionOut(BaseModel):
    name: str
    arguments: str


class ToolCallOut(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionOut

    @classmethod
    def of(cls, call: ToolCall) -> Self:
        return cls(id=call.id, type="function", function=FunctionOut(name=call.name, arguments=call.arguments))


class ToolCallDelta(ToolCallOut):
    """A call in a chunk, whole; `index` counts the calls of the reply."""

    index: int = 0


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallOut] | None
    refusal: None

    @model_serializer(mode="wrap")
    def _without_no_calls(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name != "tool_calls" or value}


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]


class _Whole(_Response):
    usage: Usage
    timings: Timings
    edgellm: Extension


class PromptProgressOut(BaseModel):
    """llama.cpp's name: `model` has processed so many of the prompt's tokens, of those that it had not read before."""

    model: str
    total: int
    processed: int


class _Chunk(_Response):
    prompt_progress: PromptProgressOut | None = None
    timings: Timings | None = None
    edgellm: ChunkExtension | None = None
    usage: Usage | None = None


class ChatCompletion(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class Completion(_Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class OpenAIResponseBuilder(ResponseBuilder):
    """Builds the responses of OpenAI's API for one request, whole or in chunks: one choice after another."""

    _id_prefix: ClassVar[str]
    _whole: ClassVar[tuple[type[_Whole], str]]
    _chunk: ClassVar[tuple[type[_Chunk], str]]

    def __init__(self, model: str, piece: Callable[[int], bytes], *, include_usage: bool, n: int = 1) -> None:
        """`piece` returns the bytes of a token. `include_usage`: the last chunk of a stream has the usage. There are
        `n` choices for each prompt."""
        self._n = n
        self._piece = piece
        self._include_usage = include_usage
        self._index = 0  # of the choice being written
        self._past: list[Summary] = []  # of the choices before it
        self._called = 0  # calls of tools in this choice
        self._head: dict[str, Any] = {
            "id": f"{self._id_prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model,
            "system_fingerprint": "edgellm",
        }  # fmt: skip
        self._chunk_head = self._head | ({"usage": None} if include_usage else {})

    def delta(self, delta: TextDelta) -> list[bytes]:
        choice = self._chunk_choice(delta.text, self._logprobs([delta]), channel=delta.channel)
        return events(self._make_chunk(choice, edgellm=ChunkExtension(tokens=_token_infos([delta]))))

    def call(self, call: ToolCall) -> list[bytes]:
        delta = ToolCallDelta(**dict(ToolCallOut.of(call)), index=self._called)
        self._called += 1
        choice = ChatChunkChoice(
            index=self._index, delta=ChatDelta(tool_calls=[delta]), logprobs=None, finish_reason=None
        )
        return events(self._make_chunk(choice))

    def notice(self, notice: Notice) -> list[bytes]:
        extension = ChunkExtension(notice=notice.text)
        if notice.turns_left_out:
            extension = ChunkExtension(notice=notice.text, turns_left_out=notice.turns_left_out)
        return events(self._make_chunk(self._chunk_choice(), edgellm=extension))

    def progress(self, progress: PromptProgress) -> list[bytes]:
        out = PromptProgressOut(model=progress.model, total=progress.total, processed=progress.done)
        return events(self._make_chunk(self._chunk_choice(), prompt_progress=out))

    def closing(self, summary: Summary, *, last: bool = True) -> list[bytes]:
        """After the last choice comes the usage of all of them."""
        choice = self._chunk_choice(finish_reason=_finish_reason(summary, self._called))
        chunks = events(self._make_chunk(choice, timings=_timings(summary), edgellm=summary_extension(summary)))
        self._past.append(summary)
        self._index, self._called = self._index + 1, 0
        if not last:
            return chunks
        usage = events(self._make_chunk(usage=_usage(self._past, self._n))) if self._include_usage else []
        return [*chunks, *usage, b"data: [DONE]\n\n"]

    def failure(self, info: ErrorInfo) -> list[bytes]:
        return events(ErrorResponse(error=info))

    def whole(self, written: Sequence[WrittenReply]) -> BaseModel:
        """Return the response with one choice for each of `written`; figures are of the first, the usage of all."""
        choices = []
        for self._index, one in enumerate(written):
            self.opening(one.summary.prompt_tokens)
            text, thought, reason = one.text(), one.text(Channel.THINKING), _finish_reason(one.summary, len(one.calls))
            choices.append(self._whole_choice(text, thought, self._logprobs(one.deltas), reason, one.calls))
        deltas, notices, summary = written[0].deltas, written[0].notices, written[0].summary
        left_out = turns_left_out(notices)
        extension = Extension(
            tokens=_token_infos(deltas),
            notices=[notice.text for notice in notices],
            summary=ReplySummary.model_validate(summary),
            **({"turns_left_out": left_out} if left_out else {}),
        )
        model, kind = self._whole
        return model(
            object=kind, choices=choices, usage=_usage([one.summary for one in written], self._n),
            timings=_timings(summary), edgellm=extension, **self._head,
        )  # fmt: skip

    def _make_chunk(self, *choices: BaseModel, **fields: Any) -> BaseModel:
        model, kind = self._chunk
        return model(object=kind, choices=list(choices), **(self._chunk_head | fields))

    def _text(self, token: int) -> str:
        return self._piece(token).decode("utf-8", "replace")

    @abstractmethod
    def _whole_choice(
        self, text: str, thought: str, logprobs: Any, finish_reason: FinishReason, calls: Sequence[ToolCall]
    ) -> BaseModel: ...

    @abstractmethod
    def _chunk_choice(
        self, text: str | None = None, logprobs: Any = None, finish_reason: Any = None,
        channel: Channel = Channel.ANSWER,
    ) -> BaseModel:  # fmt: skip
        """Return the choice of a chunk; `text` is None where nothing was written."""

    @abstractmethod
    def _logprobs(self, deltas: Sequence[TextDelta]) -> BaseModel | None:
        """Return the log-probabilities of tokens, None where none were asked for. `deltas` follow those before."""


class ChatResponseBuilder(OpenAIResponseBuilder):
    """Builds the responses of /v1/chat/completions."""

    _id_prefix = "chatcmpl"
    _whole = (ChatCompletion, "chat.completion")
    _chunk = (ChatCompletionChunk, "chat.completion.chunk")

    def opening(self, prompt_tokens: int) -> list[bytes]:  # noqa: ARG002
        delta = ChatDelta(role="assistant", content="")
        choice = ChatChunkChoice(index=self._index, delta=delta, logprobs=None, finish_reason=None)
        return events(self._make_chunk(choice))

    def _whole_choice(
        self, text: str, thought: str, logprobs: Any, finish_reason: FinishReason, calls: Sequence[ToolCall]
    ) -> BaseModel:
        message = AssistantMessage(
            role="assistant", content=(text.strip() or None) if calls else text,
            reasoning_content=thought.rstrip() or None, tool_calls=[*map(ToolCallOut.of, calls)] or None, refusal=None,
        )  # fmt: skip
        return ChatChoice(index=self._index, message=message, logprobs=logprobs, finish_reason=finish_reason)

    def _chunk_choice(
        self, text: str | None = None, logprobs: Any = None, finish_reason: Any = None,
        channel: Channel = Channel.ANSWER,
    ) -> BaseModel:  # fmt: skip
        if text is None:
            delta = ChatDelta()
        else:
            delta = ChatDelta(content=text) if channel is Channel.ANSWER else ChatDelta(reasoning_content=text)
        return ChatChunkChoice(index=self._index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)

    def _logprobs(self, deltas: Sequence[TextDelta]) -> BaseModel | None:
        content = [
            TokenLogprob(
                **self._logprob(token.id, found.own), top_logprobs=[TopLogprob(**self._logprob(*one)) for one in top]
            )
            for token, found, top in _tokens_with_logprobs(deltas)
            if token.channel is Channel.ANSWER
        ]
        return ChatLogprobs(content=content, refusal=None) if content else None

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": value, "bytes": list(self._piece(token))}


class CompletionResponseBuilder(OpenAIResponseBuilder):
    """Builds the responses of /v1/completions."""

    _id_prefix = "cmpl"
    _whole = (Completion, "text_completion")
    _chunk = (CompletionChunk, "text_completion")
    _offset = 0  # of the next token, in characters

    def opening(self, prompt_tokens: int) -> list[bytes]:  # noqa: ARG002
        self._offset = 0
        return []

    def _whole_choice(
        self,
        text: str,
        thought: str,  # noqa: ARG002
        logprobs: Any,
        finish_reason: FinishReason,
        calls: Sequence[ToolCall],  # noqa: ARG002
    ) -> BaseModel:
        return self._chunk_choice(text, logprobs, finish_reason)

    def _chunk_choice(
        self, text: str | None = None, logprobs: Any = None, finish_reason: Any = None,
        channel: Channel = Channel.ANSWER,  # noqa: ARG002  a completion has no thoughts
    ) -> BaseModel:  # fmt: skip
        return CompletionChoice(index=self._index, text=text or "", logprobs=logprobs, finish_reason=finish_reason)

    def _logprobs(self, deltas: Sequence[TextDelta]) -> BaseModel | None:
        offsets = []
        for delta in deltas:
            offsets += [self._offset] * len(delta.tokens)
            self._offset += len(delta.text)
        tokens = list(_tokens_with_logprobs(deltas))
        if not tokens:
            return None
        return CompletionLogprobs(
            tokens=[self._text(token.id) for token, _, _ in tokens],
            token_logprobs=[found.own for _, found, _ in tokens],
            top_logprobs=[{self._text(token): value for token, value in top} for _, _, top in tokens],
            text_offset=offsets,
        )


def _finish_reason(summary: Summary, calls: int) -> FinishReason:
    reason = _FINISH_REASONS[summary.finish_reason]
    return "tool_calls" if calls and reason == "stop" else reason


def _tokens_with_logprobs(deltas: Sequence[TextDelta]) -> Iterator[tuple[Token, Logprobs, list[tuple[int, float]]]]:
    """Yield tokens with their log-probabilities and those of the likeliest ones in their places."""
    for delta in deltas:
        for token in delta.tokens:
            if (found := token.logprobs) is not None:
                yield token, found, list(zip(found.ids.tolist(), found.logprobs.tolist(), strict=True))


def _token_infos(deltas: Sequence[TextDelta]) -> list[TokenInfo]:
    return [
        TokenInfo(
            id=token.id, text=delta.text if number == len(delta.tokens) else "", source=token.source,
            channel=token.channel, confidence=token.confidence, round=token.round,
        )
        for delta in deltas
        for number, token in enumerate(delta.tokens, 1)
    ]  # fmt: skip


def _usage(summaries: Sequence[Summary], n: int) -> Usage:
    """Return the usage of prompts and of the `n` replies to each."""
    prompt = sum(summary.prompt_tokens for summary in summaries[::n])
    reply = sum(summary.tokens for summary in summaries)
    details = CompletionTokensDetails(reasoning_tokens=sum(summary.thinking_tokens for summary in summaries))
    return Usage(
        prompt_tokens=prompt, completion_tokens=reply, total_tokens=prompt + reply, completion_tokens_details=details
    )


def _timings(summary: Summary) -> Timings:
    prompt, first, rate = summary.prompt_tokens, summary.ttft_ms or 0.0, summary.tokens_per_second
    return Timings(
        prompt_n=prompt,
        prompt_ms=first,
        prompt_per_token_ms=first / prompt if prompt else 0.0,
        prompt_per_second=prompt / first * 1e3 if first else 0.0,
        predicted_n=summary.tokens,
        predicted_ms=summary.seconds_decoding * 1e3,
        predicted_per_token_ms=1e3 / rate if rate else 0.0,
        predicted_per_second=rate or 0.0,
        draft_n=summary.tested,
        draft_n_accepted=summary.accepted,
    )
