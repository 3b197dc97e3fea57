"""Errors as the HTTP API reports them: a status and OpenAI's error object."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from edgellm.errors import (
    ContextFull,
    EdgeError,
    InputNotText,
    InvalidOption,
    MemoryShort,
    ModelUnsupported,
    ProfileUnusable,
    PromptTooLong,
    TextRefused,
    VerifierBusy,
    VerifierUnavailable,
)

INVALID = "invalid_request_error"
SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """OpenAI's error object, with the HTTP status.

    `retry_after` is in seconds; None where a repeated request would fail again.
    """

    status: Annotated[int, Field(exclude=True)]
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    retry_after: Annotated[float | None, Field(exclude=True)] = None

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


class ErrorResponse(BaseModel):
    error: ErrorInfo


def openai_error(info: ErrorInfo) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return ErrorResponse(error=info).model_dump()


_MEANINGS = {
    400: "The request is invalid; `param` names the parameter",
    401: "The API key is missing or wrong",
    403: "A wrong Host header, or a page of another origin",
    404: "There is no such model or conversation",
    408: "The request took too long to arrive",
    409: "The history is off, or the conversation was changed meanwhile",
    413: "The request is too large",
    415: "The request is not JSON",
    429: "The queue is full; see Retry-After",
    500: "The engine failed",
    503: "The model is being loaded or does not fit the memory, or the verifier is not available; see Retry-After",
}


def error_responses(*statuses: int, model: type[BaseModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that can fail with `statuses`, by default those of a reply, for FastAPI.
    `model` is the form of the errors."""
    chosen = statuses or [status for status in _MEANINGS if status != 409]
    return {status: {"model": model, "description": _MEANINGS[status]} for status in chosen}


class ApiError(Exception):
    """Raised for a request that is answered with an error."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def invalid_request(message: str, param: str | None = None) -> ApiError:
    """Return the exception for an invalid request."""
    return ApiError(ErrorInfo(400, message, param=param))


def error_info(error: BaseException) -> ErrorInfo:
    """Return the status and the error object for an exception. Details of unexpected exceptions are withheld."""
    if isinstance(error, ApiError):
        return error.info
    if isinstance(error, (PromptTooLong, ContextFull)):
        return ErrorInfo(400, str(error), code="context_length_exceeded")
    if isinstance(error, (InvalidOption, InputNotText, ModelUnsupported, ProfileUnusable, TextRefused)):
        return ErrorInfo(400, str(error))
    if isinstance(error, VerifierBusy):
        return ErrorInfo(503, str(error), SERVER, code="verifier_busy", retry_after=error.seconds)
    if isinstance(error, VerifierUnavailable):
        return ErrorInfo(503, str(error), SERVER, code="verifier_lost", retry_after=2.0)
    if isinstance(error, MemoryShort):
        return ErrorInfo(503, str(error), SERVER, code="memory_short")
    if isinstance(error, EdgeError):
        return ErrorInfo(500, str(error), SERVER)
    message = "An unexpected error occurred. The server's own output names it."
    return ErrorInfo(500, message, SERVER, code="internal_error")
