"""llama-server: writes as many tokens as a chunk has and one more, behind a prompt of token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgellm.upstream.dialects import served
from edgellm.upstream.rows import RowReply, RowRequest, Tier, Top

_DRAWING = ("temperature", "top_k", "top_p")
"""The samplers of our rule in our order: the server's own chain cools last, and drops tokens by min-p by default."""


class LlamaServerUpstream(served.Upstream):
    """A llama-server, which chooses the free slot with the longest common prefix."""

    dialect, log_switch, most_top, steers, decoded = "llama-server", "--verbose", 64, True, "content"

    def __init__(self, server: served.UnknownServer, props: Mapping[str, Any]) -> None:
        """Connect to a server that answers /props with `props`."""
        super().__init__(server, Tier.CONTINUE, "llama-server scores no drafts")
        template = props.get("chat_template")
        self.chat_template = template if isinstance(template, str) else ""
        self.at_once = served.maybe_count(props.get("total_slots")) or None
        self._end_of_turn = server.text.end_of_turn

    async def _rows(self, request: RowRequest) -> RowReply:
        sampling = request.drawing
        samplers = [*_DRAWING, "min_p"] if sampling.min_p else [*_DRAWING]
        body: dict[str, Any] = {
            "prompt": request.prefix.tolist(), "n_predict": request.places, "cache_prompt": True,
            "return_tokens": True, "stream": False, "temperature": max(0.0, sampling.temperature),
            "top_k": max(0, sampling.top_k), "top_p": sampling.top_p, "min_p": sampling.min_p, "samplers": samplers,
            "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n_probs": request.top,
            "seed": served.seed_at(sampling, len(request.prefix)),
        }  # fmt: skip
        if request.steering is not None:
            body["logit_bias"] = [list(pair) for pair in served.raised(request.steering).items()]
        answer = await self.client.post("/completion", body)
        found = answer.json
        tokens = [*found["tokens"]]
        if found.get("stop_type") == "eos" and self._end_of_turn is not None and not self._ends(tokens, request):
            tokens.append(self._end_of_turn)
        timings = found.get("timings") or {}
        seconds = served.seconds_of(timings.get("prompt_ms"), timings.get("predicted_ms"), per_second=1e3)
        rows = served.with_tops(tokens, _tops(found) if request.top else ())
        return served.reply(Tier.CONTINUE, rows, answer, served.maybe_count(timings.get("cache_n")), seconds)

    def _ends(self, tokens: Sequence[int], request: RowRequest) -> bool:
        """Return whether the token that ended the text is among `tokens`, as only in some versions."""
        return len(tokens) >= request.places or tokens[-1:] == [self._end_of_turn]


def _tops(found: Mapping[str, Any]) -> list[Top]:
    likeliest = [row["top_logprobs"] for row in found["completion_probabilities"] if "top_logprobs" in row]
    return [tuple((one["id"], one["logprob"]) for one in row) for row in likeliest]


async def connect(server: served.UnknownServer) -> LlamaServerUpstream | None:
    """Return the server if it is a llama-server. Raises VerifierLost if that is unusable."""
    props = await server.facts("/props")
    if "default_generation_settings" not in props:
        return None
    length = served.maybe_count((props["default_generation_settings"] or {}).get("n_ctx"))
    return LlamaServerUpstream(replace(server, positions=length or server.positions), props)
