"""OpenAI's completions with token ids for a prompt: vLLM, and gateways that hand such prompts on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.errors import InvalidOption, VerifierLost
from edgellm.spec.types import Sampling
from edgellm.upstream.fields import entries, fields, maybe_count, number, seed_at, text, whole
from edgellm.upstream.http_client import HttpAnswer, HttpClient, ServerRefused
from edgellm.upstream.rows import Row, RowReply, RowRequest, Tier, Top, Upstream
from edgellm.upstream.verdict import RowsUnusable

_ID = "token_id:"
NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
}  # fmt: skip
"""What servers take from a model's own settings unless a request says otherwise."""


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """A model of a server: its name there, the positions of a text if that is known, and who the server says it is."""

    name: str
    context_length: int | None = None
    owner: str = ""


async def served_model(client: HttpClient, wanted: str = "") -> UpstreamModel:
    """Return the model `wanted` of a server, or its first one.

    Raises:
        InvalidOption: it has no such model; names those that it has.
        VerifierLost, VerifierBusy: as `HttpClient.get`.
    """
    answer = await client.get("/v1/models")
    try:
        models = [fields(one) for one in entries(fields(answer.json).get("data"))]
        names = [text(one.get("id")) for one in models]
    except RowsUnusable as error:
        raise client.garbled(str(error)) from None
    if not names or (wanted and wanted not in names):
        asked = f"has no model {wanted!r}" if names else "serves no model"
        raise InvalidOption(
            f"The server at {client.url} {asked}.",
            f"Name one of these behind # in the address: {', '.join(names[:8])}." if names else "Load one there.",
        )
    found = models[names.index(wanted) if wanted else 0]
    length = maybe_count(found.get("max_model_len")) or maybe_count(fields(found.get("meta") or {}).get("n_ctx"))
    return UpstreamModel(wanted or names[0], length, str(found.get("owned_by") or "")[:40])


class CompletionsUpstream(Upstream):
    """A server whose /v1/completions takes token ids, many prompts at once, and answers with the ids that it took."""

    def __init__(
        self, client: HttpClient, served: UpstreamModel, tier: Tier, reason: str, *, top: int = 0,
        dialect: str = "completions",
    ) -> None:  # fmt: skip
        """`tier` is how it verifies, and `reason` why; rows can include `top` likeliest tokens."""
        self._client, self._served, self._tier, self._reason, self._top = client, served, tier, reason, top
        self._dialect = dialect

    @property
    def dialect(self) -> str:
        """See `Upstream.dialect`."""
        return self._dialect

    @property
    def name(self) -> str:
        """See `Upstream.name`."""
        return self._served.name

    @property
    def context_length(self) -> int | None:
        """See `Upstream.context_length`."""
        return self._served.context_length

    @property
    def tier(self) -> Tier:
        """See `Upstream.tier`."""
        return self._tier

    @property
    def reason(self) -> str:
        """See `Upstream.reason`."""
        return self._reason

    @property
    def most_top(self) -> int:
        """See `Upstream.most_top`."""
        return self._top

    async def check(self) -> None:
        """See `Upstream.check`."""
        await check_model(self._client, self._served.name)

    async def rows(self, request: RowRequest) -> RowReply:
        """See `Upstream.rows`."""
        try:
            if self._tier is Tier.CONTINUE or (request.extra and not len(request.draft)):
                return await self._continue(request)
            return await self._fan_out(request)
        except RowsUnusable as error:
            raise self._client.garbled(str(error)) from None

    async def _fan_out(self, request: RowRequest) -> RowReply:
        prefix, draft = request.prefix.tolist(), request.draft.tolist()
        prompts = [prefix + draft[:n] for n in range(len(draft) + 1)]
        # one seed would draw the same numbers at each place; rows that decide need no draw of the server's
        greedy = request.decisive or request.sampling.greedy
        body = self._body(prompts, 1, request, 0.0 if greedy else request.sampling.temperature)
        answer = await self._client.post("/v1/completions", body)
        by_place: dict[int, Row] = {}
        for choice in entries(fields(answer.json).get("choices")):
            by_place[whole(fields(choice).get("index", 0))] = _rows(choice, request.top)[0]
        if sorted(by_place) != list(range(len(prompts))):
            raise RowsUnusable(f"{len(by_place)} choices for {len(prompts)} prompts")
        rows = tuple(by_place[place] for place in range(len(prompts)))
        tier = Tier.SCORE if request.decisive else Tier.FAN_OUT
        cached = cached_tokens(answer)
        if cached is not None and cached > len(prompts[-1]):  # of all prompts; vLLM names those of the last one
            cached //= len(prompts)
        return reply(tier, rows, answer, cached)

    async def _continue(self, request: RowRequest) -> RowReply:
        position = len(request.prefix)
        body = self._body(request.prefix.tolist(), request.places, request, request.sampling.temperature)
        body |= {} if request.sampling.greedy else {"seed": seed_at(request.sampling, position)}
        answer = await self._client.post("/v1/completions", body)
        choices = entries(fields(answer.json).get("choices"))
        if not choices:
            raise RowsUnusable("no choice")
        return reply(Tier.CONTINUE, _rows(choices[0], request.top), answer, cached_tokens(answer))

    def _body(self, prompt: list[Any], tokens: int, request: RowRequest, temperature: float) -> dict[str, Any]:
        body = {
            "model": self._served.name, "prompt": prompt, "max_tokens": tokens, "stream": False,
            "return_token_ids": True, **sampling_fields(request.sampling, temperature),
        }  # fmt: skip
        if request.top:
            body |= {"logprobs": request.top, "return_tokens_as_token_ids": True}
        return body


def sampling_fields(sampling: Sampling, temperature: float) -> dict[str, Any]:
    """Return how a server is to draw a token: by our rule alone, whatever its model's own settings are."""
    greedy = temperature <= 0.0
    top_k = -1 if greedy or sampling.top_k <= 0 else sampling.top_k
    return {"temperature": max(0.0, temperature), "top_k": top_k, "top_p": 1.0 if greedy else sampling.top_p, **NEUTRAL}


async def check_model(client: HttpClient, name: str) -> None:
    """Check that a server still has the model `name`. Raises VerifierLost where it has not."""
    try:
        await served_model(client, name)
    except InvalidOption as error:
        raise VerifierLost(error.what, "Load the model there again.") from None


def reply(tier: Tier, rows: tuple[Row, ...], answer: HttpAnswer, cached: int | None) -> RowReply:
    """Return the reply of one request."""
    return RowReply(tier, rows, cached, None, answer.bytes_up, answer.bytes_down)


def cached_tokens(answer: HttpAnswer) -> int | None:
    """Return how many tokens of prompts were not computed again, None where the server does not say."""
    usage = fields(fields(answer.json).get("usage") or {})
    return maybe_count(fields(usage.get("prompt_tokens_details") or {}).get("cached_tokens"))


def _rows(choice: Any, top: int) -> tuple[Row, ...]:
    """Return the rows of the tokens of a choice. Raises RowsUnusable where they have no ids."""
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
    """Ask for a token behind two prompts of ids; return why the server cannot verify so, "" where it can.

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
        rows = [_rows(choice, top) for choice in choices]
    except ServerRefused as error:
        if error.status in (401, 403):
            raise
        return f"it refuses several prompts of token ids (status {error.status})"
    except RowsUnusable as error:
        return f"it answers prompts of token ids with {error}"
    if len(rows) != 2 or any(len(one) != 1 for one in rows):
        return f"it answers two prompts with {len(rows)} tokens"
    return ""


PROBE_SECONDS = 60.0
"""Within which a server answers a first question: it may have to load its model."""
