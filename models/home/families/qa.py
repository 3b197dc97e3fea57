"""In-context question answering, extractive: notes, then a question that one of them answers (as in SQuAD)."""

from models.case import Case, conversation
from models.home.families import facts
from models.home.world import World


def make(world: World, size: float) -> Case:
    """Return questions about 2 to 7 notes, growing with `size`."""
    drawn = facts.draw(world, world.number(2, 2 + round(5 * size)))
    pairs = [(fact.question, fact.answer) for fact in drawn[: world.questions(len(drawn))]]
    return conversation("qa", facts.notes(world, drawn), pairs)
