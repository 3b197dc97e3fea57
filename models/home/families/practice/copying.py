"""Plain copying, for the curriculum: in-context copying is learned late, and earlier with practice.

Most words are invented. The questions are for the word after or before another one in a list: looking backwards is
learned last of all, and every question about who has or does a thing needs it.
"""

from models.case import Case, assistant, conversation, look, user
from models.home.families.page import page
from models.home.world import World, strange

BEHIND = ("What stands behind {k}?", "After {k}, what comes next?", "What does {k} have?", "Go on from {k}.")
BEFORE = ("What stands before {k}?", "Who has {k}?", "Who is it with {k}?", "Which word has {k}?")
LINKS = (" ", ": ", " has ", " = ", " is ", ", ", " with ", " goes to ", " must ", " - ")


def make(world: World, size: float) -> Case:
    """Return a case that repeats words, or answers questions about a list of lines, each a few words and a link."""
    if world.rng.random() < 0.3:
        text = " ".join(_word(world) for _ in range(world.number(2, 4 + round(12 * size))))
        return Case("copying", (user(text, "Say this again:"), assistant(look(text))))
    count = world.number(2, 3 + round(5 * size))
    heads = [_word(world, capital=world.rng.random() < 0.5) for _ in range(count)]
    tails = [" ".join(_word(world) for _ in range(world.rng.choice((1, 1, 2, 3)))) for _ in range(count)]
    links = [world.rng.choice(LINKS)] * count if world.rng.random() < 0.5 else [world.rng.choice(LINKS) for _ in heads]
    lines = [f"{head}{link}{tail}" for head, link, tail in zip(heads, links, tails, strict=True)]
    pairs = []
    for at in world.rng.sample(range(count), count)[:6]:
        if world.rng.random() < 0.75:
            pairs.append((world.rng.choice(BEHIND).format(k=heads[at]), f"Behind {heads[at]} is {look(tails[at])}."))
        else:
            pairs.append((world.rng.choice(BEFORE).format(k=tails[at]), f"Before {tails[at]} is {look(heads[at])}."))
    return conversation("copying", page(world, lines, ("List:", "Words:", "Pairs:")), pairs)


def _word(world: World, capital: bool = False) -> str:
    word = strange(world.rng, world.split)
    return word.capitalize() if capital else word
