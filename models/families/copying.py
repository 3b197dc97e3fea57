"""Plain copying, for the curriculum: in-context copying is learned late, and sooner when it is practised."""

from __future__ import annotations

from models.case import Case, assistant, look, user
from models.families import facts
from models.world import World, strange


def make(world: World, size: float) -> Case:
    """Says again what stands there: invented words, a note, or one line of several by its number or first word."""
    roll = world.rng.random()
    if roll < 0.35:
        text = " ".join(strange(world.rng, world.split) for _ in range(world.number(2, 4 + round(12 * size))))
        return Case("copying", (user(text, "Say this again:"), assistant(look(text))))
    lines = [
        facts.KINDS[world.rng.choice(list(facts.KINDS))](world).note
        for _ in range(world.number(2, 3 + round(3 * size)))
    ]
    if roll < 0.55:
        text = "\n".join(lines)
        return Case("copying", (user("Say this again.", text), assistant(look(text))))
    words = [strange(world.rng, world.split) for _ in lines]
    body = "\n".join(f"{word}: {line}" for word, line in zip(words, lines, strict=True))
    at = world.rng.randrange(len(lines))
    if roll < 0.8:
        return Case("copying", (user(f"What stands beside {words[at]}?", body), assistant(look(lines[at]))))
    return Case("copying", (user(f"Which word stands beside this: {lines[at]}", body), assistant(look(words[at]))))
