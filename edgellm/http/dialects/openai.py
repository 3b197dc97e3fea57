"""OpenAI's replies: `/v1/chat/completions` and `/v1/completions`, with `timings` and our extension under `edgellm`."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from edgellm.engine import ToolCall
from edgellm.http.dialects.dialect import Dialect
from edgellm.http.replies import RequestHandler
from edgellm.http.schemas.builder import (
    Json,
    ResponseBuilder,
    TextDelta,
    WrittenReply,
    events,
    rounded,
    summary_of,
)
from edgellm.http.schemas.errors import ErrorInfo, error_responses, openai_error
from edgellm.http.schemas.requests import ChatRequest, CompletionRequest
from edgellm.http.schemas.responses import Completion, Extension, Timings, TokenInfo, Usage
from edgellm.spec.types import Channel, Logprobs, Notice, PromptProgress, Summary, Token

_NO_LOGPROB = -9999.0  # OpenAI's value for the logarithm of 0


class OpenAIResponseBuilder(ResponseBuilder):
    """Builds the responses of OpenAI's API for one request, whole or in chunks: one choice after another."""

    _id_prefix: ClassVar[str]
    _object: ClassVar[str]
    _chunk_object: ClassVar[str]

    def __init__(self, model: str, piece: Callable[[int], bytes], *, include_usage: bool, n: int = 1) -> None:
        """`piece` returns the bytes of a token. `include_usage`: the last chunk of a stream has the usage. There are
        `n` choices for each prompt."""
        self._n, self._piece, self._include_usage = n, piece, include_usage
        self._index = 0  # index of the choice being written
        self._past: list[Summary] = []  # summaries of the choices before
        self._called = 0  # calls of tools in this choice
        self._head = {
            "id": f"{self._id_prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model,
            "system_fingerprint": "edgellm",
        }  # fmt: skip

    def delta(self, delta: TextDelta) -> list[bytes]:
        choice = self._chunk_choice(self._delta(delta.text, delta.channel), self._logprobs([delta]))
        return self._chunk(choice, edgellm={"tokens": _token_infos([delta])})

    def call(self, call: ToolCall) -> list[bytes]:
        self._called += 1
        return self._chunk(self._chunk_choice({"tool_calls": [{**_call_out(call), "index": self._called - 1}]}))

    def notice(self, notice: Notice) -> list[bytes]:
        left_out = {"turns_left_out": notice.turns_left_out} if notice.turns_left_out else {}
        return self._chunk(self._chunk_choice(), edgellm={"notice": notice.text, **left_out})

    def progress(self, progress: PromptProgress) -> list[bytes]:
        """Return a chunk with llama.cpp's names for the prompt's new tokens and the processed ones among them."""
        told = {"model": progress.model, "total": progress.total, "processed": progress.done}
        return self._chunk(self._chunk_choice(), prompt_progress=told)

    def closing(self, summary: Summary, *, last: bool = True) -> list[bytes]:
        """Return a choice's last chunk, and after the `last` choice the usage of all and the end of the stream."""
        choice = self._chunk_choice(reason=_finish_reason(summary, self._called))
        chunks = self._chunk(choice, timings=_timings(summary), edgellm={"summary": summary_of(summary)})
        self._past.append(summary)
        self._index, self._called = self._index + 1, 0
        if not last:
            return chunks
        usage = self._chunk(usage=_usage(self._past, self._n)) if self._include_usage else []
        return [*chunks, *usage, b"data: [DONE]\n\n"]

    def failure(self, info: ErrorInfo) -> list[bytes]:
        return events(openai_error(info))

    def whole(self, written: Sequence[WrittenReply]) -> Json:
        """Return the response with one choice for each of `written`; figures are of the first, the usage of all."""
        choices = []
        for self._index, one in enumerate(written):
            self.opening(one.summary.prompt_tokens)
            reason = _finish_reason(one.summary, len(one.calls))
            choices.append(self._whole_choice(one) | {
                "index": self._index, "logprobs": self._logprobs(one.all(TextDelta)), "finish_reason": reason,
            })  # fmt: skip
        first = written[0]
        extension: Extension = {
            "tokens": _token_infos(first.all(TextDelta)),
            "notices": [notice.text for notice in first.all(Notice)],
            "summary": summary_of(first.summary),
        }
        if left_out := first.turns_left_out:
            extension["turns_left_out"] = left_out
        usage = _usage([one.summary for one in written], self._n)
        more = {"usage": usage, "timings": _timings(first.summary), "edgellm": extension}
        return {**self._head, "object": self._object, "choices": choices, **more}

    def _chunk(self, *choices: Json, **fields: Any) -> list[bytes]:
        if self._include_usage:
            fields.setdefault("usage", None)
        return events({**self._head, "object": self._chunk_object, "choices": choices, **fields})

    def _text(self, token: int) -> str:
        return self._piece(token).decode("utf-8", "replace")

    @abstractmethod
    def _delta(self, text: str, channel: Channel) -> Json:
        """Return the delta of a chunk for some characters."""

    @abstractmethod
    def _chunk_choice(self, delta: Json | None = None, logprobs: Any = None, reason: str | None = None) -> Json:
        """Return the choice of a chunk; `delta` is None where nothing was written."""

    @abstractmethod
    def _whole_choice(self, written: WrittenReply) -> dict[str, Any]:
        """Return the text of a choice."""

    @abstractmethod
    def _logprobs(self, deltas: Sequence[TextDelta]) -> Json | None:
        """Return the tokens' log-probabilities, None where none were asked for. `deltas` follow those of the last
        call."""


