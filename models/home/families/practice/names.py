"""Messages that begin with a name, for the curriculum.

At the start of a message a name has other tokens than behind a space (`An`, `na`; ` Anna`), where a reply says it. So
each name has to be met at a start, which tellings of all kinds seldom bring.
"""

from models.case import Case, Turn, user
from models.home.families.plain import KINDS, PlainFact
from models.home.families.told import noted
from models.home.world import World

STRANGE_SHARE = 0.15  # of the names: letter by letter, an invented one cannot be known
_TRIES = 30  # until a telling begins with the name


def make(world: World, size: float) -> Case:
    """Return tellings of who has a thing or a chore, each with its confirmation."""
    known = World(world.rng, world.split, strange_share=STRANGE_SHARE)
    turns: list[Turn] = []
    for _ in range(world.number(3, 4 + round(4 * min(size, 1.0)))):
        kind = KINDS[world.rng.choice(("has", "who"))]
        fact = PlainFact(kind, kind.subject(world), kind.value(known))
        text = fact.told(world)
        for _ in range(_TRIES):
            if text.startswith(fact.value["n"]):
                break
            text = fact.told(world)
        turns += [user(text), noted([fact])]
    return Case("names", tuple(turns))
