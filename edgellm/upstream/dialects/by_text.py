"""Servers whose /v1/completions takes texts: LM Studio, TabbyAPI, mlx-lm, llama-cpp-python's server and others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.upstream.dialects.by_ids import PATH, takes_ids
from edgellm.upstream.dialects.served import UnknownServer, cached_tokens, reply, sampling_fields
from edgellm.upstream.dialects.texts import TextUpstream, Written
from edgellm.upstream.http_client import ServerRefused
from edgellm.upstream.rows import RowReply, RowRequest, RowsUnusable, Tier, readable


@dataclass(frozen=True, slots=True)
class TextDialect:
    """A kind of server that completes texts: its `name`, `extra` fields of a request, and the path of its tokenizer,
    with the name of a text there and other fields. `chooses_bos`: a request decides on BOS before its text."""

    name: str
    extra: Mapping[str, Any]
    tokenizer: tuple[str, str, Mapping[str, Any]] | None = None
    chooses_bos: bool = False


KINDS: Mapping[str, TextDialect] = {
    "me": TextDialect("llama-cpp-python", {"repeat_penalty": 1.0}, ("/extras/tokenize", "input", {})),
    "tabbyAPI": TextDialect(
        "TabbyAPI",
        {"token_healing": False},
        ("/v1/token/encode", "text", {"add_bos_token": False, "encode_special_tokens": True}),
        chooses_bos=True,
    ),
    "organization_owner": TextDialect("LM Studio", {"repeat_penalty": 1.0}),
}
"""The kinds of servers, by the owner that they name for their models."""
OTHER = TextDialect("completions by text", {})


class TextCompletionsUpstream(TextUpstream):
    """A server whose /v1/completions takes texts."""

    def __init__(self, server: UnknownServer, form: TextDialect) -> None:
        """Connect to a server of the kind `form`."""
        super().__init__(server)
        self._form, self.dialect = form, form.name

    async def write(self, prompt: str, tokens: int, request: RowRequest, seed: int) -> tuple[Written, RowReply]:
        sampling = request.sampling
        body = {
            "model": self.name, "prompt": prompt, "max_tokens": tokens, "stream": False,
            **sampling_fields(sampling, sampling.temperature), **self._form.extra,
        }  # fmt: skip
        body["top_k"] = max(0, body["top_k"])  # Only vLLM takes -1 for all.
        if self._form.chooses_bos:
            body["add_bos_token"] = self._borders.has_begin
        if not sampling.greedy:
            body["seed"] = seed
        answer = await self.client.post(PATH, body)
        choice = answer.json["choices"][0]
        written = Written(choice["text"], choice.get("finish_reason") == "stop")
        return written, reply(Tier.CONTINUE, (), answer, cached_tokens(answer))

    async def tokenize(self, text: str) -> Sequence[int] | None:
        if self._form.tokenizer is None:
            return None
        path, name, more = self._form.tokenizer
        found = await self._told(path, {name: text, **more}, "tokens")
        return None if found is None else self._borders.without_begin(found)


async def connect(server: UnknownServer) -> TextCompletionsUpstream | None:
    """Return the server if it is of a known kind, or takes no token ids. Raises VerifierLost, VerifierBusy: it is gone,
    or completes no texts."""
    kind = KINDS.get(server.owner)
    if kind is None and not await takes_ids(server):
        return None
    found = TextCompletionsUpstream(server, kind or OTHER)
    try:
        with readable():
            await found.probe(server.token)
    except ServerRefused as error:
        refusal = f"it refuses to complete a text (status {error.status})"
    except RowsUnusable as error:
        refusal = f"it completes a text with {error}"
    else:
        return found
    advice = "Use vLLM, SGLang, llama-server, Ollama, or another server with OpenAI's /v1/completions."
    raise server.unusable(refusal, advice)