class ChatResponseBuilder(OpenAIResponseBuilder):
    """Builds the responses of /v1/chat/completions."""

    _id_prefix, _object, _chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, prompt_tokens: int) -> list[bytes]:  # noqa: ARG002
        return self._chunk(self._chunk_choice({"role": "assistant", "content": ""}))

    def _delta(self, text: str, channel: Channel) -> Json:
        return {"content" if channel is Channel.ANSWER else "reasoning_content": text}

    def _chunk_choice(self, delta: Json | None = None, logprobs: Any = None, reason: str | None = None) -> Json:
        return {"index": self._index, "delta": delta or {}, "logprobs": logprobs, "finish_reason": reason}

    def _whole_choice(self, written: WrittenReply) -> dict[str, Any]:
        text, calls = written.text, written.calls
        message = {
            "role": "assistant", "content": (text or None) if calls else text,
            "reasoning_content": written.thought or None, "refusal": None,
        }  # fmt: skip
        return {"message": message | ({"tool_calls": [*map(_call_out, calls)]} if calls else {})}

    def _logprobs(self, deltas: Sequence[TextDelta]) -> Json | None:
        content = [
            {**self._logprob(token.id, found.own), "top_logprobs": [self._logprob(*one) for one in top]}
            for token, found, top in _tokens_with_logprobs(deltas)
            if token.channel is Channel.ANSWER
        ]
        return {"content": content, "refusal": None} if content else None

    def _logprob(self, token: int, value: float) -> Json:
        return {"token": self._text(token), "logprob": max(value, _NO_LOGPROB), "bytes": list(self._piece(token))}


class CompletionResponseBuilder(OpenAIResponseBuilder):
    """Builds the responses of /v1/completions."""

    _id_prefix, _object, _chunk_object = "cmpl", "text_completion", "text_completion"
    _offset = 0  # characters before the next token

    def opening(self, prompt_tokens: int) -> list[bytes]:  # noqa: ARG002
        self._offset = 0
        return []

    def _delta(self, text: str, channel: Channel) -> Json:  # noqa: ARG002  a completion has no thoughts
        return {"text": text}

    def _chunk_choice(self, delta: Json | None = None, logprobs: Any = None, reason: str | None = None) -> Json:
        return {"index": self._index, **(delta or {"text": ""}), "logprobs": logprobs, "finish_reason": reason}

    def _whole_choice(self, written: WrittenReply) -> dict[str, Any]:
        return {"text": written.text}

    def _logprobs(self, deltas: Sequence[TextDelta]) -> Json | None:
        offsets = []
        for delta in deltas:
            offsets += [self._offset] * len(delta.tokens)
            self._offset += len(delta.text)
        tokens = list(_tokens_with_logprobs(deltas))
        if not tokens:
            return None
        return {
            "tokens": [self._text(token.id) for token, _, _ in tokens],
            "token_logprobs": [max(found.own, _NO_LOGPROB) for _, found, _ in tokens],
            "top_logprobs": [
                {self._text(token): max(value, _NO_LOGPROB) for token, value in top} for _, _, top in tokens
            ],
            "text_offset": offsets,
        }


