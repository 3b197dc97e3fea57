"""llama.cpp's own batches, watched; and what a model writes alone."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from edgellm.engine import Context, Ids, llama_api

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


def greedy(context: Context, prompt: Ids, n: int) -> list[int]:
    """Return the `n` tokens that a model writes behind a prompt, of one decode each."""
    context.clear()
    written: list[int] = []
    ids = prompt
    for _ in range(n):
        written.append(int(context.decode(ids)[0].argmax()))
        ids = np.array(written[-1:], dtype=np.int32)
    return written
