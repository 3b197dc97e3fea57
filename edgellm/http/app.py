"""The FastAPI application: its routes, its error handlers, and the page, which fetches nothing from other servers."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from edgellm.errors import EdgeError
from edgellm.http.conversations import add_conversations
from edgellm.http.dialects import dialects, error_body
from edgellm.http.metrics import CONTENT_TYPE
from edgellm.http.middleware import HIDDEN, Keys, known_peers, redact_all, shown_key
from edgellm.http.replies import IGNORED, RequestHandler
from edgellm.http.schemas.body import BodyRoute
from edgellm.http.schemas.errors import MEANINGS, ApiError, validation_error
from edgellm.http.schemas.requests import PhoneIn, UnloadRequest
from edgellm.http.schemas.responses import ModelInfo, ModelList
from edgellm.llm import LLM

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".png": "image/png",
                ".webmanifest": "application/manifest+json"}  # fmt: skip
_PAGE = files("edgellm.http") / "page"
_FILES = frozenset(
    folder + file.name
    for folder in ("", "vendor/")
    for file in (_PAGE / folder).iterdir()
    if Path(file.name).suffix in _MEDIA_TYPES
)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
    " manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HTTP_MESSAGES = {
    404: "There is nothing at this path. /openapi.json describes every path.",
    405: "This path does not support this method. /openapi.json describes every path.",
}


def page_file(name: str) -> Response:
    """Return one of the page's files. Raises HTTPException (404) for any other name."""
    if name not in _FILES:
        raise HTTPException(404)
    headers = {"Content-Security-Policy": _POLICY, "Service-Worker-Allowed": "/"}
    return Response((_PAGE / name).read_bytes(), media_type=_MEDIA_TYPES[Path(name).suffix], headers=headers)


def make_app(handler: RequestHandler, version: str) -> FastAPI:
    """Return the application over `handler`."""
    app = FastAPI(
        title="edgellm", version=version, docs_url=None, redoc_url=None, redirect_slashes=False,
        description="OpenAI's API over a pair of models. Parameters that are not described here have no effect; the"
        f" header {IGNORED} of the response names them. A strict server refuses them.",
        responses={status: {"description": meaning} for status, meaning in MEANINGS.items()},
    )  # fmt: skip
    app.router.route_class = BodyRoute
    _add_error_handlers(app, handler)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["server"], summary="Whether requests are accepted, and which models can answer")
    async def health() -> dict[str, str | dict[str, str]]:
        _ = handler.models.default_name  # raises while it loads
        loaded = {} if handler.config.key else handler.models.loaded  # where clients need a key none is named
        can_answer = {name: "ok" if one.can_write else "away" for name, one in loaded.items()}
        return {"status": "ok", **({"models": can_answer} if can_answer else {})}

    @app.get("/status", tags=["server"], summary="The page's data: models, devices, links")
    def status(request: Request) -> dict[str, Any]:
        return _status(handler, anonymous=handler.keys.is_anonymous(request))

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return page_file("index.html")

    @app.get("/page/{name:path}", include_in_schema=False)
    def file_of_page(name: str) -> Response:
        return page_file(name)

    @app.get("/metrics", tags=["server"], summary="Metrics for Prometheus", response_class=Response)
    def metrics() -> Response:
        return Response(handler.metrics.text(), media_type=CONTENT_TYPE)

    def shown(info: ModelInfo, request: Request) -> ModelInfo:
        return info.model_copy(update={"device": None}) if handler.keys.is_anonymous(request) else info

    @app.get("/v1/models", tags=["OpenAI"], summary="The models that requests can name")
    async def models(request: Request) -> ModelList:
        return ModelList(data=[shown(info, request) for info in await handler.models.infos()])

    @app.get("/v1/models/{model:path}", tags=["OpenAI"], summary="One model")
    async def model(model: str, request: Request) -> ModelInfo:
        return shown(await handler.models.info(model), request)

    @app.post("/models/unload", tags=["server"], summary="Remove a model from memory once no request uses it",
              response_description="`unloaded` is false while requests use the model")  # fmt: skip
    async def unload(body: UnloadRequest) -> dict[str, str | bool]:
        return {"model": body.model, "unloaded": await handler.models.unload(body.model)}

    _add_phones(app, handler.keys)
    add_conversations(app, handler.keys)
    for dialect in dialects():
        dialect.add(app, handler)
    return app


