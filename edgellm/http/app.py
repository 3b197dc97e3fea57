"""The FastAPI application: its routes, its error handlers, and the page, which fetches nothing from other servers."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from edgellm.errors import EdgeError
from edgellm.http.conversations import add_conversations
from edgellm.http.dialects import add_dialects, error_body
from edgellm.http.handlers import IGNORED, RequestHandler
from edgellm.http.metrics import CONTENT_TYPE
from edgellm.http.middleware import redact
from edgellm.http.schemas.body import BodyRoute
from edgellm.http.schemas.errors import ApiError, ErrorInfo, error_info, error_responses
from edgellm.http.schemas.requests import UnloadRequest
from edgellm.http.schemas.responses import Health, ModelInfo, ModelList, Unloaded
from edgellm.http.status import ServerStatus, server_health, server_status

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PAGE = files("edgellm.http") / "page"
_FOLDERS = ("", "vendor/")
_FILES = frozenset(
    folder + file.name
    for folder in _FOLDERS
    for file in (_PAGE / folder).iterdir()
    if Path(file.name).suffix in _MEDIA_TYPES
)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)


def page_file(name: str) -> Response:
    """Return one of the page's files. Raises HTTPException (404) for any other name."""
    if name not in _FILES:
        raise HTTPException(404)
    text = (_PAGE / name).read_text(encoding="utf-8")
    return Response(text, media_type=_MEDIA_TYPES[Path(name).suffix], headers={"Content-Security-Policy": _POLICY})


class _Application(FastAPI):
    """Describes itself when first asked, since the description takes most of the time of a start."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            for methods in super().openapi()["paths"].values():
                for method in methods.values():
                    method["responses"].pop("422", None)  # FastAPI's own error, which ours replaces
        return super().openapi()


def make_app(handler: RequestHandler, version: str, page_key: str | None = None) -> FastAPI:
    """Return the application over `handler`, without the `SecurityMiddleware` in front of it. `page_key` opens the
    user's conversations; None: they stay closed."""
    app = _Application(
        title="edgellm", version=version, docs_url=None, redoc_url=None, redirect_slashes=False,
        description="OpenAI's API over a pair of models. Parameters that are not described here have no effect; the"
        f" header {IGNORED} of the response names them. A strict server refuses them.",
    )  # fmt: skip
    app.router.route_class = BodyRoute
    _add_error_handlers(app, handler)
    _add_models(app, handler)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["server"], summary="Whether requests are accepted", responses=error_responses(503),
             response_model_exclude_none=True)  # fmt: skip
    async def health() -> Health:
        return server_health(handler)

    @app.get("/status", tags=["server"], summary="The page's data: models, devices, links",
             responses=error_responses(503))  # fmt: skip
    def status() -> ServerStatus:
        return server_status(handler)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return page_file("index.html")

    @app.get("/page/{name:path}", include_in_schema=False)
    def file_of_page(name: str) -> Response:
        return page_file(name)

    @app.get("/metrics", tags=["server"], summary="Metrics for Prometheus", response_class=Response,
             responses={200: {"content": {CONTENT_TYPE: {"schema": {"type": "string"}}}}})  # fmt: skip
    def metrics() -> Response:
        return Response(handler.metrics.text(), media_type=CONTENT_TYPE)

    add_conversations(app, page_key)
    add_dialects(app, handler)
    return app


def _add_models(app: FastAPI, handler: RequestHandler) -> None:
    """Add the paths that list and unload models."""

    def shown(info: ModelInfo) -> ModelInfo:
        return info.model_copy(update={"device": None}) if handler.anonymous else info

    @app.get("/v1/models", tags=["OpenAI"], summary="The models that requests can name", responses=error_responses(503))
    async def models() -> ModelList:
        return ModelList(data=[shown(info) for info in await handler.models.infos()])

    @app.get("/v1/models/{model:path}", tags=["OpenAI"], summary="One model", responses=error_responses(404, 503))
    async def model(model: str) -> ModelInfo:
        return shown(await handler.models.info(model))

    @app.post("/models/unload", tags=["server"], summary="Remove a model from memory once no request uses it",
              responses=error_responses())  # fmt: skip
    async def unload(body: UnloadRequest) -> Unloaded:
        return Unloaded(model=body.model, unloaded=await handler.models.unload(body.model))


