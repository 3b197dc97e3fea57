"""Embeddings: OpenAI's `/v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`."""

from abc import abstractmethod
from base64 import b64encode
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from fastapi import FastAPI, Request
from pydantic import Field, PrivateAttr
from starlette.responses import Response

from edgellm.engine import Floats
from edgellm.errors import InvalidOption, Stopped
from edgellm.http.dialects import Dialect, plain_name
from edgellm.http.model_host import ServedEmbedder
from edgellm.http.replies import IGNORED, RequestHandler, header_names
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.errors import ApiError, invalid_request
from edgellm.http.schemas.fields import MAX_TOKENS, RequestModel
from edgellm.http.schemas.requests import TokenIds, as_list
from edgellm.http.schemas.responses import Json, json_bytes

FullText = Annotated[str, Field(min_length=1)]


class EmbedRequest(RequestModel):
    """The parameters of requests for vectors in every API, and the form of its replies."""

    model: str | None = Field(None, max_length=500, description="The name of the embedding model; may be left out.")
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Only what the model gives.")
    _accepted = ("user", "keep_alive")

    @abstractmethod
    def reply(self, name: str, vectors: Sequence[Floats], tokens: int) -> Json:
        """Return the reply of the model `name`, which has read `tokens` for the vectors."""


class EmbeddingsRequest(EmbedRequest):
    input: (
        FullText
        | Annotated[list[FullText], Field(min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1)]
    ) = Field(description="A text or several, or token ids.")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: float32, the least byte first.")

    truncate: ClassVar[bool] = False

    def reply(self, name: str, vectors: Sequence[Floats], tokens: int) -> Json:
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": name, "usage": usage}

    def _encoded(self, vector: Floats) -> list[float] | str:
        return (
            vector.tolist() if self.encoding_format == "float" else b64encode(vector.astype("<f4").tobytes()).decode()
        )


class OllamaEmbedRequest(EmbedRequest):
    input: str | list[str]
    truncate: bool = Field(True, description="Cut texts that are too long; false: refuse them.")

    _began: int = PrivateAttr(default_factory=perf_counter_ns)

    def reply(self, name: str, vectors: Sequence[Floats], tokens: int) -> Json:
        return {
            "model": self.model or name, "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": perf_counter_ns() - self._began, "load_duration": 0, "prompt_eval_count": tokens,
        }  # fmt: skip


class OllamaEmbeddingRequest(EmbedRequest):
    input: str = Field(alias="prompt")
    truncate: ClassVar[bool] = True

    def reply(self, name: str, vectors: Sequence[Floats], tokens: int) -> Json:  # noqa: ARG002
        return {"embedding": vectors[0].tolist()}


Asked: TypeAlias = EmbeddingsRequest | OllamaEmbedRequest | OllamaEmbeddingRequest


async def _embed(handler: RequestHandler, http: Request, request: Asked) -> Response:
    """Return the reply with the vectors of texts. Raises ApiError for another model or other dimensions."""
    name, served = plain_name(request.model), handler.models.embedder
    if served is None:
        message = "This server embeds no texts. Start it with --embeddings MODEL."
        raise ApiError(404, message, code="model_not_found")
    if name not in (None, served.name):
        message = f"The model {name!r} embeds no texts here. Ask for {served.name!r}, or leave model out."
        raise ApiError(404, message, code="model_not_found", param="model")
    texts, ignored = await in_reader(lambda: (as_list(request.input), header_names(request.unknown())))
    handler.check_known(ignored)
    width = served.embedder.width
    if request.dimensions not in (None, width):
        message = f"dimensions is {request.dimensions}, and {served.name} gives {width}. Leave dimensions out."
        raise invalid_request(message, "dimensions")
    found = await handler.compute(
        http, lambda left: json_bytes(request.reply(served.name, *_vectors(served, texts, request.truncate, left)))
    )
    headers = {IGNORED: ", ".join(ignored)} if ignored else {}
    return found if isinstance(found, Response) else Response(found, 200, headers, "application/json")


def _vectors(
    served: ServedEmbedder, texts: Sequence[str | Sequence[int]], cut: bool, has_left: Callable[[], bool]
) -> tuple[list[Floats], int]:
    """Return the vectors of `texts` or ids, and how many tokens they have. Raises as `Embedder` does; InvalidOption
    for an id that is no token; Stopped where the client `has_left`."""
    vectors, tokens, n_vocab = [], 0, served.embedder.model.n_vocab
    for text in texts:
        if has_left():
            raise Stopped
        if isinstance(text, str):
            ids = served.embedder.ids(text, cut=cut, should_stop=has_left)
        elif (bad := next((one for one in text if not 0 <= one < n_vocab), None)) is not None:
            raise InvalidOption(f"{bad} is not a token of {served.name}.", f"Ids are 0 to {n_vocab - 1}.")
        else:
            ids = np.array(text, dtype=np.int32)
        vectors.append(served.embedder.embed(ids))
        tokens += len(ids)
    return vectors, tokens


def _add(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/embeddings", tags=["OpenAI"], summary="The vectors of texts", response_class=Response)
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        return await _embed(handler, request, body)

    @app.post("/api/embed", tags=["Ollama"], summary="The vectors of texts", response_class=Response)
    async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
        return await _embed(handler, request, body)

    @app.post("/api/embeddings", tags=["Ollama"], summary="The vector of a text; /api/embed is newer",
              response_class=Response)  # fmt: skip
    async def embedding(body: OllamaEmbeddingRequest, request: Request) -> Response:
        return await _embed(handler, request, body)


DIALECT = Dialect(_add)
