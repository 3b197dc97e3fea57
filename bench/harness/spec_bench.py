"""Spec-Bench's questions, and what a model replies to them greedily."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm.engine import Context, Ids


@dataclass(frozen=True, slots=True)
class Question:
    """The first turn of one of Spec-Bench's questions."""

    category: str
    text: str


def questions(path: Path) -> list[Question]:
    """Return the questions of Spec-Bench's file, or of a part of it: JSON lines with `category` and `turns`."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Question(line["category"], line["turns"][0]) for line in lines]


def greedy_reply(context: Context, prompt: Ids, tokens: int, *, to_the_end: bool = True) -> Ids:
    """Return the greedy reply to a prompt, of at most so many tokens, with its end; or beyond that."""
    context.clear()
    written: list[int] = []
    ids = prompt
    while len(written) < tokens and not (to_the_end and written and context.model.is_eog(written[-1])):
        written.append(int(context.decode(ids)[0].argmax()))
        ids = np.array(written[-1:], dtype=np.int32)
    return np.array(written, dtype=np.int32)
