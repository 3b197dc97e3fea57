"""In-context question answering, extractive: notes, then a question that one of them answers (as in SQuAD)."""

from __future__ import annotations

from models.case import Case, assistant, user
from models.families import facts
from models.world import World


def make(world: World, size: float) -> Case:
    """2 to 7 notes, growing with `size`."""
    drawn = facts.draw(world, world.number(2, 2 + round(5 * size)))
    asked = drawn[0]
    return Case("qa", (user(asked.question, facts.notes(world, drawn)), assistant(asked.answer)))
