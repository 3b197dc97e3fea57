"""What stock servers that take no token ids answer: Ollama, LM Studio, TabbyAPI, mlx-lm and llama-cpp-python's."""

from typing import Any

from edgellm.spec.types import Sampling
from testkit.upstream.dialects import MODEL, Dialect, Invalid, Missing, UnknownModel


class Continuing(Dialect):
    """A server that continues a text."""

    def continued(self, prompt: Any, n: int, sampling: Sampling, seed: int | None) -> tuple[list[int], list[Any], bool]:
        """Return the tokens behind a text without the end of the turn, their rows, and whether it ends there."""
        if not isinstance(prompt, str):
            raise Invalid("the prompt is no text")
        ids = self.engine.model.plain_prompt(prompt).tolist()
        tokens, rows = self.engine.write(ids, n, sampling, seed)
        ended = self.engine.model.is_eog(tokens[-1])
        return (tokens[:-1], rows[:-1], True) if ended else (tokens, rows, False)


class Ollama(Continuing):
    """Ollama 0.33."""

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            return self.models("library", created=1)
        if path == "/api/version":
            return {"version": "0.33.0"}
        if path == "/api/ps":
            running = {"name": self.model_name, "model": self.model_name, "context_length": self.engine.positions}
            return {"models": [running]}
        raise Missing

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path != "/api/generate":
            raise Missing
        if body["model"] != self.model_name:
            raise UnknownModel({"error": f"model '{body['model']}' not found"})
        options = body["options"]
        if not body["raw"] or options["repeat_penalty"] != 1.0 or body["truncate"] or body["shift"]:
            raise Invalid("this server would write by another rule")
        sampling = Sampling(options["temperature"], options["top_k"], options["top_p"], min_p=options["min_p"])
        tokens, _, ended = self.continued(body["prompt"], options["num_predict"], sampling, options["seed"])
        return {
            "model": MODEL, "created_at": "2026-11-01T00:00:00Z", "response": self.text(tokens), "done": True,
            "done_reason": "stop" if ended else "length", "total_duration": 3_000_000, "load_duration": 1,
            "prompt_eval_count": 9, "prompt_eval_duration": 1_000_000, "eval_count": len(tokens),
            "eval_duration": 1_000_000,
        }  # fmt: skip


class TextCompletions(Continuing):
    """A server whose /v1/completions takes texts."""

    owner = "organization_owner"

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            return self.models(self.owner)
        return self.other(f"GET {path}")

    def other(self, what: str) -> Any:
        raise Missing(what)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path != "/v1/completions":
            return self.other(f"POST {path}")
        sampling = Sampling(
            body["temperature"], body.get("top_k", 0), body.get("top_p", 1.0), min_p=body.get("min_p", 0.0)
        )
        tokens, _, ended = self.continued(body["prompt"], body["max_tokens"], sampling, body.get("seed"))
        choice = {
            "index": 0,
            "text": self.text(tokens),
            "finish_reason": "stop" if ended else "length",
            "logprobs": None,
        }
        return {
            "id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL,
            "choices": [choice],
            "usage": {"prompt_tokens": 9, "completion_tokens": len(tokens), "total_tokens": 9 + len(tokens)},
        }  # fmt: skip


class LmStudio(TextCompletions):
    """LM Studio 0.4, which answers any path with status 200."""

    def other(self, what: str) -> Any:
        return {"error": f"Unexpected endpoint or method. ({what}). Returning 200 anyway"}


class LlamaCppPython(TextCompletions):
    """llama-cpp-python 0.3.36's own server."""

    owner = "me"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/extras/tokenize":
            return {"tokens": self.engine.model.plain_prompt(body["input"]).tolist()}
        if body.get("logprobs") is not None:
            raise Invalid("logprobs is not supported for models created with logits_all=False")
        return super().post(path, body)


class Tabby(TextCompletions):
    """TabbyAPI."""

    owner = "tabbyAPI"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/token/encode":
            ids = self.engine.model.tokenize(body["text"], special=body["encode_special_tokens"]).tolist()
            return {"tokens": ids, "length": len(ids)}
        if body.get("add_bos_token") is None or body["token_healing"]:
            raise Invalid("this server would change the text")
        return super().post(path, body)


class MlxLm(TextCompletions):
    """mlx-lm 0.32."""

    owner = "mlx"

    def models(self, owner: str, **more: Any) -> Any:  # noqa: ARG002
        """See `Dialect.models`: it names no owner."""
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]}
