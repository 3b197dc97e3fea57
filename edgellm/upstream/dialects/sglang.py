"""SGLang: one scored pass by /generate, which keeps the prompt in its cache.

Log-probabilities are asked for from the last token of the prompt on: from the first token on, the whole prompt would be
computed again, and from the first drafted token on, that token would have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm.errors import VerifierLost
from edgellm.spec.types import Sampling
from edgellm.upstream.dialects.served import (
    PROBE_SECONDS,
    ServedUpstream,
    UpstreamModel,
    best,
    entries,
    fields,
    maybe_count,
    number,
    raised,
    reply,
    sampling_fields,
    whole,
)
from edgellm.upstream.http_client import HttpClient, ServerRefused
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier, Top

_PATH = "/generate"


class SglangUpstream(ServedUpstream):
    """An SGLang server."""

    dialect, most_top, steers = "SGLang", 64, True

    async def _rows(self, request: RowRequest) -> RowReply:
        decides = request.sampling.greedy or request.decisive
        if self.tier is Tier.CONTINUE or (request.extra and not len(request.draft)):
            return await self._continue(request)
        if self.tier is Tier.SCORE and decides and request.steering is None:
            return await self._score(request)
        return await self._fan_out(request)

    async def _score(self, request: RowRequest) -> RowReply:
        ids, drafted = [*request.prefix.tolist(), *request.draft.tolist()], len(request.draft)
        body = _body(ids, 1, request.sampling, 0.0, max(1, request.top)) | {
            "logprob_start_len": len(request.prefix) - 1
        }
        answer = await self._client.post(_PATH, body)
        said = fields(fields(answer.json).get("meta_info"))
        found = entries(said.get("input_top_logprobs")) if drafted else []
        if len(found) < drafted:
            raise RowsUnusable(f"{len(found)} rows for {drafted} drafted tokens")
        tops = [_top(row) for row in found[len(found) - drafted :]]
        rows = [*(Row(best(top), top) for top in tops), *_written(answer.json, 1)[:1]]
        return reply(Tier.SCORE, rows, answer, maybe_count(said.get("cached_tokens")))

    async def _fan_out(self, request: RowRequest) -> RowReply:
        prefix, draft = request.prefix.tolist(), request.draft.tolist()
        prompts = [prefix + draft[:n] for n in range(len(draft) + 1)]
        temperature = 0.0 if request.decisive else request.sampling.temperature
        body = _body(prompts, 1, request.sampling, temperature, request.top)
        if request.steering is not None:
            body["sampling_params"]["logit_bias"] = {str(token): by for token, by in raised(request.steering).items()}
        answer = await self._client.post(_PATH, body)
        found = entries(answer.json)
        if len(found) != len(prompts):
            raise RowsUnusable(f"{len(found)} answers to {len(prompts)} prompts")
        rows = [_written(one, request.top)[0] for one in found]
        tier = Tier.SCORE if request.decisive else Tier.FAN_OUT
        return reply(tier, rows, answer, maybe_count(fields(found[0].get("meta_info")).get("cached_tokens")))

    async def _continue(self, request: RowRequest) -> RowReply:
        sampling = request.drawing
        body = _body(request.prefix.tolist(), request.places, sampling, sampling.temperature, request.top)
        answer = await self._client.post(_PATH, body)
        said = fields(fields(answer.json).get("meta_info"))
        rows = _written(answer.json, request.top)
        return reply(Tier.CONTINUE, rows, answer, maybe_count(said.get("cached_tokens")))

    async def tokenize(self, text: str) -> Sequence[int] | None:
        return await self._ids("/tokenize", {"model": self.name, "prompt": text, "add_special_tokens": False})

    async def detokenize(self, ids: Sequence[int]) -> str | None:
        body = {"model": self.name, "tokens": list(ids), "skip_special_tokens": False}
        return await self._text("/detokenize", body, "text")


def _body(ids: list[Any], tokens: int, sampling: Sampling, temperature: float, top: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input_ids": ids, "stream": False,
        "sampling_params": {"max_new_tokens": tokens, **sampling_fields(sampling, temperature)},
    }  # fmt: skip
    return body | ({"return_logprob": True, "top_logprobs_num": top} if top else {})


def _written(found: Any, top: int) -> list[Row]:
    """Return the rows of the written tokens. Raises RowsUnusable without tokens."""
    said = fields(fields(found).get("meta_info"))
    ids = [whole(token) for token in entries(found.get("output_ids"))]
    end = fields(said.get("finish_reason") or {}).get("matched")
    if type(end) is int and ids[-1:] != [end]:  # Some versions leave the end out.
        ids.append(end)
    if not ids:
        raise RowsUnusable("an answer without tokens")
    tops = [_top(row) for row in entries(said.get("output_top_logprobs"))] if top else []
    return [Row(token, tops[at] if at < len(tops) else None) for at, token in enumerate(ids)]


def _top(row: Any) -> Top:
    found = [entries(entry) for entry in entries(row)]
    if any(len(entry) < 2 for entry in found):
        raise RowsUnusable("a row whose entries are no pairs")
    return tuple((whole(entry[1]), number(entry[0])) for entry in found)


async def connect(client: HttpClient, served: UpstreamModel, token: int, asked: Tier | None) -> SglangUpstream:
    """Return the SGLang server, by the best tier or the one `asked` for; `token` is for a first question.

    Raises:
        VerifierLost, VerifierBusy: it is gone, or does not score drafts.
        TimeoutError: it does not answer in time.
    """
    body = _body([token] * 3, 1, Sampling(), 0.0, 1) | {"logprob_start_len": 1}
    try:
        answer = await client.post(_PATH, body, PROBE_SECONDS)
    except ServerRefused as error:
        raise VerifierLost(
            f"The server at {client.url} cannot verify: it refuses token ids (status {error.status}).",
            "Use a newer version of SGLang there.",
        ) from None
    with client.reading():
        scored = entries(fields(fields(answer.json).get("meta_info")).get("input_top_logprobs"))
        _written(answer.json, 1)
    can_score = bool(scored) and scored[-1] is not None
    best_tier = Tier.SCORE if can_score else Tier.FAN_OUT
    if asked is None or asked is Tier.SCORE:
        why = "it scores a chunk in one pass and keeps the prompt" if can_score else "it takes many prompts at once"
        return SglangUpstream(client, served, best_tier, why)
    return SglangUpstream(client, served, asked, f"as requested, {asked.value}")
