"""The APIs, a module each: the form of their requests, answers and errors."""

from __future__ import annotations

from fastapi import FastAPI

from edgellm.http.dialects import anthropic, embeddings, ollama, openai, responses
from edgellm.http.handlers import RequestHandler
from edgellm.http.schemas.builder import json_bytes
from edgellm.http.schemas.errors import ErrorInfo, openai_error

DIALECTS = (openai.DIALECT, anthropic.DIALECT, ollama.DIALECT, responses.DIALECT, embeddings.DIALECT)


def add_dialects(app: FastAPI, handler: RequestHandler) -> None:
    """Add the paths of all dialects to `app`."""
    for dialect in DIALECTS:
        dialect.add(app, handler)


def error_body(path: str, info: ErrorInfo) -> bytes:
    """Return the JSON of an error in the form of the API that `path` belongs to, OpenAI's for most."""
    for dialect in DIALECTS:
        if dialect.has(path):
            return json_bytes(dialect.error(info))
    return json_bytes(openai_error(info))
