"""Conversion of requests to options, messages and prompts for the pair."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engine import Message
from edgellm.http.handlers import Writer
from edgellm.http.schemas.errors import Fault, Refused, refuse
from edgellm.http.schemas.requests import ChatRequest, CompletionRequest, Sampled
from edgellm.spec.params import ReplyOptions

_ROLES = {"developer": "system"}


def check_model(name: str | None, writer: Writer) -> None:
    """Raise Refused where another model is asked for than the one that is here."""
    if name not in (None, writer.name):
        raise Refused(
            Fault(404, f"There is no model {name!r} here, only {writer.name!r}.", code="model_not_found", param="model")
        )


def chat_options(ask: ChatRequest, writer: Writer) -> ReplyOptions:
    """Return the options of a chat request.

    Raises:
        Refused, InvalidOption: they contradict each other, or make no sense.
    """
    if ask.top_logprobs is not None and not ask.logprobs:
        raise refuse("top_logprobs is given, and logprobs is not true.", "top_logprobs")
    both = (ask.max_tokens, ask.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise refuse("max_tokens and max_completion_tokens are given and differ. Give one.", "max_completion_tokens")
    most = next((one for one in both if one is not None), writer.pair.context_length)
    return _options(ask, writer, most, (ask.top_logprobs or 0) if ask.logprobs else None)


def completion_options(ask: CompletionRequest, writer: Writer) -> ReplyOptions:
    """Return the options of a completion request. Raises what `chat_options` raises."""
    return _options(ask, writer, ask.max_tokens, ask.logprobs)


def messages(ask: ChatRequest) -> list[Message]:
    return [Message(_ROLES.get(message.role, message.role), message.text()) for message in ask.messages]


def plain_prompt(ask: CompletionRequest) -> str | list[int]:
    if isinstance(ask.prompt, str):
        return ask.prompt
    return "".join(one for one in ask.prompt if isinstance(one, str)) or [
        one for one in ask.prompt if isinstance(one, int)
    ]


def _options(ask: Sampled, writer: Writer, max_tokens: int, logprobs: int | None) -> ReplyOptions:
    check_model(ask.model, writer)
    if ask.stream_options is not None and not ask.stream:
        raise refuse("stream_options is given, and stream is not true.", "stream_options")
    return replace(
        writer.options,
        max_tokens=max_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        seed=None if ask.seed is None else ask.seed & (2**64 - 1),
        stop=ask.stops(),
        logprobs=logprobs,
        budget=ask.budget,
        gate=ask.gate,
        retrieval=ask.retrieval if ask.retrieval != "auto" else writer.options.retrieval,
    )
