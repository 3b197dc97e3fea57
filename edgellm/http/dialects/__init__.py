"""The APIs, a module each: the form of their requests, answers and errors."""

from __future__ import annotations

from edgellm.http.dialects import anthropic, embeddings, ollama, openai, responses
from edgellm.http.schemas.errors import ErrorInfo, openai_error
from edgellm.http.schemas.responses import json_bytes

DIALECTS = (
    anthropic.DIALECT,
    ollama.DIALECT,
    responses.DIALECT,
    embeddings.DIALECT,
    openai.DIALECT,
)


def error_body(path: str, info: ErrorInfo) -> bytes:
    """Return the JSON of an error in the form of the API that `path` belongs to, OpenAI's for most."""
    error = next((dialect.error for dialect in DIALECTS if dialect.has(path)), openai_error)
    return json_bytes(error(info))
