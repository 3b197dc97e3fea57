"""Sums alone, for the curriculum: looking up their numbers is learned early, adding them late."""

from models.case import Case, conversation, look
from models.home.families.quantity import clock_sum, count_sum
from models.home.world import World

ASK = ("How much is {s}?", "What does {s} make?", "{s}?", "And {s}?", "Tell me: {s}?")


def make(world: World, size: float) -> Case:
    """Return several sums, one a turn."""
    del size
    pairs = []
    for _ in range(world.number(4, 10)):
        if world.rng.random() < 0.7:
            total, used, how, result = count_sum(world)
            text = f"{total} {how} {used}"
            pairs.append((world.rng.choice(ASK).format(s=text), f"{look(text)} makes {look(result)}."))
        else:
            begins, minutes, ends = clock_sum(world)
            text = f"It starts at {begins} and goes {minutes} minutes."
            pairs.append((text, f"At {look(begins)} goes {look(minutes)} minutes, so it is over at {look(ends)}."))
    return conversation("sums", "", pairs)
