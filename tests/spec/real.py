"""Prompts of the little world, for tests on the real pair."""

import random
from itertools import islice

from edgellm.engine import Message
from edgellm.spec.stream import Reply
from models.home.corpus import held_out
from models.home.families import FAMILIES
from models.home.world import Split, World


def case(number: int) -> list[Message]:
    """A held-out prompt; the families in turn."""
    rng = random.Random(number)
    made = FAMILIES[list(FAMILIES)[number % len(FAMILIES)]](World(rng, Split.TEST), rng.random())
    return [Message(turn.role, turn.text) for turn in made.prompt]


def prompts(seed: int, count: int = 1) -> list[list[Message]]:
    """Return `count` held-out prompts of each family."""
    cases = [case for family in FAMILIES for case in held_out(family, count, seed)]
    return [[Message(turn.role, turn.text) for turn in case.prompt] for case in cases]


def told(reply: Reply) -> list[str]:
    """Read a reply, and return its notices and reasons."""
    heard: list[str] = []
    reply.listen(lambda notice: heard.append(notice.text), lambda reason: heard.append(reason.text))
    list(reply)
    return heard


def ids(reply: Reply, n: int | None = None) -> list[int]:
    return [token.id for token in islice(reply, n)]
