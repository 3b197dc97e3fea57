"""Pages of notes: a list with a mark before each line, or a paragraph under a short heading.

Byte-level BPE has two tokens for a word, one with the space before it and one for the start of a line. A model this
small cannot learn for thousands of words that the two are the same word, so on these pages every word follows a space.
A few pages of the training text are bare lines, as people also write them.
"""

from models.home.world import Split, World

BARE_SHARE = 0.08
MARKS = ("-", "-", "*")


def page(world: World, lines: list[str], headings: tuple[str, ...]) -> str:
    """Return `lines` in their order, as a list (with or without a heading) or a paragraph (always with one)."""
    roll = world.rng.random()
    heading = world.rng.choice(headings)
    if world.split is Split.TRAIN and roll < BARE_SHARE:
        return "\n".join(lines)
    if roll < 0.7:
        mark = world.rng.choice(MARKS)
        body = "\n".join(f"{mark} {line}" for line in lines)
        return body if world.rng.random() < 0.5 else f"{heading}\n{body}"
    return f"{heading} " + " ".join(line if line[-1] in ".!?" else f"{line}." for line in lines)
