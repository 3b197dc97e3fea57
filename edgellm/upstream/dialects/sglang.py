"""SGLang: one scored pass by /generate, which keeps the prompt in its cache.

Log-probabilities are asked for from the last token of the prompt on: from the first token on, the whole prompt would be
computed again, and from the first drafted token on, that token would have none.
"""

from typing import Any

from edgellm.spec.types import Sampling
from edgellm.upstream.dialects import served
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier, Top

_PATH = "/generate"


class SglangUpstream(served.Upstream):
    """An SGLang server."""

    dialect, log_switch, most_top, steers, decoded = "SGLang", "--log-requests", 64, True, "text"

    async def _rows(self, request: RowRequest) -> RowReply:
        decides = request.sampling.greedy or request.decisive
        if self.tier is Tier.CONTINUE or request.writes_on:
            return await self._continue(request)
        if self.tier is Tier.SCORE and decides and request.steering is None:
            return await self._score(request)
        return await self._fan_out(request)

    async def _score(self, request: RowRequest) -> RowReply:
        drafted = len(request.draft)
        body = _body(request.prompts[-1], 1, request.sampling, 0.0, max(1, request.top))
        answer = await self.client.post(_PATH, body | {"logprob_start_len": len(request.prefix) - 1})
        said = answer.json["meta_info"]
        found = said["input_top_logprobs"] if drafted else []
        if len(found) < drafted:
            raise RowsUnusable(f"{len(found)} rows for {drafted} drafted tokens")
        rows = [served.scored(_top(row)) for row in found[len(found) - drafted :]]
        rows += _written(answer.json, 1)[:1]
        return served.reply(Tier.SCORE, rows, answer, served.maybe_count(said.get("cached_tokens")))

    async def _fan_out(self, request: RowRequest) -> RowReply:
        temperature = 0.0 if request.decisive else request.sampling.temperature
        body = _body(request.prompts, 1, request.sampling, temperature, request.top)
        if request.steering is not None:
            body["sampling_params"]["logit_bias"] = {
                str(token): by for token, by in served.raised(request.steering).items()
            }
        answer = await self.client.post(_PATH, body)
        found = answer.json
        if len(found) != len(request.prompts):
            raise RowsUnusable(f"{len(found)} answers to {len(request.prompts)} prompts")
        rows = [_written(one, request.top)[0] for one in found]
        cached = served.maybe_count(found[0]["meta_info"].get("cached_tokens"))
        return served.reply(request.fanned_out, rows, answer, cached)

    async def _continue(self, request: RowRequest) -> RowReply:
        sampling = request.drawing
        body = _body(request.prefix.tolist(), request.places, sampling, sampling.temperature, request.top)
        answer = await self.client.post(_PATH, body)
        cached = served.maybe_count(answer.json["meta_info"].get("cached_tokens"))
        return served.reply(Tier.CONTINUE, _written(answer.json, request.top), answer, cached)


def _body(ids: list[Any], tokens: int, sampling: Sampling, temperature: float, top: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input_ids": ids, "stream": False,
        "sampling_params": {"max_new_tokens": tokens, **served.sampling_fields(sampling, temperature)},
    }  # fmt: skip
    return body | ({"return_logprob": True, "top_logprobs_num": top} if top else {})


def _written(found: Any, top: int) -> tuple[Row, ...]:
    """Return the rows of the written tokens."""
    said, ids = found["meta_info"], [*found["output_ids"]]
    end = (said.get("finish_reason") or {}).get("matched")
    if type(end) is int and ids[-1:] != [end]:  # Some versions leave the end out.
        ids.append(end)
    return served.with_tops(ids, [_top(row) for row in said["output_top_logprobs"]] if top else ())


def _top(row: Any) -> Top:
    return tuple((entry[1], entry[0]) for entry in row)


async def connect(server: served.UnknownServer) -> SglangUpstream | None:
    """Return the server if it is an SGLang, by the requested tier or the best. Raises VerifierLost, VerifierBusy: it is
    gone, or does not score drafts; TimeoutError: it does not answer in time."""
    if server.owner != "sglang":
        return None
    body = _body([server.token] * 3, 1, Sampling(), 0.0, 1) | {"logprob_start_len": 1}
    answer = await server.client.post(_PATH, body, served.PROBE_SECONDS)
    rows = answer.json["meta_info"]["input_top_logprobs"]
    _written(answer.json, 1)
    if rows and rows[-1] is not None:
        return SglangUpstream(server, *server.way(Tier.SCORE, "it scores a chunk in one pass and keeps the prompt"))
    return SglangUpstream(server, *server.way(Tier.FAN_OUT, "it takes many prompts at once"))
