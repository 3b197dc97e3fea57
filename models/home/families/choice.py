"""Multiple choice over notes: up to four answers with letters, one of them right (as in the papers' CSQA)."""

from models.case import Case, conversation, look
from models.home.families import facts
from models.home.world import World, phrasings

RIGHT = phrasings(
    """
    Which is right?
    Which answer is right?
    Choose one:
    Choose the right answer:
    Pick one of these.
    What is the right choice?
    A, B, C or D?
    Select one:
    Only one is right:
    Which one fits?
    Select the answer that fits:
    One of them is right:
    Select only one of them:
    """,
    """
    Select the right one:
    Only one of them fits:
    """,
)


def make(world: World, size: float) -> Case:
    """Return facts of one kind; the options are their values, so that all of them stand in the context."""
    count = min(4, 2 + round(size * 2))
    kind = world.rng.choice(("place", "when", "who", "has"))
    drawn = [facts.KINDS[kind](world) for _ in range(count)]
    beside = facts.draw(world, round(4 * (size - 1))) if size > 1 else []
    letters = "ABCD"[:count]
    pairs = []
    for fact in drawn[: world.questions(min(count, 3))]:
        options = [each.value for each in drawn]
        world.rng.shuffle(options)
        shown = "\n".join(f"- {option} ({letter})" for letter, option in zip(letters, options, strict=True))
        letter = letters[options.index(fact.value)]
        answer = f"{fact.answer[:-1]} ({look(letter)})."
        pairs.append((f"{fact.question} {world.say(RIGHT)}\n{shown}", answer))
    return conversation("choice", facts.notes(world, drawn + beside), pairs)
