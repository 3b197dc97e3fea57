"""The families of tasks, one module each: `make(world, size) -> Case`, where `size` grows with the curriculum.

0 is the smallest case, 1 the usual largest; above 1 the context grows up to the trained length.
"""

from __future__ import annotations

from collections.abc import Callable

from models.case import Case
from models.families import alone, chat, choice, command, copying, judge, qa, quantity, reply, summary, sums
from models.world import World

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
"""The families that are judged on held-out cases."""

PRACTICE: dict[str, Callable[[World, float], Case]] = {
    "copying": copying.make,
    "sums": sums.make,
    "alone": alone.make,
}
"""Exercises for the curriculum only."""
