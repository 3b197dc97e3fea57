"""OpenAI's completions with token ids for a prompt: vLLM, and gateways that hand such prompts on."""

from __future__ import annotations

from typing import Any

from edgellm.upstream.dialects.served import (
    NEUTRAL,
    PROBE_SECONDS,
    ServedUpstream,
    UpstreamModel,
    cached_tokens,
    entries,
    fields,
    number,
    reply,
    sampling_fields,
    seed_at,
    text,
    whole,
)
from edgellm.upstream.http_client import HttpClient, ServerRefused
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier, Top

_ID = "token_id:"


class CompletionsUpstream(ServedUpstream):
    """A server whose /v1/completions takes token ids, many prompts at once, and answers with token ids."""

    dialect = "completions"

    def __init__(self, client: HttpClient, served: UpstreamModel, tier: Tier, reason: str, *, top: int = 0) -> None:
        """Connect; rows can include `top` likeliest tokens."""
        super().__init__(client, served, tier, reason)
        self.most_top = top

    async def _rows(self, request: RowRequest) -> RowReply:
        if self.tier is Tier.CONTINUE or (request.extra and not len(request.draft)):
            return await self._continue(request)
        return await self._fan_out(request)

    async def _fan_out(self, request: RowRequest) -> RowReply:
        prefix, draft = request.prefix.tolist(), request.draft.tolist()
        prompts = [prefix + draft[:n] for n in range(len(draft) + 1)]
        # One seed would draw the same numbers at each place; decisive rows need no draw of the server's.
        greedy = request.decisive or request.sampling.greedy
        body = self._body(prompts, 1, request, 0.0 if greedy else request.sampling.temperature)
        answer = await self._client.post("/v1/completions", body)
        by_place: dict[int, Row] = {}
        for choice in entries(fields(answer.json).get("choices")):
            by_place[whole(fields(choice).get("index", 0))] = _written(choice, request.top)[0]
        if sorted(by_place) != list(range(len(prompts))):
            raise RowsUnusable(f"{len(by_place)} choices for {len(prompts)} prompts")
        rows = tuple(by_place[place] for place in range(len(prompts)))
        tier = Tier.SCORE if request.decisive else Tier.FAN_OUT
        cached = cached_tokens(answer)
        if cached is not None and cached > len(prompts[-1]):  # Some count all prompts, vLLM the last.
            cached //= len(prompts)
        return reply(tier, rows, answer, cached)

    async def _continue(self, request: RowRequest) -> RowReply:
        position = len(request.prefix)
        drawing = request.drawing
        body = self._body(request.prefix.tolist(), request.places, request, drawing.temperature)
        body |= {} if drawing.greedy else {"seed": seed_at(drawing, position)}
        answer = await self._client.post("/v1/completions", body)
        choices = entries(fields(answer.json).get("choices"))
        if not choices:
            raise RowsUnusable("no choice")
        return reply(Tier.CONTINUE, _written(choices[0], request.top), answer, cached_tokens(answer))

    def _body(self, prompt: list[Any], tokens: int, request: RowRequest, temperature: float) -> dict[str, Any]:
        body = {
            "model": self.name, "prompt": prompt, "max_tokens": tokens, "stream": False,
            "return_token_ids": True, **sampling_fields(request.sampling, temperature),
        }  # fmt: skip
        if request.top:
            body |= {"logprobs": request.top, "return_tokens_as_token_ids": True}
        return body


def _written(choice: Any, top: int) -> tuple[Row, ...]:
    """Return the rows of the tokens of a choice. Raises RowsUnusable without ids."""
    said = fields(fields(choice).get("logprobs") or {})
    if choice.get("token_ids") is not None:
        ids = [whole(token) for token in entries(choice["token_ids"])]
    else:
        ids = [_token_id(one) for one in entries(said.get("tokens"))]
    if not ids:
        raise RowsUnusable("a choice without tokens")
    if not top:
        return tuple(Row(token) for token in ids)
    tops = [_top(one) for one in entries(said.get("top_logprobs"))]
    if len(tops) != len(ids):
        raise RowsUnusable(f"{len(tops)} rows of log-probabilities for {len(ids)} tokens")
    return tuple(Row(token, found) for token, found in zip(ids, tops, strict=True))


def _top(found: Any) -> Top:
    return tuple((_token_id(token), number(logprob)) for token, logprob in fields(found).items())


def _token_id(found: Any) -> int:
    name = text(found)
    digits = name.removeprefix(_ID)
    if not name.startswith(_ID) or not digits.isascii() or not digits.isdigit() or len(digits) > 9:
        raise RowsUnusable("tokens without their ids")
    return int(digits)


async def takes_ids(client: HttpClient, served: UpstreamModel, token: int, top: int = 0) -> str:
    """Ask for a token behind two prompts of ids; return why the server cannot verify by them, else "".

    Raises:
        VerifierLost, VerifierBusy: as `HttpClient.post`, for other reasons than that.
    """
    body: dict[str, Any] = {
        "model": served.name, "prompt": [[token], [token, token]], "max_tokens": 1, "temperature": 0.0,
        "stream": False, "return_token_ids": True, **NEUTRAL,
    }  # fmt: skip
    if top:
        body |= {"logprobs": top, "return_tokens_as_token_ids": True}
    try:
        answer = await client.post("/v1/completions", body, PROBE_SECONDS)
        choices = entries(fields(answer.json).get("choices"))
        rows = [_written(choice, top) for choice in choices]
    except ServerRefused as error:
        return f"it refuses several prompts of token ids (status {error.status})"
    except RowsUnusable as error:
        return f"it answers prompts of token ids with {error}"
    if len(rows) != 2 or any(len(one) != 1 for one in rows):
        return f"it answers two prompts with {len(rows)} tokens"
    return ""
