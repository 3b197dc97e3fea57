"""llama.cpp's own batches, watched."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from edgellm.engine import llama_api

FEW = 16  # rows; a decode of more is a prompt's

Decodes: TypeAlias = list[tuple[int, int]]
"""How many rows each had, and llama.cpp's answer."""
Watched: TypeAlias = tuple[Decodes, list[Callable[[], None]]]
"""And what is called before a prompt's, once: the first of a list."""


def watch_decodes(monkeypatch: pytest.MonkeyPatch) -> Watched:
    seen: Decodes = []
    meanwhile: list[Callable[[], None]] = []
    decode = llama_api._decode

    def watched(pointer: int, batch: Any) -> int:
        if batch.n_tokens > FEW and meanwhile:
            meanwhile.pop()()
        status = int(decode(pointer, batch))
        seen.append((batch.n_tokens, status))
        return status

    monkeypatch.setattr(llama_api, "_decode", watched)
    return seen, meanwhile
