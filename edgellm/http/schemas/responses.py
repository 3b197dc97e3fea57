"""Responses as /openapi.json describes them: OpenAI's, `timings` with llama.cpp's names, our extension, and models."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from edgellm.spec.types import Channel, Source


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


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: dict[Literal["reasoning_tokens"], int]


class Timings(TypedDict):
    """llama.cpp's timings: the prompt up to the first token, then the later tokens. The verifier tested `draft_n`
    drafted tokens and accepted `draft_n_accepted` of them."""

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


class TokenInfo(TypedDict):
    """A token, who wrote it, and its channel. `text` is the characters that it completes; joined, they are the text of
    that channel."""

    id: int
    text: str
    source: Source
    channel: Channel
    confidence: float | None
    round: int


class LinkFigures(TypedDict):
    """The link to the verifier: the median wait for a verdict in milliseconds, and the bytes to it and from it."""

    rtt_ms_p50: float | None
    bytes_up: int
    bytes_down: int


class ReplySummary(LinkFigures):
    """Figures that llama.cpp has no names for, from a `Summary`."""

    finish_reason: str
    stopped_by: str | None
    seed: int
    rounds: int
    tokens_per_round: float | None
    drafted: int
    share_verified: float | None
    share_verified_thinking: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    verifier_passes_per_token: float | None
    share_offloaded: float | None
    retrieved: int


class Extension(TypedDict):
    """Our extension of a whole reply: its tokens with their sources, notices on the way, figures, and how many turns
    truncation left out, if any. A chunk has one of the first three, its notice as a text."""

    tokens: list[TokenInfo]
    notices: list[str]
    summary: ReplySummary
    turns_left_out: NotRequired[int]


class Completion(TypedDict):
    """A reply to a chat or a text. `choices` are as OpenAI's own documentation describes them."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: Usage
    timings: Timings
    edgellm: Extension
