"""OpenAI's replies: `/v1/chat/completions` and `/v1/completions`, with `timings` and our extension under `edgellm`."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from edgellm.engine import ToolCall
from edgellm.http.dialects import Dialect
from edgellm.http.replies import RequestHandler
from edgellm.http.schemas.errors import ApiError, openai_error
from edgellm.http.schemas.requests import ChatRequest, CompletionRequest
from edgellm.http.schemas.responses import Json, Pieces, Writer, WrittenReply, rounded, summary_of
from edgellm.spec.stats import Summary
from edgellm.spec.stream import TextDelta
from edgellm.spec.types import Channel, Notice, PromptProgress

_ABOUT = """JSON, whole or in chunks, as OpenAI's own documentation describes it, with `timings` as llama.cpp has
them (`draft_n` drafted tokens were tested, `draft_n_accepted` of them accepted), and with our extension `edgellm`: the
`tokens` with their sources, `notices`, and the figures of the reply in `summary`"""
_NO_LOGPROB = -9999.0  # OpenAI's value for the logarithm of 0


class OpenAIWriter(Writer):
    """Writes the responses of OpenAI's API, whole or in chunks: one choice after another."""

    last_bytes = b"data: [DONE]\n\n"

    def __init__(self, request: ChatRequest | CompletionRequest) -> None:
        super().__init__(request.model or "")
        self._chat, self._n = isinstance(request, ChatRequest), request.n
        options = request.stream_options
        self._include_usage = options is not None and options.include_usage  # at the end of a stream
        self._piece: Callable[[int], bytes] = bytes  # returns a token's bytes
        self._index = 0  # index of the choice being written
        self._past: list[Summary] = []  # summaries of the choices before
        self._called = 0  # calls of tools in this choice
        self._reading = 0.0  # when a prompt began to be read
        self._offset = 0  # characters of this choice before the next token
        self._object = "chat.completion" if self._chat else "text_completion"
        self._id, self._created = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}", int(time.time())

    def begin(self, model: str, piece: Callable[[int], bytes]) -> None:
        self.model, self._piece = model, piece

    def open(self, summary: Summary) -> Pieces:  # noqa: ARG002
        self._offset = 0
        if self._chat:
            yield self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: TextDelta) -> Pieces:
        answer = "content" if self._chat else "text"
        name = answer if delta.channel is Channel.ANSWER else "reasoning_content"
        yield self._chunk({name: delta.text}, self._logprobs([delta]), edgellm={"tokens": _token_infos([delta])})

    def call(self, call: ToolCall) -> Pieces:
        yield self._chunk({"tool_calls": [{**_call_out(call), "index": self._called}]})
        self._called += 1

    def aside(self, event: Notice | PromptProgress) -> Pieces:
        """Yield a chunk with a notice, or with a prompt's tokens as llama-server counts them."""
        if isinstance(event, PromptProgress):
            self._reading = self._reading or time.perf_counter()
            told = {"model": event.model, "total": event.total, "cache": event.cached, "processed": event.done,
                    "time_ms": int(1e3 * (time.perf_counter() - self._reading))}  # fmt: skip
            yield self._chunk({}, prompt_progress=told)
        else:
            left_out = {"turns_left_out": event.turns_left_out} if event.turns_left_out else {}
            yield self._chunk({}, edgellm={"notice": event.text, **left_out})

    def close(self, summary: Summary, *, last: bool) -> Pieces:
        """Yield a choice's last chunk, and after the `last` choice the usage of all."""
        more = {"timings": _timings(summary), "edgellm": {"summary": summary_of(summary)}}
        yield self._chunk({}, reason=_finish_reason(summary, self._called), **more)
        self._past.append(summary)
        self._index, self._called = self._index + 1, 0
        if last and self._include_usage:
            yield self._event([], usage=_usage(self._past, self._n))

    def failure(self, error: ApiError) -> Json:
        return openai_error(error)

    def whole(self, written: Sequence[WrittenReply]) -> Json:
        """Return the response with one choice for each of `written`; figures are of the first, the usage of all."""
        choices = []
        for index, one in enumerate(written):
            self._offset, calls, logprobs = 0, one.calls, self._logprobs(one.all(TextDelta))
            end = {"logprobs": logprobs, "finish_reason": _finish_reason(one.summary, len(calls))}
            message = {
                "role": "assistant", "content": (one.text or None) if calls else one.text,
                "reasoning_content": one.thought or None, "refusal": None,
                **({"tool_calls": [*map(_call_out, calls)]} if calls else {}),
            }  # fmt: skip
            choices.append({"index": index, **({"message": message} if self._chat else {"text": one.text}), **end})
        first = written[0]
        extension = {
            "tokens": _token_infos(first.all(TextDelta)),
            "notices": [notice.text for notice in first.all(Notice)],
            "summary": summary_of(first.summary),
            **({"turns_left_out": first.turns_left_out} if first.turns_left_out else {}),
        }
        usage = _usage([one.summary for one in written], self._n)
        more = {"usage": usage, "timings": _timings(first.summary), "edgellm": extension}
        return {**self._head(self._object), "choices": choices, **more}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id, "created": self._created, "model": self.model, "system_fingerprint": "edgellm",
            "object": kind,
        }  # fmt: skip

    def _chunk(self, part: Json, logprobs: Json | None = None, reason: str | None = None, **fields: Any) -> Json:
        """Return a chunk with the `part` that was written."""
        shown = {"delta": part} if self._chat else {"text": part.get("text", "")}
        return self._event([{"index": self._index, **shown, "logprobs": logprobs, "finish_reason": reason}], **fields)

    def _event(self, choices: Sequence[Json], **fields: Any) -> Json:
        usage = {"usage": None} if self._include_usage else {}
        kind = f"{self._object}.chunk" if self._chat else self._object
        return {**self._head(kind), "choices": choices, **usage, **fields}

    def _logprobs(self, deltas: Sequence[TextDelta]) -> Json | None:
        """Return log-probabilities, None where none were asked for. `deltas` follow those of the last call."""
        offsets = []
        for delta in deltas:
            offsets += [self._offset] * len(delta.tokens)
            self._offset += len(delta.text)
        tokens = [
            (token.id, found.own, list(zip(found.ids.tolist(), found.logprobs.tolist(), strict=True)))
            for delta in deltas
            for token in delta.tokens
            if (found := token.logprobs) is not None and token.channel is Channel.ANSWER
        ]
        if not tokens:
            return None
        if self._chat:
            content = [
                {**self._logprob(token, own), "top_logprobs": [self._logprob(*one) for one in top]}
                for token, own, top in tokens
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(token) for token, _, _ in tokens],
            "token_logprobs": [max(own, _NO_LOGPROB) for _, own, _ in tokens],
            "top_logprobs": [
                {self._text(token): max(value, _NO_LOGPROB) for token, value in top} for _, _, top in tokens
            ],
            "text_offset": offsets,
        }

    def _logprob(self, token: int, value: float) -> Json:
        return {"token": self._text(token), "logprob": max(value, _NO_LOGPROB), "bytes": list(self._piece(token))}

    def _text(self, token: int) -> str:
        return self._piece(token).decode("utf-8", "replace")


