"""Spec-Bench's questions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Question:
    """The first turn of one of Spec-Bench's questions."""

    category: str
    text: str


def questions(path: Path) -> list[Question]:
    """Return the questions of Spec-Bench's file, or of a part of it: JSON lines with `category` and `turns`."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Question(line["category"], line["turns"][0]) for line in lines]


def of_each(found: Sequence[Question], per: int, category: str = "") -> list[Question]:
    """Return at most `per` questions of each category, or of one of them, by turns."""
    groups: dict[str, list[Question]] = {}
    for question in found:
        if category in ("", question.category):
            groups.setdefault(question.category, []).append(question)
    return [group[at] for at in range(per) for group in groups.values() if at < len(group)]
