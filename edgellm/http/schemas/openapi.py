"""The description of answers in /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorBody


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timings(BaseModel):
    """llama.cpp's names. `draft_n` drafted tokens were tested by the verifier, and `draft_n_accepted` of them stand."""

    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class Written(BaseModel):
    """A token and who wrote it."""

    id: int
    text: str
    source: Literal["draft", "accepted", "corrected", "bonus", "retrieved", "parallel", "verifier"]
    confidence: float | None
    round: int


class Extension(BaseModel):
    """What is ours: the tokens with their sources, what happened on the way, and figures."""

    tokens: list[Written]
    notices: list[str]
    summary: dict[str, Any]


class ChatMessageOut(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessageOut
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class _Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    timings: Timings
    edgellm: Extension


class ChatCompletion(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Whole):
    object: Literal["text_completion"]
    choices: list[TextChoice]


_MEANINGS = {
    400: "The request cannot be meant; `param` names what is wrong",
    401: "The API key is missing or wrong",
    403: "A wrong Host header, or another origin's page",
    404: "There is no such model",
    408: "The request took too long to arrive",
    413: "The request is too large",
    415: "The request is not JSON",
    429: "There is no place, and the line is full; see Retry-After",
    500: "The engine failed",
    503: "The model is being loaded, or the verifier is away; see Retry-After",
}
FAULTS: dict[int, dict[int | str, dict[str, Any]]] = {
    status: {status: {"model": Error, "description": meaning}} for status, meaning in _MEANINGS.items()
}
"""Entries for the `responses` of a path, by status."""

_WHOLE: dict[str, type[BaseModel]] = {"chat": ChatCompletion, "completion": TextCompletion}


def described(kind: str) -> dict[str, Any]:
    """Return the part of a path's declaration that describes its answers. A stream has the same fields, in chunks."""
    faults = {status: about for one in FAULTS.values() for status, about in one.items()}
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    whole = {200: {"model": _WHOLE[kind], "content": stream, "description": "The reply, whole or in chunks"}}
    return {"responses": whole | faults, "response_model": None}
