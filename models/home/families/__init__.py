"""The families of tasks, one module each: `make(world, size) -> Case`, where `size` grows with the curriculum.

0 is the smallest case, 1 the usual largest; above 1 the context grows up to the trained length.
"""

from collections.abc import Callable

from models.case import Case
from models.home.families import chat, choice, command, inline, judge, qa, quantity, reply, summary, told
from models.home.families.practice import alone, copying, names, sums
from models.home.world import World

FAMILIES: dict[str, Callable[[World, float], Case]] = {
    "qa": qa.make,
    "summary": summary.make,
    "reply": reply.make,
    "command": command.make,
    "judge": judge.make,
    "choice": choice.make,
    "chat": chat.make,
    "quantity": quantity.make,
}
"""The families like the papers' kinds of data. Both stages of the training show them, and the measurements of the
papers' methods use their held-out cases."""

PLAIN: dict[str, Callable[[World, float], Case]] = {"told": told.make, "inline": inline.make}
"""The families of people who simply type. Only the second stage of the training shows them."""

JUDGED = FAMILIES | PLAIN
"""The families of the model card."""

PRACTICE: dict[str, Callable[[World, float], Case]] = {
    "copying": copying.make,
    "sums": sums.make,
    "alone": alone.make,
    "names": names.make,
}
"""Exercises for the curriculum only."""
