"""Errors as the HTTP API reports them: a status and OpenAI's error object."""

import math
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request

from edgellm import errors

_KINDS_OF_ERRORS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Raised for a request that is answered with OpenAI's error object. `retry_after`: seconds; None: not at all."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = _KINDS_OF_ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


MEANINGS: dict[int | str, str] = {
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
    "4XX": "The request is refused",  # in place of FastAPI's own error
}
"""The statuses of errors, which have the form of the API that was asked."""


def invalid_request(message: str, param: str | None = None) -> ApiError:
    """Return the exception for an invalid request."""
    return ApiError(400, message, param=param)


_ANSWERS: dict[type[BaseException], tuple[int, str | None, float | None]] = {
    errors.InvalidOption: (400, None, None),
    errors.InputNotText: (400, None, None),
    errors.ModelUnsupported: (400, None, None),
    errors.ProfileUnusable: (400, None, None),
    errors.TextRefused: (400, None, None),
    errors.PromptTooLong: (400, "context_length_exceeded", None),
    errors.ContextFull: (400, "context_length_exceeded", None),
    errors.ConversationChanged: (409, "conversation_changed", None),
    errors.ConversationTooLong: (413, "conversation_too_long", None),
    errors.HistoryUnusable: (503, "history_unusable", 2.0),
    errors.VerifierBusy: (503, "verifier_busy", 1.0),
    errors.VerifierUnavailable: (503, "verifier_lost", 2.0),
    errors.MemoryShort: (503, "memory_short", None),
    errors.EdgeError: (500, None, None),
}
"""The status, the code and the seconds until a repetition for each kind of error."""


def api_error(error: BaseException, shown: Callable[[str], str]) -> ApiError:
    """Return the answer to an exception, its message as `shown` to clients. Details of unexpected ones are withheld."""
    if isinstance(error, ApiError):
        return ApiError(
            error.status, shown(error.message), param=error.param, code=error.code, retry_after=error.retry_after
        )
    for kind in type(error).__mro__:
        if kind in _ANSWERS:
            status, code, seconds = _ANSWERS[kind]
            return ApiError(status, shown(str(error)), code=code, retry_after=getattr(error, "seconds", seconds))
    return ApiError(500, "An unexpected error occurred. The server's own output names it.", code="internal_error")


_FIELD = re.compile(r"[a-z_]+|\d+")
_TYPES = ("str", "int", "float", "bool", "list")  # pydantic adds the alternatives' names to an error's location
_PYDANTICS = re.compile(" (after validation|or instance of|or object to).*")  # what it says of itself in an error


def is_json(request: Request) -> bool:
    """Return whether a request says that its body is JSON. In Ollama's API it always is: curl sends it as a form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json") or request.url.path.startswith("/api/")


def validation_error(request: Request, faults: Sequence[Any]) -> ApiError:
    """Return a sentence about the first invalid part of a request, and the parameter that it is about."""
    if not is_json(request) and any(fault["loc"][0] == "body" for fault in faults):
        kind = request.headers.get("content-type", "")[:100]
        return ApiError(415, f"The Content-Type is {kind or 'missing'}. Send application/json.")
    # the alternative that came nearest: a list that is too long is of the right kind
    first = max(
        faults, key=lambda fault: (fault["type"] == "too_long", len(fault["loc"]), not fault["type"].endswith("_type"))
    )
    name = ".".join(part for part in map(str, first["loc"][1:]) if _FIELD.fullmatch(part) and part not in _TYPES)
    what, value = name or "The body", first["input"]
    if first["type"] == "missing":
        return ApiError(400, f"{what} is missing. /openapi.json describes it.", param=name or None)
    shown = f"is {reprlib.repr(value)}" if isinstance(value, (str, int, float)) or value == [] else "has a wrong value"
    unsupported = first["type"] == "none_required"
    advice = "It is not supported here; leave it out" if unsupported else _PYDANTICS.sub("", first["msg"])
    advice = advice.replace("Input should", "It should")
    return ApiError(400, f"{what} {shown}. {advice}.", param=name or None)