def _add_phones(app: FastAPI, keys: Keys) -> None:
    """Have phones paired: the user's own programs get a code, for which a phone gets its key."""

    @app.post("/phones", status_code=201, include_in_schema=False)
    def pair_phone(body: PhoneIn, request: Request) -> dict[str, str]:
        phone, key = keys.pair(body.code, body.name, shown_key(request))
        return {"name": phone.name, "key": key}

    @app.post("/phones/code", include_in_schema=False)
    def new_code(request: Request) -> dict[str, Any]:
        if not keys.is_page(shown_key(request)):
            raise ApiError(401, "Only the user's own programs get a code: edgellm pair", code="page_key_required")
        return {"code": keys.new_code(), "seconds": keys.CODE_SECONDS}


def _add_error_handlers(app: FastAPI, handler: RequestHandler) -> None:
    """Have every error answered in the form of the API that was asked."""

    async def respond(request: Request, error: Exception) -> Response:
        headers: Mapping[str, str] = {}
        if isinstance(error, RequestValidationError):
            error = validation_error(request, error.errors())
        elif isinstance(error, HTTPException):
            headers = error.headers or {}
            error = ApiError(error.status_code, _HTTP_MESSAGES.get(error.status_code, str(error.detail)))
        answer = handler.answer_to(error, handler.reader(request))
        body = error_body(request.url.path, answer)
        return Response(body, answer.status, {**answer.headers(), **headers}, "application/json")

    for kind in (ApiError, EdgeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, respond)


def _status(handler: RequestHandler, *, anonymous: bool) -> dict[str, Any]:
    """Return the server's state. To `anonymous` clients other devices are not named. Raises ApiError while the first
    model loads."""
    models, admission = handler.models, handler.admission
    served = models.default
    places = min(admission.max_running, (served and served.replies) or admission.max_running)
    status = {
        "model": models.default_name,
        "requests": {"running": admission.running, "waiting": admission.waiting, "places": places},
        "devices": [] if anonymous else [
            {"name": peer.name, "short": peer.id.short, "addresses": [*map(str, peer.addresses)],
             "may_here": sorted(peer.rights), "may_there": sorted(peer.granted)} for peer in known_peers()
        ],
        "anonymous": anonymous,
        "models": [
            {"name": one.name, **_of_pair(handler, one.served.pair, anonymous), "users": one.users,
             "memory": dict(one.served.pair.memory.by_device), "idle_s": one.idle_s, "expires_s": one.expires_s}
            for one in models.by_use()
        ],
        "loading": [*models.loading],
        "mesh": None if served is None or served.recorder is None else served.recorder.status(),
    }  # fmt: skip
    return redact_all(status) if anonymous else status


def _of_pair(handler: RequestHandler, pair: LLM, anonymous: bool) -> dict[str, Any]:
    """Return the fields about a pair. `link` is null where it verifies here; anonymous clients get no address."""
    link = None
    if pair.verifier_up is not None:
        address, reason = (HIDDEN, "") if anonymous else (pair.verifier_at, pair.verifier_reason)
        link = {"address": address, "up": pair.verifier_up(), "reason": reason, "rtt_ms": handler.metrics.rtt_ms}
    return {
        "draft": pair.draft_name, "verifier": pair.verifier_name, "context_length": pair.context_length,
        "sampling": asdict(pair.sampling), "link": link,
    }  # fmt: skip
