"""The interface of a dialect, and helpers of all dialects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError

from edgellm.http.replies import RequestHandler
from edgellm.http.schemas.errors import ErrorInfo, invalid_request
from edgellm.http.schemas.requests import ChatRequest
from edgellm.http.schemas.responses import Json


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API: `add` adds its paths, which begin with one of `prefixes`; `error` returns an error in its form."""

    prefixes: tuple[str, ...]
    error: Callable[[ErrorInfo], Json]
    add: Callable[[FastAPI, RequestHandler], None]

    def has(self, path: str) -> bool:
        """Return whether `path` belongs to this API."""
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in self.prefixes)


def replies(stream: str = "text/event-stream") -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` of a route that replies as another API, whole or as a `stream` of that type."""
    return {
        200: {
            "description": "The reply, whole or in pieces, as that API's own documentation describes it",
            "content": {"application/json": {"schema": {"type": "object"}}, stream: {"schema": {"type": "string"}}},
        }
    }


def chat_request(**fields: Any) -> ChatRequest:
    """Return a request with the `fields` that are not None. Raises ApiError where one is not OpenAI's."""
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise invalid_request(f"{name} cannot be used here: {first['msg']}.", name) from error
