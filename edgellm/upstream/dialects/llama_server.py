"""llama-server: writes as many tokens as a chunk has and one more, behind a prompt of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm.upstream.dialects.served import (
    ServedUpstream,
    UpstreamModel,
    entries,
    fields,
    maybe_count,
    number,
    raised,
    seed_at,
    whole,
)
from edgellm.upstream.http_client import HttpClient
from edgellm.upstream.rows import Row, RowReply, RowRequest, Tier

_DRAWING = ("temperature", "top_k", "top_p")
"""The samplers of our rule in our order: the server's own chain cools last, and drops tokens by min-p by default."""


class LlamaServerUpstream(ServedUpstream):
    """A llama-server, which chooses the free slot with the longest common prefix."""

    dialect, most_top, steers = "llama-server", 64, True

    def __init__(
        self, client: HttpClient, served: UpstreamModel, template: str, end_of_turn: int | None,
        slots: int | None = None,
    ) -> None:  # fmt: skip
        """Connect; `template` is the model's chat template, `end_of_turn` the token that ends a turn, and `slots` the
        number of texts at once."""
        super().__init__(client, served, Tier.CONTINUE, "llama-server scores no drafts")
        self.chat_template, self.at_once, self._end_of_turn = template, slots or None, end_of_turn

    async def _rows(self, request: RowRequest) -> RowReply:
        sampling = request.drawing
        samplers = [*_DRAWING, "min_p"] if sampling.min_p else [*_DRAWING]
        body: dict[str, Any] = {
            "prompt": request.prefix.tolist(), "n_predict": request.places, "cache_prompt": True,
            "return_tokens": True, "stream": False, "temperature": max(0.0, sampling.temperature),
            "top_k": max(0, sampling.top_k), "top_p": sampling.top_p, "min_p": sampling.min_p, "samplers": samplers,
            "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n_probs": request.top,
            "seed": seed_at(sampling, len(request.prefix)),
        }  # fmt: skip
        if request.steering is not None:
            body["logit_bias"] = [list(pair) for pair in raised(request.steering).items()]
        answer = await self._client.post("/completion", body)
        found = fields(answer.json)
        tokens = [whole(token) for token in entries(found.get("tokens"))]
        if found.get("stop_type") == "eos" and self._end_of_turn is not None and not self._ends(tokens, request):
            tokens.append(self._end_of_turn)
        timings = fields(found.get("timings") or {})
        return RowReply(
            Tier.CONTINUE, _with_tops(tokens, found, request.top), maybe_count(timings.get("cache_n")),
            _seconds(timings), answer.bytes_up, answer.bytes_down,
        )  # fmt: skip

    def _ends(self, tokens: Sequence[int], request: RowRequest) -> bool:
        """Return whether the token that ended the text is among `tokens`, as only in some versions."""
        return len(tokens) >= request.places or (bool(tokens) and tokens[-1] == self._end_of_turn)

    async def tokenize(self, text: str) -> Sequence[int] | None:
        return await self._ids("/tokenize", {"content": text, "add_special": False, "parse_special": False})

    async def detokenize(self, ids: Sequence[int]) -> str | None:
        return await self._text("/detokenize", {"tokens": list(ids)}, "content")


def _seconds(timings: Any) -> float | None:
    found = [timings.get(name) for name in ("prompt_ms", "predicted_ms")]
    known = [number(one) for one in found if one is not None]
    return sum(known) / 1e3 if known and all(0.0 <= one < 1e7 for one in known) else None


def _with_tops(tokens: Sequence[int], found: Any, top: int) -> tuple[Row, ...]:
    """Return the rows of `tokens`, with their `top` likeliest if requested."""
    if not top:
        return tuple(Row(token) for token in tokens)
    said = [fields(one) for one in entries(found.get("completion_probabilities"))]
    tops = [
        tuple((whole(one.get("id")), number(one.get("logprob"))) for one in map(fields, entries(row["top_logprobs"])))
        for row in said
        if "top_logprobs" in row
    ]
    return tuple(Row(token, tops[at] if at < len(tops) else None) for at, token in enumerate(tokens))


async def connect(
    client: HttpClient, served: UpstreamModel, props: Any, end_of_turn: int | None
) -> LlamaServerUpstream:
    """Return the llama-server whose /props answered with `props`. Raises VerifierLost if unusable."""
    with client.reading():
        settings = fields(fields(props).get("default_generation_settings") or {})
        length = maybe_count(settings.get("n_ctx"))
        template, slots = props.get("chat_template"), maybe_count(props.get("total_slots"))
    model = UpstreamModel(served.name, length or served.context_length)
    source = template if isinstance(template, str) else ""
    return LlamaServerUpstream(client, model, source, end_of_turn, slots)