def _call_out(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(summary: Summary, calls: int) -> str:
    return "length" if summary.finish_reason == "length" else "tool_calls" if calls else "stop"


def _tokens_with_logprobs(deltas: Sequence[TextDelta]) -> Iterator[tuple[Token, Logprobs, list[tuple[int, float]]]]:
    """Yield tokens with their log-probabilities, and the log-probabilities of the likeliest tokens in their places."""
    for delta in deltas:
        for token in delta.tokens:
            if (found := token.logprobs) is not None:
                yield token, found, list(zip(found.ids.tolist(), found.logprobs.tolist(), strict=True))


def _token_infos(deltas: Sequence[TextDelta]) -> list[TokenInfo]:
    return [
        {
            "id": token.id, "text": delta.text if number == len(delta.tokens) else "", "source": token.source,
            "channel": token.channel, "confidence": rounded(token.confidence), "round": token.round,
        }
        for delta in deltas
        for number, token in enumerate(delta.tokens, 1)
    ]  # fmt: skip


def _usage(summaries: Sequence[Summary], n: int) -> Usage:
    """Return the usage of prompts and of the `n` replies to each."""
    prompt = sum(summary.prompt_tokens for summary in summaries[::n])
    reply = sum(summary.tokens for summary in summaries)
    return {
        "prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply,
        "completion_tokens_details": {"reasoning_tokens": sum(summary.thinking_tokens for summary in summaries)},
    }  # fmt: skip


def _timings(summary: Summary) -> Timings:
    prompt, first, rate = summary.prompt_tokens, summary.ttft_ms or 0.0, summary.tokens_per_second
    return {
        "prompt_n": prompt,
        "prompt_ms": round(first, 4),
        "prompt_per_token_ms": round(first / prompt, 4) if prompt else 0.0,
        "prompt_per_second": round(prompt / first * 1e3, 4) if first else 0.0,
        "predicted_n": summary.tokens,
        "predicted_ms": round(summary.seconds_decoding * 1e3, 4),
        "predicted_per_token_ms": round(1e3 / rate, 4) if rate else 0.0,
        "predicted_per_second": round(rate or 0.0, 4),
        "draft_n": summary.tested,
        "draft_n_accepted": summary.accepted,
    }


def _add(app: FastAPI, handler: RequestHandler) -> None:
    about = "The reply, whole or in chunks with the same fields"
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": about, "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    }

    @app.post("/v1/chat/completions", tags=["OpenAI"], summary="Reply to a conversation",
              response_model=Completion, responses=responses | error_responses())  # fmt: skip
    async def chat(body: ChatRequest, request: Request) -> Response:
        make_builder = partial(ChatResponseBuilder, include_usage=body.include_usage, n=body.n)
        return await handler.reply(body, request, make_builder, body.unknown())

    @app.post("/v1/completions", tags=["OpenAI"], summary="Continue a text",
              response_model=Completion, responses=responses | error_responses())  # fmt: skip
    async def completions(body: CompletionRequest, request: Request) -> Response:
        make_builder = partial(CompletionResponseBuilder, include_usage=body.include_usage, n=body.n)
        return await handler.reply(body, request, make_builder, body.unknown())


DIALECT = Dialect((), openai_error, _add)
