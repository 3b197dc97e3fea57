"""Embeddings: OpenAI's `/v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`."""

import base64
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from edgellm.engine import Floats
from edgellm.errors import InvalidOption, Stopped
from edgellm.http.dialects import Dialect, OllamaError, plain_name
from edgellm.http.model_host import ServedEmbedder
from edgellm.http.replies import IGNORED, RequestHandler, header_names
from edgellm.http.schemas import fields
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.errors import ApiError, error_responses, invalid_request
from edgellm.http.schemas.fields import MAX_TEXT, MAX_TOKENS, RequestModel, Text
from edgellm.http.schemas.requests import Texts, TokenIds, as_list
from edgellm.http.schemas.responses import Json, json_bytes

_MOST_TEXTS = 2048
_VECTORS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The vectors", "content": {"application/json": {"schema": {"type": "object"}}}}
}
_Reply: TypeAlias = Callable[[str, Sequence[Floats], int], Json]
"""Makes a reply of the model's name, the vectors, and the tokens that were read for them."""
FullText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class EmbedRequest(RequestModel):
    """The parameters of requests for vectors in every API."""

    model: str | None = Field(None, max_length=500, description="The name of the embedding model; may be left out.")
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Only what the model gives.")


class EmbeddingsRequest(EmbedRequest):
    input: (
        FullText
        | Annotated[list[FullText], Field(min_length=1, max_length=_MOST_TEXTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=_MOST_TEXTS)]
    ) = Field(description="A text or several, or token ids.")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: float32, the least byte first.")
    user: str | None = Field(None, max_length=1000, description="Accepted, but neither used nor passed on.")

    def encoded(self, vector: Floats) -> list[float] | str:
        if self.encoding_format == "float":
            return [float(one) for one in vector]
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class OllamaEmbedRequest(EmbedRequest):
    input: Text | Annotated[list[Text], Field(max_length=_MOST_TEXTS)]
    truncate: bool = Field(True, description="Cut texts that are too long; false: refuse them.")
    keep_alive: fields.KeepAlive = None


class OllamaEmbeddingRequest(EmbedRequest):
    prompt: Text
    keep_alive: fields.KeepAlive = None


async def _embed(
    handler: RequestHandler, http: Request, request: EmbedRequest, given: Texts, reply: _Reply, *, cut: bool
) -> Response:
    """Return the `reply` with the vectors of `given` texts. Raises ApiError for another model or other dimensions."""
    name, served = plain_name(request.model), handler.models.embedder
    if served is None:
        message = "This server embeds no texts. Start it with --embeddings MODEL."
        raise ApiError(404, message, code="model_not_found")
    if name not in (None, served.name):
        message = f"The model {name!r} embeds no texts here. Ask for {served.name!r}, or leave model out."
        raise ApiError(404, message, code="model_not_found", param="model")
    texts, ignored = await in_reader(lambda: (as_list(given), header_names(request.unknown())))
    handler.check_known(ignored)
    width = served.embedder.width
    if request.dimensions not in (None, width):
        message = f"dimensions is {request.dimensions}, and {served.name} gives {width}. Leave dimensions out."
        raise invalid_request(message, "dimensions")
    found = await handler.compute(
        http, lambda has_left: json_bytes(reply(served.name, *_vectors(served, texts, cut, has_left)))
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
    @app.post("/v1/embeddings", tags=["OpenAI"], summary="The vectors of texts", response_class=Response,
              responses=_VECTORS | error_responses())  # fmt: skip
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        def reply(name: str, vectors: Sequence[Floats], tokens: int) -> Json:
            data = [
                {"object": "embedding", "index": index, "embedding": body.encoded(vector)}
                for index, vector in enumerate(vectors)
            ]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return {"object": "list", "data": data, "model": name, "usage": usage}

        return await _embed(handler, request, body, body.input, reply, cut=False)

    errors = error_responses(model=OllamaError)

    @app.post("/api/embed", tags=["Ollama"], summary="The vectors of texts", response_class=Response,
              responses=_VECTORS | errors)  # fmt: skip
    async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
        began = perf_counter_ns()

        def reply(name: str, vectors: Sequence[Floats], tokens: int) -> Json:
            return {
                "model": body.model or name, "embeddings": [vector.tolist() for vector in vectors],
                "total_duration": perf_counter_ns() - began, "load_duration": 0, "prompt_eval_count": tokens,
            }  # fmt: skip

        return await _embed(handler, request, body, body.input, reply, cut=body.truncate)

    @app.post("/api/embeddings", tags=["Ollama"], summary="The vector of a text; /api/embed is newer",
              response_class=Response, responses=_VECTORS | errors)  # fmt: skip
    async def embedding(body: OllamaEmbeddingRequest, request: Request) -> Response:
        return await _embed(
            handler,
            request,
            body,
            body.prompt,
            lambda _name, vectors, _tokens: {"embedding": vectors[0].tolist()},
            cut=True,
        )


DIALECT = Dialect(_add)
