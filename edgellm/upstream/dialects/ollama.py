"""Ollama: /api/generate in raw mode, by text."""

from dataclasses import replace

from edgellm.upstream.dialects.served import UnknownServer, maybe_count, reply, seconds_of
from edgellm.upstream.dialects.texts import TextUpstream, Written
from edgellm.upstream.rows import RowReply, RowRequest, Tier


class OllamaUpstream(TextUpstream):
    """An Ollama server; with a `template`, the model's own, one of edgellm, which logs no prompts."""

    dialect, log_switch = "Ollama", "OLLAMA_DEBUG"

    def __init__(self, server: UnknownServer, template: str | None = None) -> None:
        super().__init__(server)
        if template is not None:
            self.dialect, self.log_switch, self.chat_template = "edgellm", "", template

    async def write(self, prompt: str, tokens: int, request: RowRequest, seed: int) -> tuple[Written, RowReply]:
        sampling = request.sampling
        body = {
            "model": self.name, "prompt": prompt, "raw": True, "stream": False,
            "truncate": False, "shift": False,  # Too long a text is refused, and never cut.
            "options": {
                "num_predict": tokens, "temperature": max(0.0, sampling.temperature), "top_k": max(0, sampling.top_k),
                "top_p": sampling.top_p, "min_p": sampling.min_p, "repeat_penalty": 1.0, "presence_penalty": 0.0,
                "frequency_penalty": 0.0, "seed": seed,
            },
        }  # fmt: skip
        answer = await self.client.post("/api/generate", body)
        found = answer.json
        written = Written(found["response"], found.get("done_reason") == "stop")
        seconds = seconds_of(found.get("prompt_eval_duration"), found.get("eval_duration"), per_second=1e9)
        return written, reply(Tier.CONTINUE, (), answer, seconds=seconds)


async def connect(server: UnknownServer) -> OllamaUpstream | None:
    """Return the server if it is an Ollama, or has its API, as edgellm has. Raises VerifierLost, VerifierBusy: it is
    gone, or completes no texts; TimeoutError: it does not answer in time."""
    told = await server.facts("/api/version")
    if "version" not in told:
        return None
    await OllamaUpstream(server).probe(server.token)
    running = await server.client.get("/api/ps")
    mine = [one for one in running.json["models"] if server.model in (one.get("name"), one.get("model"))]
    length = maybe_count(mine[0].get("context_length")) if mine else None
    server = replace(server, positions=length or server.positions)
    if "edgellm" not in told:
        return OllamaUpstream(server)
    shown = await server.client.post("/api/show", {"model": server.model})
    return OllamaUpstream(server, str(shown.json["template"]))
