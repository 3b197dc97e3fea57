"""What stock servers answer, field by field, at the versions that `docs/guide/servers.md` names."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Self

from edgellm.engine import Floats
from edgellm.spec.types import Sampling
from testkit.upstream.engine import Engine, logprobs, top

MODEL = "served/verifier"
NOWHERE = 4.27e10  # a log-probability in memory that nobody has written to
STRANGE = -1103420295  # a token there


class Missing(Exception):
    """There is no such path."""


class UnknownModel(Exception):
    """A request names a model that is not served; `answer` is what the server says, with status 404."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


class Invalid(Exception):
    """A request that the server refuses with status 400."""


class Dialect(ABC):
    """A stock server over an engine."""

    model_name = MODEL

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def serving_as(self, model: str) -> Self:
        """Serve the model by another name, and return the dialect."""
        self.model_name = model
        return self

    @abstractmethod
    def get(self, path: str) -> Any:
        """Return the answer to a GET. Raises Missing."""

    @abstractmethod
    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a POST. Raises Missing, Invalid, UnknownModel."""

    def models(self, owner: str, **more: Any) -> Any:
        """Return the answer of /v1/models."""
        return {"object": "list", "data": [{"id": self.model_name, "object": "model", "owned_by": owner, **more}]}

    def text(self, ids: list[int]) -> str:
        return b"".join(self.engine.model.control_text(token) for token in ids).decode("utf-8", "replace")


def sampling_of(body: dict[str, Any]) -> Sampling:
    """Return the rule of a request in OpenAI's words."""
    top_k = int(body.get("top_k", -1))
    if body.get("repetition_penalty") != 1.0:  # the model's own settings would say otherwise
        raise Invalid("the request leaves the repetition penalty to the model")
    found = Sampling(float(body.get("temperature", 1.0)), max(0, top_k), float(body.get("top_p", 1.0)))
    return replace(found, min_p=float(body.get("min_p", 0.0)))


class Vllm(Dialect):
    """vLLM 0.32. `scores`: started with --enable-scale-out; `counts`: with --enable-prompt-tokens-details."""

    def __init__(
        self, engine: Engine, *, scores: bool = False, counts: bool = False, most: int = 20, refuses: bool = False
    ) -> None:
        """`refuses`: there is a NaN in the memory of each cached row."""
        super().__init__(engine)
        self.scores, self.counts, self.most, self.refuses = scores, counts, most, refuses
        self.cached: list[int] = []

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            return self.models("vllm", max_model_len=self.engine.positions, root=self.model_name)
        if path == "/version":
            return {"version": "0.32.0"}
        raise Missing

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if (asked := body.get("model", self.model_name)) != self.model_name:
            message = f"The model `{asked}` does not exist."
            raise UnknownModel({"error": {"message": message, "type": "NotFoundError", "param": None, "code": 404}})
        if path == "/v1/completions":
            return self.completions(body)
        if path == "/inference/v1/generate" and self.scores:
            return self.generate(body)
        if path == "/detokenize":
            return {"prompt": self.text(body["tokens"])}
        raise Missing

    def completions(self, body: dict[str, Any]) -> Any:
        prompt = body["prompt"]
        prompts = prompt if prompt and isinstance(prompt[0], list) else [prompt]
        self.check(body.get("logprobs"))
        sampling = sampling_of(body)
        choices, cached = [], 0
        for index, ids in enumerate(prompts):
            bias = {int(token): min(100.0, max(-100.0, by)) for token, by in (body.get("logit_bias") or {}).items()}
            tokens, rows = self.engine.write(
                ids, body["max_tokens"], sampling, body.get("seed"), bias, body.get("allowed_token_ids")
            )
            choice: dict[str, Any] = {
                "index": index, "text": self.text(tokens), "finish_reason": "length", "logprobs": None,
            }  # fmt: skip
            if body.get("return_token_ids"):
                choice["token_ids"] = tokens
            if (k := body.get("logprobs")) is not None:
                names = "token_id:{}" if body.get("return_tokens_as_token_ids") else "{}"
                choice["logprobs"] = {
                    "tokens": [names.format(token) for token in tokens],
                    "top_logprobs": [
                        {names.format(token): logprob for token, logprob in top(row, k)} for row in rows
                    ],
                }  # fmt: skip
            cached += self.engine.cached(ids, body.get("cache_salt") or "")
            choices.append(choice)
        return {"id": "cmpl-1", "object": "text_completion", "choices": choices, "usage": self.usage(cached)}

    def generate(self, body: dict[str, Any]) -> Any:
        params, ids = body["sampling_params"], body["token_ids"]
        self.check(params.get("logprobs"), params.get("prompt_logprobs"))
        skips = params.get("skip_reading_prefix_cache", params.get("prompt_logprobs") is not None)
        cached = 0 if skips else self.engine.cached(ids, body.get("cache_salt") or "")
        tokens, rows = self.engine.write(ids, params["max_tokens"], sampling_of(params), params.get("seed"))
        content = [
            {
                "token_id": token, "logprob": float(logprobs(row)[token]), "rank": 1,
                "top_logprobs": [
                    {"token_id": other, "logprob": logprob, "rank": rank}
                    for rank, (other, logprob) in enumerate(top(row, params["logprobs"]), 1)
                ],
            }
            for token, row in zip(tokens, rows, strict=True)
        ]  # fmt: skip
        self.cached.append(cached)
        if cached and self.refuses:
            raise Invalid("Out of range float values are not JSON compliant")
        return {
            "request_id": "generate-tokens-1",
            "choices": [{
                "index": 0, "logprobs": {"content": content}, "finish_reason": "length", "token_ids": tokens,
            }],
            "prompt_logprobs": self.prompt_rows(ids, params["prompt_logprobs"], cached),
            "usage": self.usage(cached),
        }  # fmt: skip

    def prompt_rows(self, ids: list[int], k: int, cached: int) -> list[Any]:
        """Return a row for each token of a prompt; those of cached positions are what happens to be in memory."""
        rows = self.engine.rows(ids, len(ids))
        found: list[Any] = [None]
        for place, (row, token) in enumerate(zip(rows[:-1], ids[1:], strict=True)):
            if place < cached:
                found.append({str(STRANGE): {"logprob": NOWHERE, "rank": 1, "decoded_token": None}})
                continue
            said = logprobs(row)
            own = {
                token: {"logprob": float(said[token]), "rank": int((row >= row[token]).sum()), "decoded_token": None}
            }
            own |= {
                other: {"logprob": logprob, "rank": rank, "decoded_token": None}
                for rank, (other, logprob) in enumerate(top(row, k), 1)
            }
            found.append({str(other): entry for other, entry in own.items()})
        return found

    def check(self, *counts: int | None) -> None:
        if any(k is not None and k > self.most for k in counts):
            raise Invalid(f"Requested logprobs exceed the maximum of {self.most}")

    def usage(self, cached: int) -> Any:
        return {"prompt_tokens_details": {"cached_tokens": cached} if self.counts else None}


