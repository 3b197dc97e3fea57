"""The common parts of all kinds of servers: their JSON, which may be anything, the list of models, and fields."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.errors import InvalidOption, VerifierLost
from edgellm.spec.types import Sampling
from edgellm.upstream.http_client import HttpAnswer, HttpClient, ServerRefused
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Steering, Tier, Top, Upstream

SEED_RANGE = 2**31
MAX_CONTEXT = 2**24
_GOLDEN = 0x9E3779B97F4A7C15


def whole(found: Any) -> int:
    """Return a whole number. Raises RowsUnusable where it is none."""
    if type(found) is not int:
        raise RowsUnusable(f"{str(found)[:40]!r} where a whole number belongs")
    return found


def number(found: Any) -> float:
    """Return a number. Raises RowsUnusable where it is none."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise RowsUnusable(f"{str(found)[:40]!r} where a number belongs")
    return float(found)


def entries(found: Any) -> list[Any]:
    """Return a list. Raises RowsUnusable where it is none."""
    if not isinstance(found, list):
        raise RowsUnusable(f"{str(found)[:40]!r} where a list belongs")
    return found


def fields(found: Any) -> Mapping[str, Any]:
    """Return an object. Raises RowsUnusable where it is none."""
    if not isinstance(found, dict):
        raise RowsUnusable(f"{str(found)[:40]!r} where an object belongs")
    return found


def text(found: Any) -> str:
    """Return a text. Raises RowsUnusable where it is none."""
    if not isinstance(found, str):
        raise RowsUnusable(f"{str(found)[:40]!r} where a text belongs")
    return found


def maybe_count(found: Any) -> int | None:
    """Return a number of tokens or milliseconds that a server may leave out; None for anything else."""
    return found if type(found) is int and 0 <= found < MAX_CONTEXT else None


def best(top: Top) -> int:
    """Return the likeliest token. Raises RowsUnusable where there is none."""
    if not top:
        raise RowsUnusable("a row without tokens")
    return max(top, key=lambda entry: (entry[1], -entry[0]))[0]


def seed_at(sampling: Sampling, position: int) -> int:
    """Return the seed of a request that continues after `position` tokens: one seed for all would draw the same
    numbers."""
    return ((sampling.seed + 1) * _GOLDEN + position * 0xD1342543DE82EF95 >> 16) % SEED_RANGE


PROBE_SECONDS = 60.0
"""Seconds for the answer to a first question: the server may have to load its model."""

NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
}  # fmt: skip
"""Fields that servers take from a model's own settings if a request leaves them out."""


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """A model of a server: its name there, the positions of a text if known, and the owner that the server names."""

    name: str
    context_length: int | None = None
    owner: str = ""


async def served_names(client: HttpClient) -> list[str]:
    """Return the names of a server's models. Raises VerifierLost, VerifierBusy as `HttpClient.get`."""
    return list(await _models(client))


async def _models(client: HttpClient) -> dict[str, Mapping[str, Any]]:
    answer = await client.get("/v1/models")
    with client.reading():
        models = [fields(one) for one in entries(fields(answer.json).get("data"))]
        return {text(one.get("id")): one for one in models}


async def served_model(client: HttpClient, wanted: str) -> UpstreamModel:
    """Return the model `wanted` of a server, or its first one.

    Raises:
        InvalidOption: the server has no such model; names its models.
        VerifierLost, VerifierBusy: as `HttpClient.get`.
    """
    models = await _models(client)
    names = list(models)
    if not names or (wanted and wanted not in names):
        asked = f"has no model {wanted!r}" if names else "serves no model"
        raise InvalidOption(
            f"The server at {client.url} {asked}.",
            f"Name one of these behind # in the address: {', '.join(names[:8])}." if names else "Load one there.",
        )
    found = models[wanted or names[0]]
    length = maybe_count(found.get("max_model_len")) or maybe_count(fields(found.get("meta") or {}).get("n_ctx"))
    return UpstreamModel(wanted or names[0], length, str(found.get("owned_by") or "")[:40])


class ServedUpstream(Upstream):
    """A server of one model, with the common parts of all kinds."""

    def __init__(self, client: HttpClient, served: UpstreamModel, tier: Tier, reason: str) -> None:
        """Verify by `tier`, for the `reason`, a clause."""
        self._client = client
        self.name, self.context_length = served.name, served.context_length
        self.tier, self.reason = tier, reason

    async def rows(self, request: RowRequest) -> RowReply:
        with self._client.reading():
            return await self._rows(request)

    @abstractmethod
    async def _rows(self, request: RowRequest) -> RowReply:
        """Return the rows for `request`. Raises RowsUnusable and the errors of `rows`."""

    async def check(self) -> None:
        try:
            await served_model(self._client, self.name)
        except InvalidOption as error:
            raise VerifierLost(error.what, "Load the model there again.") from None

    async def _asked_for(self, path: str, body: Mapping[str, Any], name: str) -> Any:
        """Return the field `name` of the answer at `path`; None where the server has no such path."""
        try:
            with self._client.reading():
                return fields((await self._client.post(path, body)).json).get(name)
        except ServerRefused as error:
            if error.status in (404, 405, 501):
                return None
            raise

    async def _ids(self, path: str, body: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens that the server finds in a text; None where it has no such path."""
        found = await self._asked_for(path, body, "tokens")
        with self._client.reading():
            return None if found is None else [whole(token) for token in entries(found)]

    async def _text(self, path: str, body: Mapping[str, Any], name: str) -> str | None:
        """Return the text that the server makes of tokens; None where it has no such path."""
        found = await self._asked_for(path, body, name)
        with self._client.reading():
            return None if found is None else text(found)


def sampling_fields(sampling: Sampling, temperature: float) -> dict[str, Any]:
    """Return the fields for drawing a token by our rule alone, whatever the model's own settings are."""
    greedy = temperature <= 0.0
    top_k = -1 if greedy or sampling.top_k <= 0 else sampling.top_k
    top_p, min_p = (1.0, 0.0) if greedy else (sampling.top_p, sampling.min_p)
    return {**NEUTRAL, "temperature": max(0.0, temperature), "top_k": top_k, "top_p": top_p, "min_p": min_p}


def steering_fields(steering: Steering | None) -> dict[str, Any]:
    """Return OpenAI's `logit_bias` and vLLM's `allowed_token_ids` of a steered request; else nothing."""
    if steering is None:
        return {}
    found: dict[str, Any] = {"logit_bias": {str(token): amount for token, amount in steering.bias}}
    return found | ({} if steering.among is None else {"allowed_token_ids": list(steering.among)})


def raised(steering: Steering) -> dict[int, float]:
    """Return logit biases that force a token of `among`, for servers without `allowed_token_ids`."""
    found = dict(steering.bias)
    for token in steering.among or ():
        found[token] = found.get(token, 0.0) + FAR
    return found


FAR = 1e4
"""A bias larger than any difference of logits."""


def reply(tier: Tier, rows: Sequence[Row], answer: HttpAnswer, cached: int | None) -> RowReply:
    """Return the reply of one request."""
    return RowReply(tier, tuple(rows), cached, None, answer.bytes_up, answer.bytes_down)


def cached_tokens(answer: HttpAnswer) -> int | None:
    """Return the cached tokens of prompts, None if the server does not report them."""
    usage = fields(fields(answer.json).get("usage") or {})
    return maybe_count(fields(usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
