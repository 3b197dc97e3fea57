"""The common parts of all kinds of servers: the list of models, and fields of requests."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from edgellm.engine import Model
from edgellm.errors import InvalidOption, VerifierLost
from edgellm.spec.sampling import GOLDEN, Choice
from edgellm.spec.types import Sampling
from edgellm.upstream.http_client import HttpAnswer, HttpClient, ServerRefused
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Steering, Tier, Top


def seed_at(sampling: Sampling, position: int) -> int:
    """Return the seed of a request that continues after `position` tokens: one seed for all would draw the same
    numbers."""
    return ((sampling.seed + 1) * GOLDEN + position * 0xD1342543DE82EF95 >> 16) % 2**31


MAX_CONTEXT = 2**24
PROBE_SECONDS = 60.0
"""Seconds for the answer to a first question: the server may have to load its model."""

NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0,
}  # fmt: skip
"""Fields that servers take from a model's own settings if a request leaves them out."""


async def models_of(client: HttpClient) -> dict[str, Mapping[str, Any]]:
    """Return what a server tells of its models, by name. Raises VerifierLost, VerifierBusy as `HttpClient.get`."""
    with client.reading():
        answer = await client.get("/v1/models")
        return {str(one["id"]): {**one} for one in answer.json["data"]}


async def served_model(client: HttpClient, wanted: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the model `wanted` of a server, or of its first one, and what the server tells of it. Raises
    InvalidOption: the server has no such model; names its models; VerifierLost, VerifierBusy: as `HttpClient.get`."""
    models = await models_of(client)
    names = list(models)
    if not names or (wanted and wanted not in names):
        asked = f"has no model {wanted!r}" if names else "serves no model"
        raise InvalidOption(
            f"The server at {client.url} {asked}.",
            f"Name one of these behind # in the address: {', '.join(names[:8])}." if names else "Load one there.",
        )
    return wanted or names[0], models[wanted or names[0]]


@dataclass(frozen=True, slots=True)
class UnknownServer:
    """A server of a kind that is not known yet: the way to it, the `text` of the same vocabulary on this device, the
    requested `tier` (None: the best), the name of its `model`, the `owner` that it names for that, and the `positions`
    of a text, if known."""

    client: HttpClient
    text: Model
    tier: Tier | None = None
    model: str = ""
    owner: str = ""
    positions: int | None = None

    @classmethod
    async def at(cls, client: HttpClient, text: Model, tier: Tier | None) -> Self:
        """Return the server of `client`, asked for its model. Raises as `served_model`."""
        name, told = await served_model(client, client.url.model)
        lengths = told.get("max_model_len"), (told.get("meta") or {}).get("n_ctx"), told.get("context_length")
        positions = next(filter(None, map(maybe_count, lengths)), None)
        return cls(client, text, tier, name, str(told.get("owned_by") or "")[:40], positions)

    @property
    def token(self) -> int:
        """Return a token for a first question."""
        return self.text.end_of_turn or 0

    async def facts(self, path: str) -> Mapping[str, Any]:
        """Return the fields of the JSON at a path, if any: LM Studio answers 200 whatever the path."""
        try:
            found = (await self.client.get(path, PROBE_SECONDS)).json
        except ServerRefused:
            return {}
        return found if isinstance(found, dict) else {}

    def way(self, best: Tier, why: str) -> tuple[Tier, str]:
        """Return the requested tier, else the `best`, and the reason for it."""
        return (best, why) if self.tier in (None, best) else (self.tier, f"as requested, {self.tier}")

    def unusable(self, why: str, advice: str) -> VerifierLost:
        """Return the error for a server that cannot verify, and `why`, a clause."""
        return VerifierLost(f"The server at {self.client.url} cannot verify: {why}.", advice)


class Upstream(ABC):
    """A stock server that verifies by one model. Coroutines run in the loop of its client."""

    dialect: str
    """The name of the server's kind."""
    log_switch: str = ""
    """The setting by which such a server logs prompts and replies, if known."""
    chat_template: str = ""
    """The chat template of the model; empty where the server does not show it."""
    by_text: bool = False
    """True if the server takes no token ids, so that texts are sent and compared."""
    most_top: int = 0
    """The most likeliest tokens in a row."""
    steers: bool = False
    """True if a request may have a `Steering`."""
    at_once: int | None = None
    """The number of requests that the server computes at once; None if unknown."""
    decoded: str = ""
    """The field of an answer at /detokenize with the text; empty without such a path."""

    def __init__(self, server: UnknownServer, tier: Tier, reason: str) -> None:
        """Verify by `tier`, for the `reason`, a clause."""
        self.client, self.tier, self.reason = server.client, tier, reason
        self.name, self.context_length = server.model, server.positions

    @property
    def choice(self) -> Choice:
        """Return the set that the server's tokens are chosen from."""
        return Choice(self.most_top, draws_itself=self.tier is Tier.CONTINUE)

    def top(self, sampling: Sampling, logprobs: int | None) -> int:
        """Return how many likeliest tokens rows must include, for reported log-probabilities and for draws here, if the
        server answers with enough."""
        if sampling.ruled:
            return self.most_top
        wanted = sampling.top_k if not sampling.greedy and self.choice.draws_alike(sampling) else 0
        return max(wanted, 0 if logprobs is None else min(max(1, logprobs), self.most_top))

    async def rows(self, request: RowRequest) -> RowReply:
        """Return the rows for `request`. Raises VerifierLost: the server is gone, refuses, or answers with something
        else; VerifierBusy: it takes no request now."""
        with self.client.reading():
            return await self._rows(request)

    @abstractmethod
    async def _rows(self, request: RowRequest) -> RowReply:
        """Return the rows for `request`. Raises RowsUnusable and the errors of `rows`."""

    async def check(self) -> None:
        """Check that the server is up and still has the model."""
        try:
            await served_model(self.client, self.name)
        except InvalidOption as error:
            raise VerifierLost(error.what, "Load the model there again.") from None

    async def tokenize(self, text: str) -> Sequence[int] | None:  # noqa: ARG002
        """Return the ids of `text` by the server's tokenizer, if it takes texts and tells."""
        return None

    async def detokenize(self, ids: Sequence[int]) -> str | None:
        """Return the text of `ids` by the server's tokenizer, if it takes ids and tells."""
        body = {"model": self.name, "tokens": list(ids), "skip_special_tokens": False}
        found = await self._told("/detokenize", body, self.decoded) if self.decoded else None
        return None if found is None else str(found)

    async def _told(self, path: str, body: Mapping[str, Any], name: str) -> Any:
        """Return the field `name` of the answer at `path`; None where the server has no such path."""
        try:
            return (await self.client.post(path, body)).json.get(name)
        except ServerRefused as error:
            if error.status in (404, 405, 501):
                return None
            raise


def sampling_fields(sampling: Sampling, temperature: float) -> dict[str, Any]:
    """Return the fields for drawing a token by our rule alone, whatever the model's own settings are."""
    greedy = temperature <= 0.0
    top_k = -1 if greedy or sampling.top_k <= 0 else sampling.top_k
    top_p, min_p = (1.0, 0.0) if greedy else (sampling.top_p, sampling.min_p)
    return {**NEUTRAL, "temperature": max(0.0, temperature), "top_k": top_k, "top_p": top_p, "min_p": min_p}


FAR = 1e4
"""A bias larger than any difference of logits."""


def raised(steering: Steering) -> dict[int, float]:
    """Return logit biases that force a token of `among`, for servers without `allowed_token_ids`."""
    found = dict(steering.bias)
    for token in steering.among or ():
        found[token] = found.get(token, 0.0) + FAR
    return found


def scored(top: Top) -> Row:
    """Return the row of a place that was only scored: the server takes the likeliest token there."""
    return Row(max(top, key=lambda entry: (entry[1], -entry[0]))[0], top)


def with_tops(tokens: Sequence[int], tops: Sequence[Top]) -> tuple[Row, ...]:
    """Return the rows of the `tokens` that a server wrote; it may tell the likeliest of fewer places. Raises
    RowsUnusable: there are none."""
    if not tokens:
        raise RowsUnusable("an answer without tokens")
    return tuple(Row(token, tops[at] if at < len(tops) else None) for at, token in enumerate(tokens))


def reply(
    tier: Tier, rows: Sequence[Row], answer: HttpAnswer, cached: int | None = None, seconds: float | None = None
) -> RowReply:
    """Return the reply of one request."""
    return RowReply(tier, tuple(rows), cached, seconds, answer.bytes_up, answer.bytes_down)


def cached_tokens(answer: HttpAnswer) -> int | None:
    """Return the cached tokens of prompts, None if the server does not report them."""
    details = (answer.json.get("usage") or {}).get("prompt_tokens_details") or {}
    return maybe_count(details.get("cached_tokens"))


def maybe_count(found: Any) -> int | None:
    """Return a number of tokens or milliseconds that a server may leave out; None for anything else."""
    return found if type(found) is int and 0 <= found < MAX_CONTEXT else None


def seconds_of(*durations: Any, per_second: float) -> float | None:
    """Return the sum of durations, each of which a server may leave out; None without any, or for impossible ones."""
    known = [float(one / per_second) for one in durations if one is not None]
    return sum(known) if known and all(0.0 <= one < 1e4 for one in known) else None
