"""OpenAI's objects, made from a reply; `timings` as in llama.cpp, and under `edgellm` our own extension."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from edgellm.http.streaming import TextDelta
from edgellm.spec.types import Logprobs, Notice, Summary, Token

Json: TypeAlias = dict[str, Any]
Bytes: TypeAlias = Callable[[int], bytes]
"""Returns the bytes of a token."""

_LEAST = -9999.0  # OpenAI's value for the logarithm of 0
_ENDS = {"stop": "stop", "length": "length", "cancelled": "stop"}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that every object of one reply begins with."""

    kind: str
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, kind: str, **rest: Any) -> Json:
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return about | {"system_fingerprint": "edgellm"} | rest


class ResponseShape(Protocol):
    """The format of one of the two kinds of reply, whole or in chunks."""

    def opening(self) -> Iterator[Json]: ...

    def chunk(self, piece: TextDelta) -> Json: ...

    def notice(self, notice: Notice) -> Json: ...

    def closing(self, summary: Summary) -> Json: ...

    def usage(self, summary: Summary) -> Json: ...

    def whole(self, pieces: Sequence[TextDelta], notices: Sequence[Notice], summary: Summary) -> Json: ...


class ChatShape:
    """The format of /v1/chat/completions."""

    def __init__(self, model: str, piece: Bytes) -> None:
        self._head = ResponseHead("chat.completion", f"chatcmpl-{secrets.token_hex(12)}", model)
        self._piece = piece

    def opening(self) -> Iterator[Json]:
        yield self._delta({"role": "assistant", "content": ""})

    def chunk(self, piece: TextDelta) -> Json:
        return self._delta({"content": piece.text}, self._told([piece])) | {"edgellm": {"tokens": tokens([piece])}}

    def notice(self, notice: Notice) -> Json:
        return self._delta({}) | {"edgellm": {"notice": notice.text}}

    def closing(self, summary: Summary) -> Json:
        end = self._delta({}, None, _ENDS[summary.finish_reason])
        return end | {"timings": timings(summary), "edgellm": {"summary": figures(summary)}}

    def usage(self, summary: Summary) -> Json:
        return self._head.of(f"{self._head.kind}.chunk", choices=[], usage=usage(summary))

    def whole(self, pieces: Sequence[TextDelta], notices: Sequence[Notice], summary: Summary) -> Json:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": self._told(pieces),
                  "finish_reason": _ENDS[summary.finish_reason]}  # fmt: skip
        return self._head.of(self._head.kind, choices=[choice], **rest_of(pieces, notices, summary))

    def _delta(self, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head.of(f"{self._head.kind}.chunk", choices=[choice])

    def _told(self, pieces: Sequence[TextDelta]) -> Json | None:
        content = [self._token(token, said) for token, said in _said(pieces)]
        return {"content": content, "refusal": None} if content else None

    def _token(self, token: Token, said: Logprobs) -> Json:
        others = [
            self._named(other, value) for other, value in zip(said.ids.tolist(), said.logprobs.tolist(), strict=True)
        ]
        return self._named(token.id, said.own) | {"top_logprobs": others}

    def _named(self, token: int, value: float) -> Json:
        data = self._piece(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(value, _LEAST), "bytes": list(data)}


class CompletionShape:
    """The format of /v1/completions."""

    def __init__(self, model: str, piece: Bytes) -> None:
        self._head = ResponseHead("text_completion", f"cmpl-{secrets.token_hex(12)}", model)
        self._piece = piece
        self._written = 0  # characters, for the offsets of tokens

    def opening(self) -> Iterator[Json]:
        return iter(())

    def chunk(self, piece: TextDelta) -> Json:
        return self._choice(piece.text, self._told([piece])) | {"edgellm": {"tokens": tokens([piece])}}

    def notice(self, notice: Notice) -> Json:
        return self._choice("") | {"edgellm": {"notice": notice.text}}

    def closing(self, summary: Summary) -> Json:
        end = self._choice("", None, _ENDS[summary.finish_reason])
        return end | {"timings": timings(summary), "edgellm": {"summary": figures(summary)}}

    def usage(self, summary: Summary) -> Json:
        return self._head.of(self._head.kind, choices=[], usage=usage(summary))

    def whole(self, pieces: Sequence[TextDelta], notices: Sequence[Notice], summary: Summary) -> Json:
        text = "".join(piece.text for piece in pieces)
        done = self._choice(text, self._told(pieces), _ENDS[summary.finish_reason])
        return done | rest_of(pieces, notices, summary)

    def _choice(self, text: str, logprobs: Json | None = None, finish: str | None = None) -> Json:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._head.of(self._head.kind, choices=[choice])

    def _told(self, pieces: Sequence[TextDelta]) -> Json | None:
        said = list(_said(pieces))
        offsets = []
        for piece in pieces:
            offsets += [self._written] * len(piece.tokens)
            self._written += len(piece.text)
        if not said:
            return None
        return {
            "tokens": [self._text(token.id) for token, _ in said],
            "token_logprobs": [max(one.own, _LEAST) for _, one in said],
            "top_logprobs": [
                {self._text(other): max(value, _LEAST) for other, value in zip(one.ids.tolist(), one.logprobs.tolist(),
                                                                               strict=True)}
                for _, one in said
            ],
            "text_offset": offsets,
        }  # fmt: skip

    def _text(self, token: int) -> str:
        return self._piece(token).decode("utf-8", "replace")


def _said(pieces: Sequence[TextDelta]) -> Iterator[tuple[Token, Logprobs]]:
    return ((token, token.logprobs) for piece in pieces for token in piece.tokens if token.logprobs is not None)


def tokens(pieces: Sequence[TextDelta]) -> list[Json]:
    """Return tokens with their sources. `text`: the characters that a token completes; joined, they are the content."""
    return [
        {
            "id": token.id,
            "text": piece.text if at == len(piece.tokens) - 1 else "",
            "source": token.source.value,
            "confidence": _short(token.confidence),
            "round": token.round,
        }
        for piece in pieces
        for at, token in enumerate(piece.tokens)
    ]


def rest_of(pieces: Sequence[TextDelta], notices: Sequence[Notice], summary: Summary) -> Json:
    """Return the fields of a whole reply beside its text."""
    ours = {"tokens": tokens(pieces), "notices": [notice.text for notice in notices], "summary": figures(summary)}
    return {"usage": usage(summary), "timings": timings(summary), "edgellm": ours}


def usage(summary: Summary) -> Json:
    return {
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.tokens,
        "total_tokens": summary.prompt_tokens + summary.tokens,
    }


def timings(summary: Summary) -> Json:
    """Return llama.cpp's timings: the prompt until its first token, then the later ones; `draft_n` were tested."""
    first, rate = summary.ttft_ms or 0.0, summary.tokens_per_second
    later = summary.seconds_decoding * 1e3
    return {
        "prompt_n": summary.prompt_tokens,
        "prompt_ms": _short(first),
        "prompt_per_token_ms": _short(first / summary.prompt_tokens) if summary.prompt_tokens else 0.0,
        "prompt_per_second": _short(summary.prompt_tokens / first * 1e3) if first else 0.0,
        "predicted_n": summary.tokens,
        "predicted_ms": _short(later),
        "predicted_per_token_ms": _short(1e3 / rate) if rate else 0.0,
        "predicted_per_second": _short(rate) if rate else 0.0,
        "draft_n": summary.tested,
        "draft_n_accepted": summary.accepted,
    }


def figures(summary: Summary) -> Json:
    """Return the figures that llama.cpp has no names for."""
    return {
        "finish_reason": summary.finish_reason,
        "stopped_by": summary.stopped_by or None,
        "seed": summary.seed,
        "rounds": summary.rounds,
        "tokens_per_round": _short(summary.tokens / summary.rounds) if summary.rounds else None,
        "drafted": summary.drafted,
        "share_verified": _short(summary.share_verified),
        "acceptance_rate": _short(summary.acceptance_rate),
        "mean_acceptance_length": _short(summary.mean_acceptance_length),
        "verifier_passes_per_token": _short(summary.verifier_passes_per_token),
        "share_offloaded": _short(summary.share_offloaded),
        "retrieved": summary.retrieved,
        "rtt_ms_p50": _short(summary.rtt_ms),
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
