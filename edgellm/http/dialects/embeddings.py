"""Embeddings: OpenAI's `/v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from edgellm.engine import Floats
from edgellm.http.dialects.dialect import Dialect
from edgellm.http.dialects.ollama import OllamaError, plain_name
from edgellm.http.embedding import EmbeddedTexts, ServedEmbedder
from edgellm.http.handlers import IGNORED, RequestHandler, header_names
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.builder import Json, json_bytes
from edgellm.http.schemas.errors import ApiError, ErrorInfo, error_responses, invalid_request, openai_error
from edgellm.http.schemas.request_model import MAX_TEXT, MAX_TOKENS, RequestModel
from edgellm.http.schemas.requests import TokenIds, as_list

_MOST_TEXTS = 2048
_VECTORS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The vectors", "content": {"application/json": {"schema": {"type": "object"}}}}
}
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
PerhapsEmpty = Annotated[str, Field(max_length=MAX_TEXT)]


class EmbedRequest(RequestModel):
    """The parameters of requests for vectors in every API. `cut`: texts that are too long lose their end."""

    model: str | None = Field(None, max_length=500, description="The name of the embedding model; may be left out.")
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Only what the model gives.")

    @property
    def cut(self) -> bool:
        return True

    @abstractmethod
    def texts(self) -> Sequence[str | Sequence[int]]:
        """Return the texts to embed."""


class EmbeddingsRequest(EmbedRequest):
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=_MOST_TEXTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=_MOST_TEXTS)]
    ) = Field(description="A text or several, or token ids.")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: float32, the least byte first.")
    user: str | None = Field(None, max_length=1000, description="Accepted, but neither used nor passed on.")

    @property
    def cut(self) -> bool:
        return False

    def texts(self) -> Sequence[str | Sequence[int]]:
        return as_list(self.input)


class OllamaEmbedRequest(EmbedRequest):
    input: PerhapsEmpty | Annotated[list[PerhapsEmpty], Field(max_length=_MOST_TEXTS)]
    truncate: bool = Field(True, description="Cut texts that are too long; false: refuse them.")
    keep_alive: float | Annotated[str, Field(max_length=40)] | None = Field(None, description="Accepted.")

    @property
    def cut(self) -> bool:
        return self.truncate

    def texts(self) -> Sequence[str | Sequence[int]]:
        return as_list(self.input)


class OllamaEmbeddingRequest(EmbedRequest):
    prompt: PerhapsEmpty
    keep_alive: float | Annotated[str, Field(max_length=40)] | None = Field(None, description="Accepted.")

    def texts(self) -> Sequence[str | Sequence[int]]:
        return [self.prompt]


def _named(handler: RequestHandler, name: str | None) -> ServedEmbedder:
    """Return the embedding model. Raises ApiError (404) where there is none, or none of that `name`."""
    if (served := handler.models.embedder) is None:
        message = "This server embeds no texts. Start it with --embeddings MODEL."
        raise ApiError(ErrorInfo(404, message, code="model_not_found"))
    if name not in (None, served.name):
        message = f"The model {name!r} embeds no texts here. Ask for {served.name!r}, or leave model out."
        raise ApiError(ErrorInfo(404, message, code="model_not_found", param="model"))
    return served


async def _embed(
    handler: RequestHandler, http: Request, request: EmbedRequest,
    reply: Callable[[ServedEmbedder, EmbeddedTexts], Json],
) -> Response:  # fmt: skip
    """Return the `reply` with the vectors for `request`. Raises ApiError where the model is another one, or gives
    vectors of other dimensions."""
    embedder = _named(handler, plain_name(request.model))
    texts, ignored = await in_reader(lambda: (request.texts(), header_names(request.unknown())))
    handler.check_known(ignored)
    if request.dimensions not in (None, embedder.width):
        raise invalid_request(
            f"dimensions is {request.dimensions}, and {embedder.name} gives {embedder.width}. Leave dimensions out.",
            "dimensions",
        )
    found = await handler.compute(
        http, lambda has_left: json_bytes(reply(embedder, embedder.embed(texts, has_left, cut=request.cut)))
    )
    headers = {IGNORED: ", ".join(ignored)} if ignored else {}
    return found if isinstance(found, Response) else Response(found, 200, headers, "application/json")


def _encoded(vector: Floats, form: Literal["float", "base64"]) -> list[float] | str:
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _add(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/embeddings", tags=["OpenAI"], summary="The vectors of texts", response_class=Response,
              responses=_VECTORS | error_responses())  # fmt: skip
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        def reply(embedder: ServedEmbedder, found: EmbeddedTexts) -> Json:
            data = [
                {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
                for index, vector in enumerate(found.vectors)
            ]
            usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
            return {"object": "list", "data": data, "model": embedder.name, "usage": usage}

        return await _embed(handler, request, body, reply)

    ollama = error_responses(model=OllamaError)

    @app.post("/api/embed", tags=["Ollama"], summary="The vectors of texts", response_class=Response,
              responses=_VECTORS | ollama)  # fmt: skip
    async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
        began = perf_counter_ns()

        def reply(embedder: ServedEmbedder, found: EmbeddedTexts) -> Json:
            return {
                "model": body.model or embedder.name, "embeddings": [vector.tolist() for vector in found.vectors],
                "total_duration": perf_counter_ns() - began, "load_duration": 0, "prompt_eval_count": found.tokens,
            }  # fmt: skip

        return await _embed(handler, request, body, reply)

    @app.post("/api/embeddings", tags=["Ollama"], summary="The vector of a text; /api/embed is newer",
              response_class=Response, responses=_VECTORS | ollama)  # fmt: skip
    async def embedding(body: OllamaEmbeddingRequest, request: Request) -> Response:
        return await _embed(handler, request, body, lambda _, found: {"embedding": found.vectors[0].tolist()})


DIALECT = Dialect(("/v1/embeddings",), openai_error, _add)
