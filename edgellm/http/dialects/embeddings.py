"""Embeddings: OpenAI's `/v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from edgellm.engine import Floats
from edgellm.http.dialects.dialect import Dialect
from edgellm.http.dialects.ollama import OllamaError, plain_name
from edgellm.http.embedding import EmbeddedTexts
from edgellm.http.handlers import RequestHandler
from edgellm.http.schemas.errors import ErrorInfo, ErrorResponse, error_responses, invalid_request
from edgellm.http.schemas.requests import MAX_TEXT, MAX_TOKENS, RequestModel

_MOST_TEXTS = 2048
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1, max_length=MAX_TOKENS)]


class EmbeddingsRequest(RequestModel):
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=_MOST_TEXTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=_MOST_TEXTS)]
    ) = Field(description="A text or several, or token ids.")
    model: str | None = Field(None, max_length=500, description="The name of the embedding model; may be left out.")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: float32, the least byte first.")
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Only what the model gives.")
    user: str | None = Field(None, max_length=1000, description="Accepted, but neither used nor passed on.")

    def texts(self) -> list[str | Sequence[int]]:
        """Return what is to be embedded, one by one."""
        if isinstance(self.input, str):
            return [self.input]
        numbers = [one for one in self.input if isinstance(one, int)]
        return [numbers] if numbers else [one for one in self.input if not isinstance(one, int)]


class EmbeddingOut(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingOut]
    model: str
    usage: EmbeddingsUsage


class OllamaEmbedRequest(RequestModel):
    model: str = Field(max_length=500)
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=_MOST_TEXTS)]
    truncate: bool = Field(True, description="Cut texts that are too long; false: refuse them.")
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Only what the model gives.")
    keep_alive: float | Annotated[str, Field(max_length=40)] | None = Field(None, description="Accepted.")


class OllamaEmbedReply(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingRequest(RequestModel):
    model: str = Field(max_length=500)
    prompt: Text
    keep_alive: float | Annotated[str, Field(max_length=40)] | None = Field(None, description="Accepted.")


class OllamaEmbeddingReply(BaseModel):
    embedding: list[float]


async def _embed(
    handler: RequestHandler, http: Request, request: RequestModel, model: str | None,
    texts: Sequence[str | Sequence[int]], dimensions: int | None = None, *, cut: bool = False,
) -> EmbeddedTexts | Response:  # fmt: skip
    """Return the vectors of `texts` for `request`. Raises ApiError where the model is another one, or gives vectors of
    other dimensions."""
    handler.check_known(list(request.unknown()))
    embedder = handler.embedder(model)
    if dimensions not in (None, embedder.width):
        raise invalid_request(
            f"dimensions is {dimensions}, and {embedder.name} gives {embedder.width}. Leave dimensions out.",
            "dimensions",
        )
    return await handler.compute(http, lambda has_left: embedder.embed(texts, has_left, cut=cut))


def _encoded(vector: Floats, form: Literal["float", "base64"]) -> list[float] | str:
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _add(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/embeddings", tags=["OpenAI"], summary="The vectors of texts", responses=error_responses(),
              response_model=EmbeddingsReply)  # fmt: skip
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response | EmbeddingsReply:
        found = await _embed(handler, request, body, body.model, body.texts(), body.dimensions)
        if isinstance(found, Response):
            return found
        data = [
            EmbeddingOut(object="embedding", index=index, embedding=_encoded(vector, body.encoding_format))
            for index, vector in enumerate(found.vectors)
        ]
        usage = EmbeddingsUsage(prompt_tokens=found.tokens, total_tokens=found.tokens)
        return EmbeddingsReply(object="list", data=data, model=handler.embedder(None).name, usage=usage)

    ollama = error_responses(model=OllamaError)

    @app.post("/api/embed", tags=["Ollama"], summary="The vectors of texts", responses=ollama,
              response_model=OllamaEmbedReply)  # fmt: skip
    async def embed(body: OllamaEmbedRequest, request: Request) -> Response | OllamaEmbedReply:
        began, texts = perf_counter_ns(), [body.input] if isinstance(body.input, str) else list(body.input)
        name = plain_name(body.model)
        found = await _embed(handler, request, body, name, texts, body.dimensions, cut=body.truncate)
        if isinstance(found, Response):
            return found
        return OllamaEmbedReply(
            model=body.model, embeddings=[vector.tolist() for vector in found.vectors],
            total_duration=perf_counter_ns() - began, load_duration=0, prompt_eval_count=found.tokens,
        )  # fmt: skip

    @app.post("/api/embeddings", tags=["Ollama"], summary="The vector of a text; /api/embed is newer",
              responses=ollama, response_model=OllamaEmbeddingReply)  # fmt: skip
    async def embedding(body: OllamaEmbeddingRequest, request: Request) -> Response | OllamaEmbeddingReply:
        name = plain_name(body.model)
        found = await _embed(handler, request, body, name, [body.prompt], cut=True)
        return found if isinstance(found, Response) else OllamaEmbeddingReply(embedding=found.vectors[0].tolist())


def _error(info: ErrorInfo) -> BaseModel:
    return ErrorResponse(error=info)


DIALECT = Dialect(("/v1/embeddings",), _error, _add)
