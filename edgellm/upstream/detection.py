"""Finds out what kind of server is at an address, and how it can verify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm.errors import InvalidOption
from edgellm.upstream.dialects import by_text, llama_server, ollama, sglang, vllm
from edgellm.upstream.dialects.completions import CompletionsUpstream, takes_ids
from edgellm.upstream.dialects.served import PROBE_SECONDS, served_model
from edgellm.upstream.http_client import HttpClient, ServerRefused
from edgellm.upstream.rows import Tier, Upstream
from edgellm.upstream.text_border import TextBorders


async def detect(
    client: HttpClient, borders: TextBorders, *, end_of_turn: int | None, tier: Tier | None = None
) -> Upstream:
    """Return the server of `client`: SGLang, vLLM, llama-server, Ollama, or one that speaks OpenAI's completions.

    `borders` are those of texts for servers that take nothing else; `end_of_turn` is the token that ends a turn; `tier`
    is how the server is to verify, None: the best way that it has.

    Raises:
        InvalidOption: it has no such model, or cannot verify as `tier` says.
        VerifierLost, VerifierBusy: it does not answer, refuses, or has no way to verify.
        TimeoutError: it does not answer in time.
    """
    served = await served_model(client, client.url.model)
    token = end_of_turn or 0
    found: Upstream
    if served.owner == "vllm":
        found = await vllm.connect(client, served, token, tier)
    elif served.owner == "sglang":
        found = await sglang.connect(client, served, token, tier)
    elif "default_generation_settings" in (props := await _answers(client, "/props")):
        found = await llama_server.connect(client, served, props, end_of_turn)
    elif "version" in await _answers(client, "/api/version"):
        found = await ollama.connect(client, served, borders, end_of_turn, token)
    elif served.owner not in by_text.KINDS and not await takes_ids(client, served, token):
        way = tier or Tier.FAN_OUT
        reason = "it takes many prompts of token ids at once" if tier is None else f"as requested, {way.value}"
        found = CompletionsUpstream(client, served, way, reason)
    else:
        found = await by_text.connect(client, served, borders, end_of_turn, token)
    if tier is not None and found.tier is not tier:
        raise InvalidOption(
            f"{found.dialect} at {client.url} cannot verify by {tier.value}: it can by {found.tier.value}.",
            "Leave --verifier-tier out: the best way is chosen.",
        )
    return found


async def _answers(client: HttpClient, path: str) -> Mapping[str, Any]:
    """Return the fields of the JSON at a path, none where there is none: LM Studio answers 200 whatever the path."""
    try:
        found = (await client.get(path, PROBE_SECONDS)).json
    except ServerRefused:
        return {}
    return found if isinstance(found, dict) else {}
