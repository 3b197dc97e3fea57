"""What a stock server writes alone, by one plain request in its own words, and what its answers say of their cost.

Nothing here is shared with `edgellm.upstream`: it is what that is compared with.
"""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from testkit.upstream.relay import Exchange

SECONDS = 600.0
COUNTERS = ("vllm:iteration_tokens_total_count", "llamacpp:n_decode_total")


def ask(url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON of a server's answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


def _llama_server(url: str, _model: str, ids: list[int], _text: str, n: int) -> list[int]:
    body = {
        "prompt": ids, "n_predict": n, "temperature": 0, "return_tokens": True, "repeat_penalty": 1.0, "top_k": 0,
        "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature", "top_k", "top_p"], "seed": 0, "n_probs": 0,
    }  # fmt: skip
    return [int(token) for token in ask(url, "/completion", body)["tokens"]]


def _vllm(url: str, model: str, ids: list[int], _text: str, n: int) -> list[int]:
    body = {
        "model": model, "prompt": ids, "max_tokens": n, "temperature": 0, "return_token_ids": True,
        "repetition_penalty": 1.0,
    }  # fmt: skip
    return [int(token) for token in ask(url, "/v1/completions", body)["choices"][0]["token_ids"]]


def _sglang(url: str, _model: str, ids: list[int], _text: str, n: int) -> list[int]:
    params = {"max_new_tokens": n, "temperature": 0, "repetition_penalty": 1.0}
    return [int(token) for token in ask(url, "/generate", {"input_ids": ids, "sampling_params": params})["output_ids"]]


def _ollama(url: str, model: str, _ids: list[int], text: str, n: int) -> str:
    options = {"num_predict": n, "temperature": 0, "repeat_penalty": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
    body = {
        "model": model, "prompt": text, "raw": True, "stream": False, "truncate": False, "shift": False,
        "options": options | {"seed": 0},
    }  # fmt: skip
    return str(ask(url, "/api/generate", body)["response"])


def _by_text(url: str, model: str, _ids: list[int], text: str, n: int) -> str:
    body = {
        "model": model, "prompt": text, "max_tokens": n, "temperature": 0, "repeat_penalty": 1.0, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "token_healing": False, "add_bos_token": False,
    }  # fmt: skip
    return str(ask(url, "/v1/completions", body)["choices"][0]["text"])


Alone = Callable[[str, str, list[int], str, int], "list[int] | str"]
"""Of an address, a model, a prompt's ids and text and a number of tokens: ids, or a text where there are no ids."""
WAYS: Mapping[str, Alone] = {
    "llama-server": _llama_server, "vLLM": _vllm, "SGLang": _sglang, "Ollama": _ollama, "completions": _vllm,
}  # fmt: skip


def writes_alone(dialect: str) -> Alone:
    """Return how a server of a kind is asked for a whole reply."""
    return WAYS.get(dialect, _by_text)


def steps(url: str) -> int | None:
    """Return the passes of a server's model so far, by its own count; None where it has none."""
    try:
        with urllib.request.urlopen(url + "/metrics", timeout=SECONDS) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None
    found = re.findall(rf"^(?:{'|'.join(COUNTERS)})\S*\s+(\S+)$", text, re.MULTILINE)
    return int(sum(map(float, found))) if found else None


def reused(exchanges: Iterable[Exchange]) -> tuple[int, int] | None:
    """Return how many tokens of prompts were asked for again, and how many of these the server had kept.

    Asked again is the longest beginning that a prompt shares with the one before it. None where a server does not say.
    """
    again = kept = said = 0
    before: list[int] = []
    for one in exchanges:
        prompts = asked_prompts(one)
        cached = _cached(one.answer)
        if not prompts or cached is None:
            continue
        said += 1
        longest = max(prompts, key=len)
        shared = next((n for n, (a, b) in enumerate(zip(before, longest, strict=False)) if a != b), None)
        known = min(len(before), len(longest) - 1) if shared is None else shared
        again += known
        kept += min(known, cached if cached <= len(longest) else cached // len(prompts))
        before = longest
    return (again, kept) if said else None


def asked_prompts(one: Exchange) -> list[list[int]]:
    """Return the prompts of token ids in a request."""
    if not isinstance(one.body, dict):
        return []
    found = one.body.get("prompt", one.body.get("token_ids", one.body.get("input_ids")))
    if not isinstance(found, list) or not found:
        return []
    return found if isinstance(found[0], list) else [found]


def _cached(answer: Any) -> int | None:
    if isinstance(answer, list):
        counts = [_cached(one) for one in answer]
        return None if None in counts else sum(count or 0 for count in counts)
    if not isinstance(answer, dict):
        return None
    for path in (
        ("usage", "prompt_tokens_details", "cached_tokens"),
        ("timings", "cache_n"),
        ("meta_info", "cached_tokens"),
    ):
        found: Any = answer
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, int):
            return found
    return None