class LlamaServer(Dialect):
    """llama-server of 2026-10. With `quiet` it leaves the token that ends a turn out, as older ones do."""

    def __init__(self, engine: Engine, *, template: str | None = None, quiet: bool = False) -> None:
        super().__init__(engine)
        self.template, self.quiet = template, quiet

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            return self.models("llamacpp", meta={"n_ctx_train": 1024, "n_vocab": self.engine.model.n_vocab})
        if path == "/props":
            template = self.engine.model.chat_template_source if self.template is None else self.template
            return {
                "default_generation_settings": {"n_ctx": self.engine.positions}, "total_slots": 1,
                "chat_template": template, "build_info": "b9999-0c1e57098",
            }  # fmt: skip
        raise Missing

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/detokenize":
            return {"content": self.text(body["tokens"])}
        if path != "/completion":
            raise Missing
        samplers = ["temperature", "top_k", "top_p", *(["min_p"] if body["min_p"] else [])]
        if body.get("samplers") != samplers or body["repeat_penalty"] != 1:
            raise Invalid("this server would draw by another rule")
        sampling = Sampling(body["temperature"], body["top_k"], body["top_p"], min_p=body["min_p"])
        bias = {int(token): float(by) for token, by in body.get("logit_bias", [])}
        tokens, rows = self.engine.write(body["prompt"], body["n_predict"], sampling, body["seed"], bias)
        ended = self.engine.model.is_eog(tokens[-1])
        said = [
            {"id": token, "top_logprobs": [{"id": o, "logprob": p, "token": ""} for o, p in top(row, body["n_probs"])]}
            for token, row in zip(tokens, rows, strict=True)
        ]
        return {
            "index": 0, "content": self.text(tokens), "tokens": tokens[:-1] if ended and self.quiet else tokens,
            "id_slot": 0, "stop": True, "stop_type": "eos" if ended else "limit", "truncated": False,
            "tokens_evaluated": len(body["prompt"]), "tokens_cached": len(body["prompt"]) + len(tokens) - 1,
            "timings": {"cache_n": 0, "prompt_n": len(body["prompt"]), "prompt_ms": 1.5, "predicted_ms": 0.5},
            **({"completion_probabilities": said} if body["n_probs"] else {}),
        }  # fmt: skip


class Sglang(Dialect):
    """SGLang 0.5.23, by its documentation and source; it was not run."""

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            return self.models("sglang", max_model_len=self.engine.positions, root=self.model_name)
        raise Missing

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/detokenize":
            return {"text": "" if body.get("skip_special_tokens", True) else self.text(body["tokens"])}
        if path != "/generate":
            raise Missing
        prompts = body["input_ids"]
        if isinstance(prompts[0], list):
            return [self.one(ids, body) for ids in prompts]
        return self.one(prompts, body)

    def one(self, ids: list[int], body: dict[str, Any]) -> Any:
        params, k, start = body["sampling_params"], body.get("top_logprobs_num", 0), body.get("logprob_start_len", -1)
        bias = {int(token): float(by) for token, by in params.get("logit_bias", {}).items()}
        tokens, rows = self.engine.write(ids, params["max_new_tokens"], sampling_of(params), None, bias)
        ended = self.engine.model.is_eog(tokens[-1])
        reused = min(len(ids) - 1, len(ids) if start < 0 else start)
        said: dict[str, Any] = {
            "id": "1", "prompt_tokens": len(ids), "completion_tokens": len(tokens),
            "cached_tokens": min(self.engine.cached(ids), reused),
            "finish_reason": {"type": "stop", "matched": tokens[-1]} if ended else {"type": "length", "length": 1},
        }  # fmt: skip
        if body.get("return_logprob"):
            known = self.engine.rows(ids, len(ids))[start:-1] if start >= 0 else []
            said["input_top_logprobs"] = [None, *(triples(row, k) for row in known)]
            said["output_top_logprobs"] = [triples(row, k) for row in rows]
        return {"text": self.text(tokens), "output_ids": tokens, "meta_info": said}


def triples(row: Floats, k: int) -> list[Any]:
    """Return the likeliest tokens of a row as SGLang names them."""
    return [[logprob, token, None] for token, logprob in top(row, k)]
