"""Strange words make training wider, and must not let held-out entities in."""

from __future__ import annotations

from models.home import world
from models.home.lexicon import LONG, WORDS
from models.home.world import Pool


def test_no_held_out_entity_is_a_training_word() -> None:
    held_out = {word for value in vars(world).values() if isinstance(value, Pool) for word in value.test}
    assert len(WORDS) == len(set(WORDS)) > 1000
    assert not held_out & {*WORDS, *LONG}
    assert len({*WORDS, *LONG}) == len(WORDS) + len(LONG)
