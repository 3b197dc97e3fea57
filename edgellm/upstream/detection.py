"""Finds out what kind of server is at an address, and how it can verify."""

from __future__ import annotations

from typing import Any

from edgellm.errors import InvalidOption, VerifierLost
from edgellm.upstream import llama_server, vllm
from edgellm.upstream.completions import PROBE_SECONDS, CompletionsUpstream, served_model, takes_ids
from edgellm.upstream.http_client import HttpClient, ServerRefused
from edgellm.upstream.rows import Tier, Upstream


async def detect(client: HttpClient, *, token: int, end_of_turn: int | None, tier: Tier | None = None) -> Upstream:
    """Return the server of `client`: SGLang, vLLM, llama-server, Ollama, or one that speaks OpenAI's completions.

    `token` is one to ask with, `end_of_turn` the one that ends a turn; `tier` is how it is to verify, None: the best
    way that it has.

    Raises:
        InvalidOption: it has no such model, or cannot verify as `tier` says.
        VerifierLost, VerifierBusy: it does not answer, refuses, or has no way to verify.
    """
    served = await served_model(client, client.url.model)
    found: Upstream
    if served.owner == "vllm":
        found = await vllm.connect(client, served, token, tier)
    elif (props := await _answers(client, "/props")) is not None:
        found = await llama_server.connect(client, served, props, end_of_turn)
    elif refusal := await takes_ids(client, served, token):
        raise VerifierLost(
            f"The server at {client.url} cannot verify: {refusal}.",
            "Use vLLM, llama-server, or another server whose /v1/completions takes token ids.",
        )
    else:
        way = tier or Tier.FAN_OUT
        reason = "it takes many prompts of token ids at once" if tier is None else f"as requested, {way.value}"
        found = CompletionsUpstream(client, served, way, reason)
    if tier is not None and found.tier is not tier:
        raise InvalidOption(
            f"{found.dialect} at {client.url} cannot verify by {tier.value}: it can by {found.tier.value}.",
            "Leave --verifier-tier out: the best way is chosen.",
        )
    return found


async def _answers(client: HttpClient, path: str) -> Any:
    """Return the JSON at a path; None where there is none."""
    try:
        return (await client.get(path, PROBE_SECONDS)).json
    except ServerRefused as error:
        if error.status in (401, 403):
            raise
        return None
