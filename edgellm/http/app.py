"""The FastAPI application, its routes, and its page, which can fetch nothing from anywhere else."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from edgellm.errors import EdgeError
from edgellm.http.handlers import (
    RequestHandler,
    ServedModel,
    chat_options,
    check_model,
    completion_options,
    messages,
    plain_prompt,
)
from edgellm.http.metrics import CONTENT_TYPE
from edgellm.http.middleware import redact_fault
from edgellm.http.schemas.errors import INVALID, ApiError, ErrorInfo, fault_of
from edgellm.http.schemas.openapi import FAULTS, described
from edgellm.http.schemas.requests import ChatRequest, CompletionRequest
from edgellm.http.schemas.responses import ChatShape, CompletionShape
from edgellm.http.status import describe

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = ("index.html", "page.css", "chat.js", "side.js")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)


def page_file(name: str) -> Response:
    """Return one of the page's files. Raises HTTPException (404) for any other name."""
    if name not in _FILES:
        raise HTTPException(404)
    text = (files("edgellm.http") / "page" / name).read_text(encoding="utf-8")
    kind = _KINDS[name.rpartition(".")[2]]
    return Response(text, media_type=kind, headers={"Content-Security-Policy": _POLICY})


def make_app(reception: RequestHandler, version: str) -> FastAPI:
    """Return the application over `reception`, without the `SecurityMiddleware` in front of it."""
    app = FastAPI(
        title="edgellm", version=version, docs_url=None, redoc_url=None, redirect_slashes=False,
        description="OpenAI's API over a pair of models. What is not described here is refused, never ignored.",
    )  # fmt: skip
    _answer_faults(app, reception)
    began = int(time.time())

    @app.get("/health", tags=["server"], summary="Whether requests are taken", responses=FAULTS[503])
    def health() -> dict[str, str]:
        reception.ready()
        return {"status": "ok"}

    @app.get("/status", tags=["server"], summary="For the page: who writes, devices, links", responses=FAULTS[503])
    def status() -> dict[str, Any]:
        return describe(reception)

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return page_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    def part(name: str) -> Response:
        return page_file(name)

    @app.get("/metrics", tags=["server"], summary="For Prometheus", response_class=Response,
             responses={200: {"content": {CONTENT_TYPE: {"schema": {"type": "string"}}}}})  # fmt: skip
    def metrics() -> Response:
        return Response(reception.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/models", tags=["OpenAI"], summary="The model that writes", responses=FAULTS[503])
    def models() -> dict[str, Any]:
        writer = reception.ready()
        return {"object": "list", "data": [] if writer is None else [_model(writer, began)]}

    @app.get("/v1/models/{model:path}", tags=["OpenAI"], summary="One model", responses=FAULTS[404] | FAULTS[503])
    def model(model: str) -> dict[str, Any]:
        writer = reception.writer()
        check_model(model, writer)
        return _model(writer, began)

    @app.post("/v1/chat/completions", tags=["OpenAI"], summary="A reply to a conversation", **described("chat"))
    async def chat(ask: ChatRequest, request: Request) -> Response:
        writer = reception.writer()
        pair, options, turns = writer.pair, chat_options(ask, writer), messages(ask)
        shape = ChatShape(writer.name, pair.piece)
        return await reception.answer(request, ask, lambda gone: pair.reply(turns, options, stopped=gone), shape)

    @app.post("/v1/completions", tags=["OpenAI"], summary="What follows a text", **described("completion"))
    async def completions(ask: CompletionRequest, request: Request) -> Response:
        writer = reception.writer()
        pair, options, prompt = writer.pair, completion_options(ask, writer), plain_prompt(ask)
        shape = CompletionShape(writer.name, pair.piece)
        return await reception.answer(request, ask, lambda gone: pair.complete(prompt, options, stopped=gone), shape)

    for methods in app.openapi()["paths"].values():
        for method in methods.values():
            method["responses"].pop("422", None)  # FastAPI's own error, which ours replaces
    return app


def _model(writer: ServedModel, created: int) -> dict[str, Any]:
    return {
        "id": writer.name,
        "object": "model",
        "created": created,
        "owned_by": "edgellm",
        "context_length": writer.pair.context_length,
    }


def _answer_faults(app: FastAPI, reception: RequestHandler) -> None:
    """Have every error answered in OpenAI's form."""

    def told(fault: ErrorInfo, more: Mapping[str, str] | None = None) -> JSONResponse:
        shown = redact_fault(fault) if reception.anonymous else fault
        return JSONResponse(shown.body(), shown.status, {**shown.headers(), **(more or {})})

    async def ours(_request: Request, error: Exception) -> Response:
        return told(fault_of(error))

    async def malformed(request: Request, error: Exception) -> Response:
        return told(_malformed(request, error.errors() if isinstance(error, RequestValidationError) else []))

    async def plain(_request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return told(fault_of(error))
        return told(ErrorInfo(error.status_code, _PLAIN.get(error.status_code, str(error.detail))), error.headers)

    async def unexpected(_request: Request, error: Exception) -> Response:
        reception.unexpected(error)
        return told(fault_of(error))

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(EdgeError, ours)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(Exception, unexpected)


_PLAIN = {404: "There is nothing here. /openapi.json tells what there is.", 405: "This path has other methods."}


_NAME = re.compile(r"[a-z_]+|\d+")
_TYPES = ("str", "int", "float", "bool", "list")  # pydantic adds the alternatives' names to an error's location


def _malformed(request: Request, errors: Sequence[Any]) -> ErrorInfo:
    """Return the first thing that is wrong with a request, in words, and the parameter it is about."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        return ErrorInfo(415, f"The request is {kind or 'of no type'}; send Content-Type: application/json.", INVALID)
    if not errors:
        return ErrorInfo(400, "The request is not what /openapi.json describes.")
    first = max(errors, key=lambda error: len(error["loc"]))  # of alternatives, the one that came nearest
    if first["type"] == "json_invalid":
        return ErrorInfo(400, f"The request is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}.")
    name = ".".join(part for part in map(str, first["loc"][1:]) if _NAME.fullmatch(part) and part not in _TYPES)
    if first["type"] == "extra_forbidden":
        return ErrorInfo(400, f"There is no parameter {name}. Leave it out.", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return ErrorInfo(400, f"{name or 'The body'} is missing.", param=name or None)
    return ErrorInfo(400, f"{name or 'The body'}: {first['msg']}.", param=name or None)
