"""Bodies: limits before they are parsed, threads in which they are read, and one fault of each."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel, field_validator

from edgellm.engine.grammar import MAX_SCHEMA
from edgellm.http.schemas import body
from edgellm.http.schemas.body import BodyRoute, check_json
from edgellm.http.schemas.errors import ApiError
from tests.http.conftest import Ask, conversation

TEXTS = ["", "a", '"', "\\", '\\"', "[{,:", '"]}', "é\n", "\\\\" * 3, "," * 9, "[" * 200]


def drawn(draw: random.Random, depth: int) -> Any:
    """Return a random value of JSON."""
    kind = draw.randrange(5 if depth else 3)
    if kind == 3:
        return [drawn(draw, depth - 1) for _ in range(draw.randrange(5))]
    if kind == 4:
        return {draw.choice(TEXTS) + str(n): drawn(draw, depth - 1) for n in range(draw.randrange(5))}
    return draw.choice(TEXTS) if kind else draw.choice((1, -0.5, None, True))


def counted(value: Any) -> tuple[int, int, int]:
    """Return how many commas, nodes and levels the JSON of a value has."""
    if not isinstance(value, (dict, list)):
        return 0, 0, 0
    parts = [counted(part) for part in (value.values() if isinstance(value, dict) else value)]
    commas = max(0, len(value) - 1) + sum(part[0] for part in parts)
    nodes = 1 + (len(value) if isinstance(value, dict) else 0) + sum(part[1] for part in parts)
    return commas, nodes, 1 + max((part[2] for part in parts), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_limits_count_values_and_nothing_in_texts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    value = [drawn(draw, 4) for _ in range(draw.choice((3, 6000)))]  # the latter has several slices
    data = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
    limits = dict(zip(("MAX_VALUES", "MAX_NODES", "MAX_DEPTH"), counted(value), strict=True))
    for name, limit in limits.items():
        monkeypatch.setattr(body, name, limit)
    check_json(data)
    for name, limit in limits.items():
        monkeypatch.setattr(body, name, limit - 1)
        with pytest.raises(ApiError):
            check_json(data)
        monkeypatch.setattr(body, name, limit)


begun, go = threading.Event(), threading.Event()


class Slow(BaseModel):
    wait: bool

    @field_validator("wait")
    @classmethod
    def _waits(cls, value: bool) -> bool:
        begun.set()
        assert go.wait(60)
        return value


def test_the_loop_answers_others_while_a_body_is_read() -> None:
    app = FastAPI()
    app.router.route_class = BodyRoute

    @app.post("/slow")
    async def slow(body: Slow) -> bool:
        return body.wait

    @app.get("/health")
    async def health() -> str:
        return "ok"

    async def run() -> None:
        async with AsyncClient(transport=ASGITransport(app), base_url="http://test") as client:
            asked = asyncio.create_task(client.post("/slow", json={"wait": True}))
            assert await asyncio.to_thread(begun.wait, 60)
            assert (await client.get("/health")).json() == "ok"
            assert not asked.done()
            go.set()
            assert (await asked).json() is True

    asyncio.run(run())


def lists(count: int) -> list[list[object]]:
    return [[]] * count


def schema(given: object) -> dict[str, object]:
    return conversation(response_format={"type": "json_schema", "json_schema": {"schema": given}})


def tools(parameters: object) -> dict[str, object]:
    return conversation(tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": parameters}}}])


CALL = {"function": {"name": "f", "arguments": json.dumps({"a": lists(40_000)})}}
MANY = range(300_000)


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        ("chat/completions", schema({"properties": {str(n): True for n in MANY}}), 413),
        ("chat/completions", schema({"enum": ["a" * 2**15]}), 400),
        ("chat/completions", schema({"uniqueItems": True, "items": {"$ref": "#/" + "a/" * 2**14}}), 400),
        ("chat/completions", conversation(guided_json=json.dumps({"enum": lists(40_000)})), 413),
        ("chat/completions", conversation(logit_bias={f"x{n}": "a" for n in MANY}), 413),
        ("chat/completions", conversation(logit_bias={f"x{n}": "a" for n in range(20_000)}), 400),
        ("chat/completions", conversation(stop=["" for _ in MANY]), 413),
        ("chat/completions", conversation(stop=["" for _ in range(10_000)]), 400),
        ("chat/completions", tools(lists(40_000)), 413),
        ("chat/completions", tools([{"a": {}}] * 20_000), 413),
        ("chat/completions", {"messages": lists(40_000)}, 413),
        ("chat/completions", {"messages": lists(20_000)}, 400),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, 413),
        ("chat/completions", conversation(**{f"x{n}": 1 for n in MANY}), 413),
        ("completions", {"prompt": [*MANY]}, 413),
        ("completions", {"prompt": ["a"] * 10_000}, 400),
        ("responses", {"input": "a", "metadata": {f"x{n}": 1 for n in range(20_000)}}, 400),
        ("responses", {"input": lists(20_000)}, 400),
        ("messages", {"max_tokens": 1, "messages": lists(20_000)}, 400),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_would_take_long_is_refused_with_its_first_fault(
    ask: Ask, path: str, asked: dict[str, object], status: int
) -> None:
    answer = ask("POST", f"/v1/{path}", asked)
    assert answer.status == status
    assert len(answer.error["message"]) < 300
    if status == 413:
        assert answer.error["code"] == "request_too_large" or path == "messages"


def test_a_schema_names_its_limit(ask: Ask) -> None:
    answer = ask("POST", "/v1/chat/completions", schema({"$comment": "a" * MAX_SCHEMA}))
    assert f"at most {MAX_SCHEMA} are allowed" in answer.error["message"]


@pytest.mark.parametrize("coding", ["utf-16", "utf-32", "latin-1"])
def test_a_body_is_utf_8(ask: Ask, coding: str) -> None:
    answer = ask("POST", "/v1/chat/completions", json.dumps({"messages": "é"}, ensure_ascii=False).encode(coding))
    assert (answer.status, "UTF-8" in answer.error["message"]) == (400, True)
