"""What the programs of all clients share. They run in an environment of their own, and import nothing of edgellm."""

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel

QUESTION = "The film night is on Friday at 20:00.\n\nWhen is the film night?"
ANSWER = "Friday"
WEATHER = "How is the weather in Bern?"
RAIN = "It rains."  # what the scripted model says once it has a tool's result

URL, MODEL, CALLER_URL = (*sys.argv[1:], "", "", "")[:3]
"""The server of the bundled pair, its model's name, and the server of the model that calls tools."""
CALLER, EMBEDDER = "caller", "embedder"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
_DAYS = {"day": {"enum": ["Monday", "Friday"]}}
DAY = {"type": "object", "properties": _DAYS, "required": ["day"], "additionalProperties": False}


class Plan(BaseModel):
    """When something is."""

    day: Literal["Monday", "Friday"]
    evening: bool


def check(fact: object, what: object = "") -> None:
    """Raise AssertionError where `fact` does not hold."""
    if not fact:
        raise AssertionError(f"not as expected: {what!r}")


def run(*features: Callable[[], object]) -> None:
    """Try each feature, a function whose docstring names it, and print a line of JSON about it."""
    for feature in features:
        outcome, detail = "works", ""
        try:
            made = feature()
            if inspect.iscoroutine(made):
                asyncio.run(made)
        except Exception as error:  # noqa: BLE001  what clients raise is what is looked for
            status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", 0)
            outcome = "refused" if status in (400, 404) else "fails"
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print(json.dumps({"feature": feature.__doc__, "outcome": outcome, "detail": detail}), flush=True)
