"""Requests: OpenAI's parameters that mean something here, and a few of our own. All others are refused.

A parameter that is null counts as left out. Parameters of OpenAI's and llama.cpp's that would change the text and are
not supported are taken only with the value that changes nothing: none is accepted and then ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgellm.http.schemas.errors import refuse
from edgellm.spec.params import GATES, LONGEST_STOP, MOST_LOGPROBS, MOST_STOPS

MOST_TOKENS = 2**20
LONGEST_TEXT = 2**22
_FAR = 2**63 - 1

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repeat_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
}
"""Parameters of other servers that are not supported here, and the values with which they ask for nothing."""

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class Given(BaseModel):
    """A record from outside: nothing unknown in it, nothing converted in silence, null as good as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


class StreamOptions(Given):
    include_usage: bool = Field(False, description="A last chunk, without choices, tells the usage.")


class Sampled(Given):
    """What both ways of asking have in common."""

    model: str | None = Field(None, max_length=500, description="As /v1/models names it; may be left out.")
    stream: bool = Field(False, description="Server-sent events, and [DONE] at the end.")
    stream_options: StreamOptions | None = None
    temperature: float = Field(0.0, ge=0.0, le=2.0, description="0 is greedy: always the likeliest token.")
    top_p: float = Field(0.95, gt=0.0, le=1.0, description="Sample from the likeliest that hold this share together.")
    top_k: int = Field(40, ge=0, le=MOST_TOKENS, description="Sample from the so many likeliest tokens; 0: from all.")
    seed: int | None = Field(None, ge=-(2**63), le=_FAR, description="Repeats a sampled reply.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = Field(
        None, description="Texts that end the reply where one would begin."
    )
    user: str | None = Field(None, max_length=1000, description="Is not looked at, and goes nowhere.")
    budget: float | None = Field(
        None, ge=0.0, le=1.0, description="The share of drafted chunks to verify; null: all. An extension of ours."
    )
    gate: str = Field(
        "auto", max_length=20, description=f"Which chunks those are: {', '.join(GATES)}. An extension of ours."
    )
    retrieval: str = Field(
        "auto", max_length=200, description="What drafts are copied from: auto, off, or sources. An extension of ours."
    )

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in [name for name in data if name in NEUTRAL and name not in cls.model_fields]:
            value = data[name]
            if value is not None and not any(type(value) is type(one) and value == one for one in _like(name)):
                raise refuse(f"{name} is {_shown(value)}, and that is not supported here. Leave {name} out.", name)
        return {name: value for name, value in data.items() if name not in NEUTRAL or name in cls.model_fields}

    def wants_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _like(name: str) -> tuple[Any, ...]:
    """Return the neutral values, numbers in both of JSON's forms."""
    known = NEUTRAL[name]
    return (*known, *(float(one) for one in known if type(one) is int))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class TextPart(Given):
    type: Literal["text"]
    text: str = Field(max_length=LONGEST_TEXT)


class ChatMessage(Given):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=LONGEST_TEXT)] | Annotated[list[TextPart], Field(max_length=1000)]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampled):
    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="The longest reply; null: what fits.")
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="The same, in newer clients.")
    logprobs: bool = Field(False, description="Tell the log-probability of each token, or refuse to.")
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="And of so many others; with logprobs.")


class CompletionRequest(Sampled):
    prompt: (
        Annotated[str, Field(max_length=LONGEST_TEXT)]
        | Annotated[list[str], Field(min_length=1, max_length=1)]
        | Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1, max_length=MOST_TOKENS)]
    ) = Field(description="A text (also in a list of one), or token ids, to go on from. No chat template.")
    max_tokens: int = Field(16, ge=1, le=MOST_TOKENS, description="The longest reply.")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="Log-probabilities, and of so many others.")
