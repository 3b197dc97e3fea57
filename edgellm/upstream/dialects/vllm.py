"""vLLM: one scored pass by /inference/v1/generate where it is switched on, else fan-out by /v1/completions.

With `skip_reading_prefix_cache` off, /inference/v1/generate keeps the prompt; then rows of cached positions are
unwritten memory. These are never read: the server must tell how many it had cached, and where rows are among them the
request is fanned out. If that memory has a NaN, vLLM cannot write its answer and refuses; such a request is fanned out,
too, and all others after some refusals in a row. The newer runner answers only with computed rows.
"""

from collections.abc import Mapping
from typing import Any

from edgellm.upstream.dialects import served
from edgellm.upstream.dialects.by_ids import CompletionsUpstream, takes_ids
from edgellm.upstream.http_client import HttpAnswer, ServerRefused
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier, Top, readable

GENERATE = "/inference/v1/generate"
_TOPS = (64, 20)  # likeliest tokens: enough for a sampled reply, and vLLM's default limit
_UNWRITTEN = (400, 500)  # statuses of an answer with a NaN
_MOST_REFUSED = 3  # scores refused in a row, after which none is asked for
_SCALE_OUT = "vLLM scores in one pass if started with --enable-scale-out --enable-prompt-tokens-details"


class VllmUpstream(CompletionsUpstream):
    """A vLLM server."""

    dialect, log_switch, steers, decoded = "vLLM", "--enable-log-requests", True, "prompt"

    def __init__(self, server: served.UnknownServer, tier: Tier, reason: str, top: int) -> None:
        """Connect; rows can have `top` likeliest tokens."""
        super().__init__(server, tier, reason)
        self.most_top = top
        self._refused = 0  # scores refused in a row

    async def _rows(self, request: RowRequest) -> RowReply:
        sampled = not (request.sampling.greedy or request.decisive)
        if self.tier is not Tier.SCORE or sampled or not len(request.draft) or self._refused >= _MOST_REFUSED:
            return await super()._rows(request)
        try:
            found = await self._score(request)
            self._refused = 0
        except ServerRefused as error:
            if error.status not in _UNWRITTEN:
                raise
            found = None
            self._refused += 1
        return found or await super()._rows(request)

    def _body(self, prompt: list[Any], tokens: int, request: RowRequest, temperature: float) -> dict[str, Any]:
        body = super()._body(prompt, tokens, request, temperature)
        if request.salt:
            body["cache_salt"] = request.salt
        if request.steering is not None:
            body["logit_bias"] = {str(token): amount for token, amount in request.steering.bias}
            if request.steering.among is not None:
                body["allowed_token_ids"] = list(request.steering.among)
        return body

    async def _score(self, request: RowRequest) -> RowReply | None:
        """Return the rows; None if some of them are of cached positions."""
        ids = request.prompts[-1]
        body = _scoring(self.name, ids, max(1, request.top), served.sampling_fields(request.sampling, 0.0))
        if request.salt:
            body["cache_salt"] = request.salt
        answer = await self.client.post(GENERATE, body)
        cached = served.cached_tokens(answer)
        if cached is None or cached >= len(request.prefix):
            return None
        rows = _scored(answer, ids, len(request.draft))
        return None if rows is None else served.reply(Tier.SCORE, rows, answer, cached)


def _scoring(model: str, ids: list[int], top: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": model, "token_ids": ids,
        "sampling_params": {
            "max_tokens": 1, "prompt_logprobs": top, "logprobs": top, **sampling,
            "skip_reading_prefix_cache": False, "detokenize": False,
        },
    }  # fmt: skip


def _scored(answer: HttpAnswer, ids: list[int], drafted: int) -> tuple[Row, ...] | None:
    """Return the rows of the last `drafted` of `ids` and of the token behind them; None if there are too few.

    Some versions answer with a row for each token, others with computed rows alone: both end with the last token.
    """
    choice, prompt = answer.json["choices"][0], answer.json["prompt_logprobs"]
    if len(prompt) < drafted or any(row is None for row in prompt[-drafted:]):
        return None
    rows = []
    for token, row in zip(ids[-drafted:], prompt[-drafted:], strict=True):
        top, ranked = _prompt_top(row)
        if token not in ranked:
            raise RowsUnusable(f"a row without its own token {token}")
        rows.append(served.scored(top))
    (own,) = choice["token_ids"]
    found = choice["logprobs"]["content"][0]["top_logprobs"]
    return (*rows, Row(own, tuple((one["token_id"], one["logprob"]) for one in found)))


def _prompt_top(row: Any) -> tuple[Top, set[int]]:
    """Return the likeliest tokens of a row of the prompt, and all its tokens, the prompt's own included."""
    said = {int(name): entry for name, entry in row.items()}
    found = sorted((one["rank"], token, one["logprob"]) for token, one in said.items())
    likeliest = [entry for place, entry in enumerate(found) if entry[0] <= place + 1]  # Ranks have no gap.
    return tuple((token, logprob) for _, token, logprob in likeliest), set(said)


async def connect(server: served.UnknownServer) -> VllmUpstream | None:
    """Return the server if it is a vLLM, by the requested tier or the best. Raises VerifierLost, VerifierBusy: the
    server is gone, or takes no prompts of token ids."""
    if server.owner != "vllm":
        return None
    if server.tier in (None, Tier.SCORE):
        for top in _TOPS:
            if await _scores(server, top):
                return VllmUpstream(server, Tier.SCORE, "it scores a chunk in one pass and keeps the prompt", top)
    refusal = ""
    for top in (*_TOPS, 0):
        if not (refusal := await takes_ids(server, top)):
            tier, reason = server.way(Tier.FAN_OUT, f"it takes many prompts at once; {_SCALE_OUT}")
            return VllmUpstream(server, Tier.FAN_OUT if tier is Tier.SCORE else tier, reason, top)
    raise server.unusable(refusal, "Use a newer version of vLLM there.")


async def _scores(server: served.UnknownServer, top: int) -> bool:
    """Return whether a server scores in one pass, and reports its cached tokens."""
    ids = [server.token] * 3
    body = _scoring(server.model, ids, top, {"temperature": 0.0, **served.NEUTRAL})
    try:
        answer = await server.client.post(GENERATE, body, served.PROBE_SECONDS)
        with readable():
            return _scored(answer, ids, 1) is not None and served.cached_tokens(answer) is not None
    except (ServerRefused, RowsUnusable):
        return False
