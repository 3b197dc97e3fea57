"""Bodies of requests that are expensive to check: does the server answer others meanwhile, and what do they take?"""

import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.robustness.attack.harness import Attack, Found
from testkit.memory import most_memory
from testkit.processes.http_server import serving_pair

PATIENCE = 30.0  # seconds for one answer
LATEST_HEALTH, LATEST_ANSWER = 0.1, 2.0  # seconds
_SAID: Any = [{"role": "user", "content": "Hi"}]


def _chat(**more: Any) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps({"messages": _SAID, "max_tokens": 1, **more}).encode()


def _schema(schema: Mapping[str, Any]) -> tuple[str, bytes]:
    return _chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def _merged(properties: int, references: int) -> dict[str, Any]:
    items = {"allOf": [{"$ref": "#/$defs/d"}] * references}
    definition = {"properties": {f"{name:x}": True for name in range(properties)}}
    return {"$defs": {"d": definition}, "type": "array", "uniqueItems": True, "items": items}


def _call(arguments: str) -> tuple[str, bytes]:
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = [*_SAID, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "", "tool_call_id": ""}]
    return "/v1/chat/completions", json.dumps({"messages": said, "max_tokens": 1}).encode()


def _ollama(text: str, where: str = "images") -> tuple[str, bytes]:
    return "/api/generate", f'{{"model": "m", "prompt": "Hi", "{where}": {text}}}'.encode()


def _lists(count: int) -> str:
    return "[" + ",".join(["[]"] * count) + "]"


def _tool(parameters: str) -> tuple[str, bytes]:
    text = f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"a": {parameters}}}}}}}]'
    return "/v1/chat/completions", f'{{"messages": {json.dumps(_SAID)}, "max_tokens": 1, "tools": {text}}}'.encode()


BODIES: Mapping[str, Callable[[], tuple[str, bytes]]] = {
    "a schema that merges properties": lambda: _schema(_merged(100_000, 1_900)),
    "a small schema that merges properties": lambda: _schema(_merged(700, 700)),
    "a long $ref": lambda: _schema({"uniqueItems": True, "items": {"$ref": "#/" + "a/" * 3_000_000}}),
    "200,000 properties": lambda: _schema({"properties": {f"{name:x}": {"type": "null"} for name in range(200_000)}}),
    "a schema in a text": lambda: _chat(guided_json=json.dumps(_merged(100_000, 1_900))),
    "500,000 wrong logit_bias": lambda: _chat(logit_bias={f"x{name}": "a" for name in range(500_000)}),
    "nested tool parameters": lambda: _tool(_lists(2_500_000)),
    "30,000 tool parameters": lambda: _tool(_lists(30_000)),
    "tool parameters in objects": lambda: _tool("[" + ",".join(['{"a":{}}'] * 800_000) + "]"),
    "4,000,000 numbers as images": lambda: _ollama("[" + ",".join(["1"] * 4_000_000) + "]"),
    "250,000 numbers as context": lambda: _ollama("[" + ",".join(["1"] * 250_000) + "]", "context"),
    "1,000,000 wrong messages": lambda: ("/v1/chat/completions", f'{{"messages": {_lists(1_000_000)}}}'.encode()),
    "30,000 wrong messages": lambda: ("/v1/chat/completions", f'{{"messages": {_lists(30_000)}}}'.encode()),
    "4,000 wrong messages": lambda: ("/v1/chat/completions", f'{{"messages": {_lists(4_000)}}}'.encode()),
    "500,000 unknown parameters": lambda: _chat(**{f"x{name}": 1 for name in range(500_000)}),
    "30,000 unknown parameters": lambda: _chat(**{f"x{name}": 1 for name in range(30_000)}),
    "30,000 wrong metadata": lambda: (
        "/v1/responses", json.dumps({"input": "Hi", "metadata": {f"x{name}": 1 for name in range(30_000)}}).encode(),
    ),
    "lists in the arguments of a call": lambda: _call('{"a":' + _lists(1_300_000) + "}"),
    "lists within lists": lambda: _ollama("[" * 3_500_000),
    "escaped quotation marks": lambda: _chat(user='"' * 4_000_000),
    "escaped letters": lambda: _chat(user="é" * 1_300_000),
    "a number of digits": lambda: _ollama("1" * 8_000_000),
    "250,000 token ids to embed": lambda: ("/v1/embeddings", f'{{"input": {[1] * 250_000}}}'.encode()),
    "a million stops": lambda: _chat(stop=[""] * 1_000_000),
}  # fmt: skip


def freezing(quick: bool) -> Found:
    """Send each body, and ask for /health all the time; the server must answer both soon."""
    found, wrong = list[tuple[float, float, float]](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name, made in list(BODIES.items())[:: 4 if quick else 1]:
            path, body = made()
            with serving_pair(Path(folder)) as (process, url):
                before = most_memory(process.pid)
                answered, slowest = _attack(int(url.rpartition(":")[2]), path, body)
                memory = (most_memory(process.pid) - before) / 2**20
                if answered >= PATIENCE:  # it may be busy for minutes, and deaf to a request to end
                    process.kill()
            shown = f"{name}: answered after {answered:.2f} s, /health after {1e3 * slowest:.0f} ms, {memory:.0f} MiB"
            print(shown, file=sys.stderr, flush=True)
            found.append((answered, 1e3 * slowest, memory))
            if answered > LATEST_ANSWER or slowest > LATEST_HEALTH:
                wrong.append(shown)
    longest, latest, most = map(max, zip(*found, strict=True))
    return Found(len(found), tuple(wrong), {"longest s": longest, "health ms": latest, "most MiB": most})


def _attack(port: int, path: str, body: bytes) -> tuple[float, float]:
    """Return the seconds after which the body was answered, and the most after which /health was meanwhile."""
    ended, times = threading.Event(), [0.0]

    def watch() -> None:
        while not ended.wait(0.01):
            times.append(_seconds(port, "GET", "/health", None))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        answered = _seconds(port, "POST", path, body)
    finally:
        ended.set()
        watcher.join()
    return answered, max(times)


def _seconds(port: int, method: str, path: str, body: bytes | None) -> float:
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with suppress(OSError):
        connection.request(method, path, body, {"Content-Type": "application/json"})
        connection.getresponse().read()
    connection.close()
    return time.perf_counter() - began


ATTACKS = (Attack("http-bodies", "bodies that are expensive to check: do they hold up other requests?", freezing),)
