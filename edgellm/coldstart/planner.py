"""The planner: the best plan for an objective, with its proof, by the algorithm that suits the home."""

from __future__ import annotations

from edgellm.coldstart.algorithm1 import algorithm1, is_small
from edgellm.coldstart.exact_search import fastest
from edgellm.coldstart.problem import Solution, Stop, Task, never
from edgellm.coldstart.reply_search import quickest


def solve(task: Task, further: int = 0, stop: Stop = never) -> Solution | None:
    """Return the plan that is done first with the first token, or with `further` tokens after it; None if none fits.

    For the first token: the paper's Algorithm 1 in a small home, and in a larger one a search that proves as much in
    less time. Whole replies, and devices on which a stage may not begin and end anywhere, have a search of their own.
    """
    if not further and is_small(task):
        found = algorithm1(task)
        return None if found is None else Solution(found[1], found[0], found[0])
    if further or task.bounded:
        return quickest(task, further, stop)
    return fastest(task, stop)
