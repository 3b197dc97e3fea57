"""Random texts of an automaton."""

from __future__ import annotations

import random

from edgellm.engine.grammar.automaton import Automaton


def walk(automaton: Automaton, seed: int, most: int = 3000) -> str | None:
    """Return a random text that `automaton` accepts; None where it did not end in time."""
    chance, state, text = random.Random(seed), 0, ""
    while len(text) < most:
        steps = automaton.steps[state]
        if state in automaton.accepting and (not steps or chance.random() < 0.3):
            return text
        low, high, state = chance.choice(steps)
        text += chr(chance.choice([low, high, chance.randint(low, high)]))
    return None
