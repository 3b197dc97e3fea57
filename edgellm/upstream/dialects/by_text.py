"""Servers that take no token ids: LM Studio, TabbyAPI, mlx-lm, llama-cpp-python's server and other text completions.

The server is sent the text so far and writes as many tokens as a chunk has and one more. Both sides have the same
prefix tokens, since texts end at borders that survive.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.errors import VerifierLost
from edgellm.spec.types import GREEDY, NO_IDS
from edgellm.upstream.dialects.served import (
    PROBE_SECONDS,
    ServedUpstream,
    UpstreamModel,
    cached_tokens,
    entries,
    fields,
    sampling_fields,
    seed_at,
    text,
    whole,
)
from edgellm.upstream.http_client import HttpAnswer, HttpClient, ServerRefused
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier
from edgellm.upstream.text_border import TextBorders, Written

_TRIES = 3
_MORE = 8  # further tokens to ask for after too short an answer


class TextUpstream(ServedUpstream):
    """A server that continues a text."""

    by_text = True

    def __init__(
        self, client: HttpClient, served: UpstreamModel, borders: TextBorders, end_of_turn: int | None
    ) -> None:
        """Connect; `end_of_turn` is the token that ends a turn, which servers leave out of their texts."""
        super().__init__(client, served, Tier.CONTINUE, "it takes no token ids, and continues a text")
        self._borders, self._end_of_turn = borders, end_of_turn

    @abstractmethod
    async def write(self, prompt: str, tokens: int, request: RowRequest, seed: int) -> tuple[Written, RowReply]:
        """Return the server's continuation of `prompt`, up to `tokens` tokens, and a reply without rows for the
        costs.

        Raises:
            RowsUnusable: the answer is something else.
            VerifierLost, VerifierBusy: as `Upstream.rows`.
        """

    async def probe(self, token: int) -> None:
        """Continue a text of `token`, so that the server loads its model now.

        Raises:
            RowsUnusable, VerifierLost, VerifierBusy: as `write`.
            TimeoutError: it takes too long.
        """
        ids = np.array([token], dtype=np.int32)
        async with asyncio.timeout(PROBE_SECONDS):
            await self.write(self._borders.text(ids) or "", 1, RowRequest(ids, NO_IDS, GREEDY), 0)

    async def _rows(self, request: RowRequest) -> RowReply:
        prefix = request.prefix
        border, prompt = await asyncio.to_thread(self._borders.last, prefix)
        tokens = len(prefix) - border + request.places
        for _ in range(_TRIES):
            written, reply = await self.write(prompt, tokens, request, seed_at(request.sampling, border))
            own = await asyncio.to_thread(self._borders.behind, prefix, border, written)
            end = [] if self._end_of_turn is None else [self._end_of_turn]
            if written.ended:
                own = own if own[-1:] == end else own + end
            else:
                own = await asyncio.to_thread(self._borders.safe, prefix, own)
            if own:
                rows = tuple(Row(token) for token in own)
                return RowReply(
                    Tier.CONTINUE, rows, reply.cached, reply.seconds, reply.bytes_up, reply.bytes_down
                )  # fmt: skip
            tokens += _MORE
        raise RowsUnusable("no text")


@dataclass(frozen=True, slots=True)
class TextDialect:
    """A kind of server that completes texts: its `name`, `extra` fields of a request, and the path of its tokenizer,
    with the name of a text there and other fields. `names_ids`: answers have the ids of tokens. `chooses_bos`: a
    request decides on BOS before its text."""

    name: str
    extra: Mapping[str, Any]
    tokenizer: tuple[str, str, Mapping[str, Any]] | None = None
    names_ids: bool = False
    chooses_bos: bool = False


LLAMA_CPP_PYTHON = TextDialect("llama-cpp-python", {"repeat_penalty": 1.0}, ("/extras/tokenize", "input", {}))
TABBY = TextDialect(
    "TabbyAPI",
    {"token_healing": False},
    ("/v1/token/encode", "text", {"add_bos_token": False, "encode_special_tokens": True}),
    chooses_bos=True,
)
LM_STUDIO = TextDialect("LM Studio", {"repeat_penalty": 1.0})
NAMING = TextDialect("mlx-lm", {"logprobs": True}, names_ids=True)
PLAIN = TextDialect("completions by text", {})
KINDS: Mapping[str, TextDialect] = {"me": LLAMA_CPP_PYTHON, "tabbyAPI": TABBY, "organization_owner": LM_STUDIO}
"""The kinds of servers, by the owner that they name for their models."""


class TextCompletionsUpstream(TextUpstream):
    """A server whose /v1/completions takes texts."""

    def __init__(
        self, client: HttpClient, served: UpstreamModel, borders: TextBorders, end_of_turn: int | None,
        form: TextDialect,
    ) -> None:  # fmt: skip
        """Connect to a server of the kind `form`."""
        super().__init__(client, served, borders, end_of_turn)
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
        answer = await self._client.post("/v1/completions", body)
        written = _written(answer, names_ids=self._form.names_ids)
        return written, RowReply(
            Tier.CONTINUE, (), cached_tokens(answer), None, answer.bytes_up, answer.bytes_down
        )  # fmt: skip

    async def tokenize(self, text: str) -> Sequence[int] | None:
        if self._form.tokenizer is None:
            return None
        path, name, more = self._form.tokenizer
        found = await self._ids(path, {name: text, **more})
        return None if found is None else self._borders.without_begin(found)


def _written(answer: HttpAnswer, *, names_ids: bool) -> Written:
    """Return the text of a completion."""
    choices = entries(fields(answer.json).get("choices"))
    if not choices:
        raise RowsUnusable("no choice")
    choice = fields(choices[0])
    ids = None
    if names_ids:
        content = entries(fields(choice.get("logprobs")).get("content"))
        ids = tuple(whole(fields(one).get("id")) for one in content)
    return Written(text(choice.get("text")), choice.get("finish_reason") == "stop", ids=ids)


async def connect(
    client: HttpClient, served: UpstreamModel, borders: TextBorders, end_of_turn: int | None, token: int
) -> TextCompletionsUpstream:
    """Return the server whose /v1/completions takes texts; `token` is for a first question.

    Raises:
        VerifierLost, VerifierBusy: it is gone, or completes no texts.
    """
    kind = KINDS.get(served.owner)
    refusal = "it completes no texts"
    for dialect in (NAMING, PLAIN) if kind is None else (kind,):
        found = TextCompletionsUpstream(client, served, borders, end_of_turn, dialect)
        try:
            await found.probe(token)
        except ServerRefused as error:
            refusal = f"it refuses to complete a text (status {error.status})"
        except RowsUnusable as error:
            refusal = f"it completes a text with {error}"
        else:
            return found
    raise VerifierLost(
        f"The server at {client.url} cannot verify: {refusal}.",
        "Use vLLM, SGLang, llama-server, Ollama, or another server with OpenAI's /v1/completions.",
    )
