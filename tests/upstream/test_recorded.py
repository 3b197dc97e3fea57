"""The conformance server's answers are those of real servers, which were recorded once.

They were asked with the same model, so that tokens are the same, too.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from testkit.upstream.dialects import MODEL
from testkit.upstream.engine import Engine
from testkit.upstream.kinds import KINDS

RECORDED = Path(__file__).parents[2] / "testkit" / "upstream" / "recorded"
SAME = {"tokens", "text", "content", "token_ids", "prompt", "stop_type", "finish_reason", "owned_by", "index"}
"""Fields whose values are the same as those of the real server."""


def differences(ours: Any, real: Any, place: str = "") -> list[str]:
    """What of our answer is not in the real one, of another kind, or of another value in a field of `SAME`."""
    if ours is None or real is None:
        return []  # what some versions leave out
    if isinstance(ours, dict):
        if not isinstance(real, dict):
            return [f"{place}: no object there"]
        # the names of tokens are no names of fields
        mine = ours if not place.endswith(("top_logprobs", "prompt_logprobs[]")) else {}
        found = [f"{place}.{name}: not there" for name in mine if name not in real]
        for name in mine.keys() & real.keys():
            found += differences(mine[name], real[name], f"{place}.{name}")
            named = isinstance(mine[name], list) and any(isinstance(one, dict) for one in mine[name])
            if name in SAME and not named and mine[name] != real[name]:
                found.append(f"{place}.{name}: {mine[name]} here, {real[name]} there")
        return found
    if isinstance(ours, list):
        if not isinstance(real, list):
            return [f"{place}: no list there"]
        return [one for a, b in zip(ours, real, strict=False) for one in differences(a, b, f"{place}[]")]
    numbers = isinstance(ours, (int, float)) and isinstance(real, (int, float))
    return [] if numbers or type(ours) is type(real) else [f"{place}: {type(real).__name__} there"]


def exchanges() -> list[tuple[str, Any]]:
    files = sorted(RECORDED.glob("*.json"))
    return [(file.stem, one) for file in files for one in json.loads(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("kind", "exchange"), [pytest.param(kind, one, id=f"{kind}{one['path']}") for kind, one in exchanges()]
)
def test_our_answers_are_the_real_ones(kind: str, exchange: Any, engine: Engine) -> None:
    dialect = KINDS[kind](engine)
    if exchange["body"] is None:
        ours = dialect.get(exchange["path"])
    else:
        ours = dialect.post(
            exchange["path"], exchange["body"] | ({"model": MODEL} if "model" in exchange["body"] else {})
        )
    assert not differences(ours, exchange["answer"])
