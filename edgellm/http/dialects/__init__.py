"""The APIs, a module each: the form of their requests, answers and errors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError

from edgellm.http.replies import RequestHandler
from edgellm.http.schemas.errors import ApiError, invalid_request, openai_error
from edgellm.http.schemas.requests import ChatRequest
from edgellm.http.schemas.responses import Json, json_bytes

ABOUT = "JSON, whole or as a stream, as the API's own documentation describes it"
"""The description of a reply."""
NAMES = ("anthropic", "ollama", "responses", "embeddings", "openai")
"""The modules that are served; an error has the form of the first whose path it is below."""
LATEST = ":latest"
"""The tag that Ollama's clients add to names without one."""


def plain_name(name: str | None) -> str | None:
    """Return the name that Ollama's `name` means here."""
    return name.removesuffix(LATEST) if name else None


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API: `add` adds its paths; below `path`, if any, errors have the form of `error`, elsewhere OpenAI's."""

    add: Callable[[FastAPI, RequestHandler], None]
    path: str | None = None
    error: Callable[[ApiError], Json] = openai_error


@cache
def dialects() -> tuple[Dialect, ...]:
    """Import and return the APIs."""
    return tuple(import_module(f"{__name__}.{name}").DIALECT for name in NAMES)


def error_body(path: str, error: ApiError) -> bytes:
    """Return the JSON of an error in the form of the API that `path` belongs to."""
    forms = (one.error for one in dialects() if one.path and f"{path}/".startswith(f"{one.path}/"))
    return json_bytes(next(forms, openai_error)(error))


def chat_request(kind: type[ChatRequest] = ChatRequest, **fields: Any) -> ChatRequest:
    """Return a request with the `fields` that are not None. Raises ApiError where one is not OpenAI's."""
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise invalid_request(f"{name} cannot be used here: {first['msg']}.", name) from error
