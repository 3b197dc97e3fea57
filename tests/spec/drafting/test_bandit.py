"""The faster of two ways is used, and the other one now and then."""

from __future__ import annotations

import pytest

from edgellm.spec.drafting.bandit import EXPLORATION, Bandit

ROUNDS = 4000


def written(seconds: tuple[float, float], trials: int = 4) -> tuple[Bandit, list[bool]]:
    """Return the choices of many rounds, which take so many seconds a token."""
    choice, chosen = Bandit(trials), list[bool]()
    for _ in range(ROUNDS):
        chosen.append(choice.second())
        choice.record(chosen[-1], 1, seconds[chosen[-1]])
    return choice, chosen


@pytest.mark.parametrize("seconds", [(1.0, 0.5), (0.5, 1.0), (1.0, 8.0)])
def test_the_slower_way_costs_little(seconds: tuple[float, float]) -> None:
    _, chosen = written(seconds)
    best, faster = min(seconds), seconds[1] < seconds[0]
    others = chosen[8:].count(not faster)
    assert others > 0
    assert others * (max(seconds) - best) <= 1.1 * EXPLORATION * ROUNDS * best + max(seconds)


def test_a_way_that_has_become_faster_is_found() -> None:
    choice, _ = written((1.0, 2.0))
    chosen = []
    for _ in range(ROUNDS):
        chosen.append(choice.second())
        choice.record(chosen[-1], 1, 0.2 if chosen[-1] else 1.0)
    assert all(chosen[-500:-1]) or chosen[-500:].count(False) < 20


def test_both_are_tried_first() -> None:
    _, chosen = written((1.0, 9.0), trials=3)
    assert sorted(chosen[:6]) == [False] * 3 + [True] * 3
