"""Notes and a question in one message, as people paste and type them: the notes before or after the question, on one
line or several, with and without a blank line between.
"""

from models.case import Case, assistant, user
from models.home.families import command, judge, qa, quantity
from models.home.families.page import page
from models.home.families.plain import draw
from models.home.world import World

OTHERS = (qa.make, qa.make, judge.make, command.make, quantity.make)
"""Families whose notes and questions are sometimes laid out in these ways, too."""


def arranged(world: World, notes: str, question: str) -> str:
    """Return one message of both."""
    one_line = "\n" not in notes
    between = world.rng.choice((" ", " ", "\n", "\n\n") if one_line else ("\n", "\n", "\n\n"))
    parts = [notes, question] if world.rng.random() < 0.5 else [question, notes]
    if between == " " and parts[0][-1] not in ".!?":
        parts[0] += "."
    return between.join(parts)


def written(world: World, lines: list[str]) -> str:
    """Return notes as a line of sentences, as bare lines, or as a page."""
    roll = world.rng.random()
    if roll < 0.5:
        return " ".join(line if line[-1] in ".!?" else f"{line}." for line in lines)
    if roll < 0.65:
        return "\n".join(lines)
    return page(world, lines, ("Notes:", "My notes:", "I know this:"))


def make(world: World, size: float) -> Case:
    """Return questions about 1 to 5 facts; the first one stands beside the notes. Or a case of another family so."""
    if world.rng.random() < 0.3:
        case = world.rng.choice(OTHERS)(world, size)
        notes, question = case.turns[0].text.split("\n\n", 1)
        return Case("inline", (user(arranged(world, notes, question)), *case.turns[1:]))
    drawn = draw(world, world.number(1, 1 + round(4 * size)))
    lines = [fact.stated(world) for fact in drawn]
    world.rng.shuffle(lines)
    asked = world.rng.sample(drawn, min(len(drawn), world.questions(len(drawn))))
    first = asked[0].question(world) if world.rng.random() < 0.7 else asked[0].asked(world)
    turns = [user(arranged(world, written(world, lines), first)), assistant(asked[0].answer)]
    for fact in asked[1:]:
        turns += [user(fact.asked(world)), assistant(fact.answer)]
    return Case("inline", tuple(turns))
