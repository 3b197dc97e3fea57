"""vLLM: one scored pass by /inference/v1/generate where it is switched on, else fan-out by /v1/completions.

/v1/completions can score, too, but computes the whole prompt again, so it scores only on request. With
`skip_reading_prefix_cache` off, /inference/v1/generate keeps the prompt; then rows of cached positions are unwritten
memory. These are never read: a request whose rows could be among them is fanned out. If that memory has a NaN, vLLM
cannot write its answer and refuses; such a request is fanned out, too, and after many refusals all requests for some
time. The newer runner answers only with computed rows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.errors import VerifierLost
from edgellm.upstream.dialects.completions import CompletionsUpstream, takes_ids
from edgellm.upstream.dialects.served import (
    NEUTRAL,
    PROBE_SECONDS,
    UpstreamModel,
    best,
    cached_tokens,
    entries,
    fields,
    number,
    reply,
    sampling_fields,
    steering_fields,
    text,
    whole,
)
from edgellm.upstream.http_client import HttpAnswer, HttpClient, ServerRefused
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier, Top

_log = logging.getLogger(__name__)
GENERATE = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
_TOPS = (64, 20)  # likeliest tokens: enough for a sampled reply, and vLLM's default limit
_UNWRITTEN = (400, 500)  # statuses of an answer with a NaN
# A refusal costs a pass, and a score saves one: vLLM begins with the first of several prompts before the rest arrive.
# So half of the requests may be refused, or less if round trips are slow.
_WATCHED, _MOST_REFUSED = 16, 4
_REST, _LONGEST_REST = 16, 512
_SCALE_OUT = "vLLM scores in one pass if started with --enable-scale-out"
_DETAILS = "start vLLM with --enable-prompt-tokens-details to keep prompts from reply to reply"


class ScoreRefusals:
    """The choice whether to score, by the refusals of the last scored requests."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=_WATCHED)
        self._rest, self._resting = _REST, 0

    def pays(self) -> bool:
        """Return whether to score the next request; ask once for each."""
        if self._resting:
            self._resting -= 1
            return False
        return True

    def record(self, *, refused: bool) -> None:
        """Record a scored request. After too many refusals scoring pauses; then another refusal doubles the pause."""
        self._last.append(refused)
        if sum(self._last) > _MOST_REFUSED:
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
            self._last = deque([True] * _MOST_REFUSED, maxlen=_WATCHED)
        elif not any(self._last):
            self._rest = _REST


class VllmUpstream(CompletionsUpstream):
    """A vLLM server."""

    dialect, steers = "vLLM", True

    def __init__(
        self, client: HttpClient, served: UpstreamModel, tier: Tier, reason: str, *, top: int, keeps: bool, counts: bool
    ) -> None:
        """Connect; `keeps`: scoring keeps the prompt's cache; `counts`: the server reports its cached tokens."""
        super().__init__(client, served, tier, reason, top=top)
        self._keeps, self._counts = keeps, counts
        self.recomputes = tier is Tier.SCORE and not keeps
        self._refusals = ScoreRefusals()

    async def _rows(self, request: RowRequest) -> RowReply:
        sampled = not (request.sampling.greedy or request.decisive)
        unsafe = self._keeps and request.repeats and not self._counts
        if self.tier is not Tier.SCORE or sampled or not len(request.draft) or unsafe:
            return await super()._rows(request)
        if not self._refusals.pays():
            return await super()._rows(request)
        try:
            found = await self._score(request)
            self._refusals.record(refused=False)
        except ServerRefused as error:
            if not self._keeps or error.status not in _UNWRITTEN:
                raise
            found = None
            self._refusals.record(refused=True)
            _log.info("%s is asked without scores: %s", self.name, error.what)
        return found or await super()._rows(request)

    def _body(self, prompt: list[Any], tokens: int, request: RowRequest, temperature: float) -> dict[str, Any]:
        body = super()._body(prompt, tokens, request, temperature) | steering_fields(request.steering)
        return body | ({"cache_salt": request.salt} if request.salt else {})

    async def _score(self, request: RowRequest) -> RowReply | None:
        """Return the rows; None if some of them are of cached positions."""
        ids = [*request.prefix.tolist(), *request.draft.tolist()]
        wanted = max(1, request.top)
        shared = {"max_tokens": 1, "prompt_logprobs": wanted, **sampling_fields(request.sampling, 0.0)}
        if self._keeps:
            body: dict[str, Any] = {
                "model": self.name,
                "token_ids": ids,
                "sampling_params": {
                    **shared, "logprobs": wanted, "skip_reading_prefix_cache": False, "detokenize": False,
                },
            }  # fmt: skip
            if salt := request.salt if self._counts else request.session:
                body["cache_salt"] = salt
            answer = await self._client.post(GENERATE, body)
        else:
            body = {
                "model": self.name, "prompt": ids, "stream": False, "return_token_ids": True,
                "return_tokens_as_token_ids": True, "logprobs": wanted, **shared,
            }  # fmt: skip
            answer = await self._client.post(_COMPLETIONS, body)
        cached = cached_tokens(answer)
        if self._keeps and cached is not None and cached >= len(request.prefix):
            return None
        rows = _scored(answer, ids, len(request.draft), chat=self._keeps)
        return None if rows is None else reply(Tier.SCORE, rows, answer, cached if self._keeps else 0)

    async def tokenize(self, text: str) -> Sequence[int] | None:
        return await self._ids("/tokenize", {"model": self.name, "prompt": text, "add_special_tokens": False})

    async def detokenize(self, ids: Sequence[int]) -> str | None:
        return await self._text("/detokenize", {"model": self.name, "tokens": list(ids)}, "prompt")


