"""Errors as the HTTP API tells them: a status, and OpenAI's form of an error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgellm.errors import (
    ContextFull,
    EdgeError,
    InputNotText,
    InvalidOption,
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
    """An HTTP status and the fields of OpenAI's error; `retry_after` in seconds, where asking again may help."""

    status: int
    message: str
    type: str = INVALID
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


class ApiError(Exception):
    """Raised for a request that is answered with a fault."""

    def __init__(self, fault: ErrorInfo) -> None:
        super().__init__(fault.message)
        self.fault = fault


def refuse(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the exception for a request that makes no sense."""
    return ApiError(ErrorInfo(400, message, param=param, code=code))


def fault_of(error: BaseException) -> ErrorInfo:
    """Return the fault for an error of ours, or for any other. Unexpected errors are not told in detail."""
    if isinstance(error, ApiError):
        return error.fault
    if isinstance(error, (PromptTooLong, ContextFull)):
        return ErrorInfo(400, str(error), code="context_length_exceeded")
    if isinstance(error, (InvalidOption, InputNotText, ModelUnsupported, ProfileUnusable, TextRefused)):
        return ErrorInfo(400, str(error))
    if isinstance(error, VerifierBusy):
        return ErrorInfo(503, str(error), SERVER, "verifier_busy", retry_after=error.seconds)
    if isinstance(error, VerifierUnavailable):
        return ErrorInfo(503, str(error), SERVER, "verifier_lost", retry_after=2.0)
    if isinstance(error, EdgeError):
        return ErrorInfo(500, str(error), SERVER)
    return ErrorInfo(500, "Something unexpected happened. The server's own output says what.", SERVER, "internal_error")