def _call_out(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(summary: Summary, calls: int) -> str:
    return "length" if summary.finish_reason == "length" else "tool_calls" if calls else "stop"


def _token_infos(deltas: Sequence[TextDelta]) -> list[Json]:
    return [
        {
            "id": token.id, "text": text, "source": token.source, "channel": token.channel,
            "confidence": rounded(token.confidence), "round": token.round,
        }
        for delta in deltas
        for token, text in delta.parts()
    ]  # fmt: skip


def _usage(summaries: Sequence[Summary], n: int) -> Json:
    """Return the usage of prompts and of the `n` replies to each."""
    prompt = sum(summary.prompt_tokens for summary in summaries[::n])
    reply = sum(summary.tokens for summary in summaries)
    return {
        "prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply,
        "prompt_tokens_details": {"cached_tokens": sum(summary.cached_tokens for summary in summaries[::n])},
        "completion_tokens_details": {"reasoning_tokens": sum(summary.thinking_tokens for summary in summaries)},
    }  # fmt: skip


def _timings(summary: Summary) -> Json:
    first, rate = summary.ttft_ms or 0.0, summary.tokens_per_second or 0.0
    prompt = summary.prompt_tokens - summary.cached_tokens
    return {
        "cache_n": summary.cached_tokens, "prompt_n": prompt, "prompt_ms": round(first, 4),
        "prompt_per_token_ms": round(first / prompt, 4) if prompt else 0.0,
        "prompt_per_second": round(prompt / first * 1e3, 4) if first else 0.0,
        "predicted_n": summary.tokens, "predicted_ms": round(summary.seconds_decoding * 1e3, 4),
        "predicted_per_token_ms": round(1e3 / rate, 4) if rate else 0.0, "predicted_per_second": round(rate, 4),
        "draft_n": summary.tested, "draft_n_accepted": summary.accepted,
    }  # fmt: skip


def _add(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/chat/completions", tags=["OpenAI"], summary="Reply to a conversation",
              response_class=Response, response_description=_ABOUT)  # fmt: skip
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await handler.reply(body, request, OpenAIWriter(body), body.unknown())

    @app.post("/v1/completions", tags=["OpenAI"], summary="Continue a text",
              response_class=Response, response_description=_ABOUT)  # fmt: skip
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await handler.reply(body, request, OpenAIWriter(body), body.unknown())


DIALECT = Dialect(_add)