def _scored(answer: HttpAnswer, ids: list[int], drafted: int, *, chat: bool) -> tuple[Row, ...] | None:
    """Return the rows of the last `drafted` of `ids` and of the token behind them; None if there are too few.

    Some versions answer with a row for each token, others with computed rows alone: both end with the last token.
    """
    whole_answer = fields(answer.json)
    choices = entries(whole_answer.get("choices"))
    choice = fields(choices[0]) if choices else {}
    given = whole_answer.get("prompt_logprobs")
    prompt = entries(choice.get("prompt_logprobs") if given is None else given)
    if len(prompt) < drafted or any(row is None for row in prompt[-drafted:]):
        return None
    rows = []
    for token, row in zip(ids[-drafted:], prompt[-drafted:], strict=True):
        top, ranked = _prompt_top(row)
        if token not in ranked:
            raise RowsUnusable(f"a row without its own token {token}")
        rows.append(Row(best(top), top))
    own = [whole(token) for token in entries(choice.get("token_ids"))]
    if len(own) != 1:
        raise RowsUnusable(f"{len(own)} tokens instead of 1")
    said = fields(choice.get("logprobs"))
    if chat:
        content = fields(entries(said.get("content"))[0]) if entries(said.get("content")) else {}
        found = [fields(one) for one in entries(content.get("top_logprobs"))]
        top = tuple((_id(one), number(one.get("logprob"))) for one in found)
    else:
        pairs = list(fields(entries(said.get("top_logprobs"))[0]).items()) if entries(said.get("top_logprobs")) else []
        top = tuple((_named(token), number(logprob)) for token, logprob in pairs)
    return (*rows, Row(own[0], top))


def _id(entry: Mapping[str, Any]) -> int:
    """Return the token of an entry, which some versions name as in chats, some by its id."""
    return whole(entry["token_id"]) if "token_id" in entry else _named(entry.get("token"))


def _prompt_top(row: Any) -> tuple[Top, set[int]]:
    """Return the likeliest tokens of a row of the prompt, and all its tokens, the prompt's own included."""
    found, every = [], set()
    for name, entry in fields(row).items():
        token, said = _number(name), fields(entry)
        every.add(token)
        found.append((whole(said.get("rank")), token, number(said.get("logprob"))))
    found.sort()
    likeliest = [entry for place, entry in enumerate(found) if entry[0] <= place + 1]  # Ranks have no gap.
    return tuple((token, logprob) for _, token, logprob in likeliest), every


def _number(name: str) -> int:
    if not name.isascii() or not name.isdigit() or len(name) > 9:
        raise RowsUnusable(f"{name[:40]!r} where a token belongs")
    return int(name)


def _named(found: Any) -> int:
    return _number(text(found).removeprefix("token_id:"))


async def connect(client: HttpClient, served: UpstreamModel, token: int, asked: Tier | None) -> VllmUpstream:
    """Return the vLLM server, by the best tier or the one `asked` for; `token` is for a first question.

    Raises:
        VerifierLost, VerifierBusy: the server is gone, or takes no prompts of token ids.
    """
    if asked in (None, Tier.SCORE):
        for top in _TOPS:
            if (counts := await _scores(client, served, token, top)) is not None:
                reason = "it scores a chunk in one pass and keeps the prompt" + ("" if counts else f"; {_DETAILS}")
                return VllmUpstream(client, served, Tier.SCORE, reason, top=top, keeps=True, counts=counts)
    refusal = ""
    for top in (*_TOPS, 0):
        if refusal := await takes_ids(client, served, token, top):
            continue
        if asked is Tier.SCORE:
            reason = f"it is asked to score, and recomputes the whole prompt for every check; {_SCALE_OUT}"
            return VllmUpstream(client, served, Tier.SCORE, reason, top=top, keeps=False, counts=True)
        tier = asked or Tier.FAN_OUT
        reason = f"as requested, {tier.value}" if asked else f"it takes many prompts at once; {_SCALE_OUT}"
        return VllmUpstream(client, served, tier, reason, top=top, keeps=False, counts=True)
    raise VerifierLost(f"The server at {client.url} cannot verify: {refusal}.", "Use a newer version of vLLM there.")


async def _scores(client: HttpClient, served: UpstreamModel, token: int, top: int) -> bool | None:
    """Return whether a server that scores in one pass reports its cached tokens; None for a server that cannot."""
    body = {
        "model": served.name,
        "token_ids": [token] * 3,
        "sampling_params": {
            "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top, "logprobs": top,
            "skip_reading_prefix_cache": False, "detokenize": False, **NEUTRAL,
        },
    }  # fmt: skip
    try:
        answer = await client.post(GENERATE, body, PROBE_SECONDS)
        if _scored(answer, [token] * 3, 1, chat=True) is None:
            return None
        usage = fields(fields(answer.json).get("usage") or {})
    except ServerRefused:
        return None
    except RowsUnusable:
        return None
    return usage.get("prompt_tokens_details") is not None