def _add_error_handlers(app: FastAPI, handler: RequestHandler) -> None:
    """Have every error answered in the form of the API that was asked."""

    def respond(request: Request, info: ErrorInfo, headers: Mapping[str, str] | None = None) -> Response:
        message = redact(info.message) if handler.anonymous else info.message
        body = error_body(request.url.path, replace(info, message=message))
        return Response(body, info.status, {**info.headers(), **(headers or {})}, "application/json")

    async def handle_known(request: Request, error: Exception) -> Response:
        return respond(request, error_info(error))

    async def handle_validation(request: Request, error: Exception) -> Response:
        errors = error.errors() if isinstance(error, RequestValidationError) else []
        return respond(request, _validation_error(request, errors))

    async def handle_http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return respond(request, error_info(error))
        message = _HTTP_MESSAGES.get(error.status_code, str(error.detail))
        return respond(request, ErrorInfo(error.status_code, message), error.headers)

    async def handle_unexpected(request: Request, error: Exception) -> Response:
        handler.report_unexpected(error)
        return respond(request, error_info(error))

    app.add_exception_handler(ApiError, handle_known)
    app.add_exception_handler(EdgeError, handle_known)
    app.add_exception_handler(RequestValidationError, handle_validation)
    app.add_exception_handler(HTTPException, handle_http)
    app.add_exception_handler(Exception, handle_unexpected)


_HTTP_MESSAGES = {
    400: "The body cannot be read as JSON. Send a JSON object in UTF-8.",
    404: "There is nothing at this path. /openapi.json describes every path.",
    405: "This path does not support this method. /openapi.json describes every path.",
}
_FIELD = re.compile(r"[a-z_]+|\d+")
_TYPES = ("str", "int", "float", "bool", "list")  # pydantic adds the alternatives' names to an error's location


def _validation_error(request: Request, errors: Sequence[Any]) -> ErrorInfo:
    """Return a sentence about the first invalid part of a request, and the parameter that it is about."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    of_body = not errors or any(error["loc"][0] == "body" for error in errors)
    if of_body and media_type != "application/json" and not media_type.endswith("+json"):
        return ErrorInfo(415, f"The Content-Type is {media_type or 'missing'}. Send application/json.")
    if not errors:
        return ErrorInfo(400, "The request is not as /openapi.json describes it.")
    # the alternative that came nearest: a list that is too long is of the right kind
    first = max(
        errors, key=lambda error: (error["type"] == "too_long", len(error["loc"]), not error["type"].endswith("_type"))
    )
    if first["type"] == "json_invalid":
        return ErrorInfo(400, f"The body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}.")
    name = ".".join(part for part in map(str, first["loc"][1:]) if _FIELD.fullmatch(part) and part not in _TYPES)
    if first["type"] == "missing":
        return ErrorInfo(400, f"{name or 'The body'} is missing. /openapi.json describes it.", param=name or None)
    value = first["input"]
    shown = (
        f" is {reprlib.repr(value)}" if isinstance(value, (str, int, float)) or value == [] else " has a wrong value"
    )
    return ErrorInfo(400, f"{name or 'The body'}{shown}. {_advice(first)}", param=name or None)


_KINDS = {
    "string": "a text", "int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list",
    "datetime": "a time such as 2026-01-31T12:00:00Z",
    "dict": "an object", "model": "an object", "model_attributes": "an object", "dataclass": "an object",
}  # fmt: skip
_BOUNDS = {
    "greater_than_equal": ("a number of at least {ge}", "ge"), "greater_than": ("a number above {gt}", "gt"),
    "less_than_equal": ("a number of at most {le}", "le"), "less_than": ("a number below {lt}", "lt"),
    "string_too_long": ("at most {max_length} characters", "max_length"),
    "string_too_short": ("at least {min_length} characters", "min_length"),
    "too_long": ("at most {max_length} of them", "max_length"),
    "too_short": ("at least {min_length} of them", "min_length"),
    "literal_error": ("one of {expected}", "expected"),
    "string_pattern_mismatch": ("a text of the form {pattern}", "pattern"),
}  # fmt: skip
"""Advice by pydantic's name of an error, and the figure in the error."""


def _advice(error: Mapping[str, Any]) -> str:
    """Return advice for a value that pydantic refuses."""
    name: str = error["type"]
    kind = _KINDS.get(name.removesuffix("_type").removesuffix("_parsing"))
    if name in ("finite_number", "int_from_float"):
        kind = _KINDS["float" if name == "finite_number" else "int"]
    if name.startswith(("datetime", "timezone")):
        kind = _KINDS["datetime"]
    if kind is not None:
        return f"Give {kind}."
    if name == "none_required":
        return "It is not supported here; leave it out."
    if name == "string_unicode":
        return "Give a text in valid Unicode."
    bound, figure = _BOUNDS.get(name, ("", ""))
    if figure in error.get("ctx", {}):
        return f"Give {bound.format(**error['ctx'])}."
    return "/openapi.json describes what it takes."
