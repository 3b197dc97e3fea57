"""Any other server with OpenAI's completions of token ids, the last resort."""

from __future__ import annotations

from edgellm.upstream.dialects.by_ids import CompletionsUpstream, takes_ids
from edgellm.upstream.dialects.served import UnknownServer
from edgellm.upstream.rows import Tier


async def connect(server: UnknownServer) -> CompletionsUpstream:
    """Return the server. Raises VerifierLost if it takes no token ids."""
    if refusal := await takes_ids(server):
        raise server.unusable(refusal, "Use vLLM, SGLang, llama-server or Ollama.")
    return CompletionsUpstream(server, *server.way(Tier.FAN_OUT, "it takes many prompts of token ids at once"))
