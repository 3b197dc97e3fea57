"""Ollama: /api/generate in raw mode, by text. Answers have the bytes of tokens, and no ids."""

from __future__ import annotations

from typing import Any

from edgellm.errors import VerifierLost
from edgellm.upstream.dialects.by_text import TextUpstream
from edgellm.upstream.dialects.served import UpstreamModel, entries, fields, maybe_count, number, text, whole
from edgellm.upstream.http_client import HttpClient, ServerRefused
from edgellm.upstream.rows import RowReply, RowRequest, RowsUnusable, Tier
from edgellm.upstream.text_border import TextBorders, Written


class OllamaUpstream(TextUpstream):
    """An Ollama server."""

    dialect = "Ollama"

    async def write(self, prompt: str, tokens: int, request: RowRequest, seed: int) -> tuple[Written, RowReply]:
        sampling = request.sampling
        body = {
            "model": self.name, "prompt": prompt, "raw": True, "stream": False, "logprobs": True,
            "truncate": False, "shift": False,  # Too long a text is refused, and never cut.
            "options": {
                "num_predict": tokens, "temperature": max(0.0, sampling.temperature), "top_k": max(0, sampling.top_k),
                "top_p": sampling.top_p, "min_p": sampling.min_p, "repeat_penalty": 1.0, "presence_penalty": 0.0,
                "frequency_penalty": 0.0, "seed": seed,
            },
        }  # fmt: skip
        answer = await self._client.post("/api/generate", body)
        found = fields(answer.json)
        written = Written(text(found.get("response")), found.get("done_reason") == "stop", _pieces(found))
        seconds = sum(_seconds(found.get(name)) for name in ("prompt_eval_duration", "eval_duration"))
        return written, RowReply(Tier.CONTINUE, (), None, seconds or None, answer.bytes_up, answer.bytes_down)


def _pieces(found: Any) -> tuple[bytes, ...] | None:
    """Return the bytes of each token; None in versions without them."""
    if not (said := found.get("logprobs")):
        return None
    pieces = []
    for one in map(fields, entries(said)):
        codes = [whole(code) for code in entries(one.get("bytes") or [])]
        if any(not 0 <= code < 256 for code in codes):
            raise RowsUnusable("bytes that are none")
        pieces.append(bytes(codes) or text(one.get("token")).encode())
    return tuple(pieces)


def _seconds(nanoseconds: Any) -> float:
    found = 0.0 if nanoseconds is None else number(nanoseconds) / 1e9
    return found if 0.0 <= found < 1e4 else 0.0


async def connect(
    client: HttpClient, served: UpstreamModel, borders: TextBorders, end_of_turn: int | None, token: int
) -> OllamaUpstream:
    """Return the Ollama server; `token` is for a first question.

    Raises:
        VerifierLost, VerifierBusy: it is gone, or completes no texts.
        TimeoutError: it does not answer in time.
    """
    try:
        with client.reading():
            await OllamaUpstream(client, served, borders, end_of_turn).probe(token)
        running = await client.get("/api/ps")
    except ServerRefused as error:
        raise VerifierLost(
            f"The server at {client.url} cannot verify: it refuses to complete a text (status {error.status}).",
            "Use a newer version of Ollama, and a model that it can run.",
        ) from None
    with client.reading():
        models = map(fields, entries(fields(running.json).get("models")))
        mine = [one for one in models if served.name in (one.get("name"), one.get("model"))]
    length = maybe_count(mine[0].get("context_length")) if mine else None
    return OllamaUpstream(client, UpstreamModel(served.name, length, served.owner), borders, end_of_turn)
