"""Servers whose /v1/completions, as OpenAI's, takes token ids for a prompt: vLLM, and gateways that hand such on."""

import asyncio
from typing import Any

import numpy as np

from edgellm.spec.types import GREEDY
from edgellm.upstream.dialects import served
from edgellm.upstream.http_client import ServerRefused
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier, Top, readable

PATH = "/v1/completions"
_ID = "token_id:"


class CompletionsUpstream(served.Upstream):
    """A server whose /v1/completions takes token ids, many prompts at once, and answers with token ids."""

    dialect = "completions"

    async def _rows(self, request: RowRequest) -> RowReply:
        if self.tier is Tier.CONTINUE or request.writes_on:
            return await self._continue(request)
        return await self.fan_out(request)

    async def fan_out(self, request: RowRequest) -> RowReply:
        """Return rows that were asked for by a prompt for each place."""
        # One seed would draw the same numbers at each place; decisive rows need no draw of the server's.
        temperature = 0.0 if request.decisive else request.sampling.temperature
        prompts = request.prompts
        answer = await self.client.post(PATH, self._body(prompts, 1, request, temperature))
        by_place: dict[int, Row] = {}
        for choice in answer.json["choices"]:
            by_place[choice.get("index", 0)] = _written(choice, request.top)[0]
        if sorted(by_place) != list(range(len(prompts))):
            raise RowsUnusable(f"{len(by_place)} choices for {len(prompts)} prompts")
        cached = served.cached_tokens(answer)
        if cached is not None and cached > len(prompts[-1]):  # Some count all prompts, vLLM the last.
            cached //= len(prompts)
        return served.reply(request.fanned_out, [by_place[place] for place in range(len(prompts))], answer, cached)

    async def _continue(self, request: RowRequest) -> RowReply:
        drawing = request.drawing
        body = self._body(request.prefix.tolist(), request.places, request, drawing.temperature)
        body |= {} if drawing.greedy else {"seed": served.seed_at(drawing, len(request.prefix))}
        answer = await self.client.post(PATH, body)
        return served.reply(
            Tier.CONTINUE, _written(answer.json["choices"][0], request.top), answer, served.cached_tokens(answer)
        )

    def _body(self, prompt: list[Any], tokens: int, request: RowRequest, temperature: float) -> dict[str, Any]:
        body = {
            "model": self.name, "prompt": prompt, "max_tokens": tokens, "stream": False,
            "return_token_ids": True, **served.sampling_fields(request.sampling, temperature),
        }  # fmt: skip
        if request.top:
            body |= {"logprobs": request.top, "return_tokens_as_token_ids": True}
        return body


def _written(choice: Any, top: int) -> tuple[Row, ...]:
    """Return the rows of the tokens of a choice."""
    tops = [_top(one) for one in choice["logprobs"]["top_logprobs"]] if top else ()
    return served.with_tops(choice["token_ids"], tops)


def _top(found: Any) -> Top:
    return tuple((_token_id(token), logprob) for token, logprob in found.items())


def _token_id(found: Any) -> int:
    if not found.startswith(_ID):
        raise RowsUnusable("tokens without their ids")
    return int(found.removeprefix(_ID))


async def takes_ids(server: served.UnknownServer, top: int = 0) -> str:
    """Ask for a token behind two prompts of ids; return why the server cannot verify by them, else "". Raises
    VerifierLost, VerifierBusy: as `HttpClient.post`, for other reasons than that."""
    ids = np.array([server.token], np.int32)
    try:
        async with asyncio.timeout(served.PROBE_SECONDS):
            with readable():
                await CompletionsUpstream(server, Tier.FAN_OUT, "").fan_out(RowRequest(ids, ids, GREEDY, top))
    except ServerRefused as error:
        return f"it refuses several prompts of token ids (status {error.status})"
    except RowsUnusable as error:
        return f"it answers prompts of token ids with {error}"
    return ""


async def connect(server: served.UnknownServer) -> CompletionsUpstream:
    """Return the server, of whatever kind. Raises VerifierLost if it takes no token ids."""
    if refusal := await takes_ids(server):
        raise server.unusable(refusal, "Use vLLM, SGLang, llama-server or Ollama.")
    return CompletionsUpstream(server, *server.way(Tier.FAN_OUT, "it takes many prompts of token ids at once"))
