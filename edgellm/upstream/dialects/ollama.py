"""Ollama: /api/generate in raw mode, by text. Answers have the bytes of tokens, and no ids."""

from base64 import b64decode
from dataclasses import replace
from typing import Any

from edgellm.engine.gguf.writer import MAX_TOKENIZER
from edgellm.upstream.dialects import read
from edgellm.upstream.dialects.served import PROBE_SECONDS, UnknownServer, reply
from edgellm.upstream.dialects.texts import TextUpstream, Written
from edgellm.upstream.rows import RowReply, RowRequest, RowsUnusable, Tier


class OllamaUpstream(TextUpstream):
    """An Ollama server."""

    dialect, log_switch = "Ollama", "OLLAMA_DEBUG"

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
        answer = await self.client.post("/api/generate", body)
        found = read.fields(answer.json)
        written = Written(read.text(found.get("response")), found.get("done_reason") == "stop", _pieces(found))
        seconds = read.seconds(found.get("prompt_eval_duration"), found.get("eval_duration"), per_second=1e9)
        return written, reply(Tier.CONTINUE, (), answer, seconds=seconds)


class EdgellmUpstream(OllamaUpstream):
    """A server of edgellm, which also sends its tokenizer."""

    dialect, log_switch = "edgellm", ""

    async def tokenizer(self) -> bytes | None:
        answer = await self.client.post(
            "/api/show", {"model": self.name, "verbose": True}, PROBE_SECONDS, 2 * MAX_TOKENIZER
        )
        try:
            return b64decode(read.text(read.fields(answer.json).get("edgellm_tokenizer") or ""), validate=True) or None
        except ValueError:
            raise RowsUnusable("a tokenizer that is no base64") from None


def _pieces(found: Any) -> tuple[bytes, ...] | None:
    """Return the bytes of each token; None in versions without them."""
    if not (said := found.get("logprobs")):
        return None
    pieces = []
    for one in map(read.fields, read.entries(said)):
        codes = [read.whole(code) for code in read.entries(one.get("bytes") or [])]
        if any(not 0 <= code < 256 for code in codes):
            raise RowsUnusable("bytes that are none")
        pieces.append(bytes(codes) or read.text(one.get("token")).encode())
    return tuple(pieces)


async def connect(server: UnknownServer) -> OllamaUpstream | None:
    """Return the server if it is an Ollama, or edgellm itself. Raises VerifierLost, VerifierBusy: it is gone, or
    completes no texts; TimeoutError: it does not answer in time."""
    if "version" not in (facts := await server.facts("/api/version")):
        return None
    kind = EdgellmUpstream if "edgellm" in facts else OllamaUpstream
    await kind(server).probe(server.token)
    running = await server.client.get("/api/ps")
    models = map(read.fields, read.entries(read.fields(running.json).get("models")))
    mine = [one for one in models if server.model in (one.get("name"), one.get("model"))]
    length = read.maybe_count(mine[0].get("context_length")) if mine else None
    return kind(replace(server, positions=length or server.positions))
