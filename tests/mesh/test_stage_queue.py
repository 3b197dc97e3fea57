"""Micro-batches go through a stage's blocks in turn, and replies at once are those of the whole model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.mesh.messages import MicroBatch
from edgellm.mesh.stage import StageQueue
from edgellm.spec.types import GREEDY, Sampling
from tests.engine.logits import some_ids
from tests.mesh.household import Cut, Home, Whole, all_at_once


def batch(session: int, number: int, rows: int = 1) -> MicroBatch:
    return MicroBatch(session, number, 0, np.zeros(rows, dtype=np.int32))


def test_a_token_goes_ahead_of_a_part_that_is_under_way_but_once() -> None:
    made, order = StageQueue(), []
    for number, (session, rows) in enumerate(((0, 256), (0, 256), (1, 1))):
        made.put(batch(session, number, rows))
    while (entry := made.next(3)) is not None:
        entry.advance()
        order.append(entry.batch.number)
        if entry.at == 3:
            made.remove(entry)
    assert order == [0, 0, 0, 2, 2, 2, 1, 1, 1]


came = st.tuples(st.integers(0, 7), st.sampled_from([1, 1, 1, 2, 5, 20, 256]))


@given(st.lists(st.one_of(came, st.integers(1, 3)), max_size=60))
def test_whatever_comes_nobody_overtakes_and_nobody_is_left(steps: list[tuple[int, int] | int]) -> None:
    """Micro-batches come, and go through up to three blocks, of which ever more are there."""
    made, blocks, expected = StageQueue(), 1, dict[int, list[int]]()
    done: dict[int, list[int]] = {}

    def move() -> bool:
        if (entry := made.next(blocks)) is not None:
            entry.advance()
            if entry.at == 3:
                made.remove(entry)
                done.setdefault(entry.batch.session, []).append(entry.batch.number)
        return entry is not None

    for number, step in enumerate(steps):
        if isinstance(step, int):
            blocks = max(blocks, step)
            move()
        else:
            made.put(batch(step[0], number, step[1]))
            expected.setdefault(step[0], []).append(number)
    blocks = 3
    while move():
        pass
    assert len(made) == 0
    assert done == expected


PROMPTS = [some_ids(20 + 7 * number, 2000, number + 1) for number in range(4)]


@pytest.mark.parametrize("stages", [1, 3])
def test_replies_at_once_are_what_each_is_alone(verifier_cut: Cut, whole: Whole, stages: int) -> None:
    work, sampling = replace(verifier_cut.work, sessions=len(PROMPTS)), Sampling(0.9, seed=7)
    verifier = Home(replace(verifier_cut, work=work), dict.fromkeys("abc"[:stages])).verifier
    assert all_at_once(verifier, GREEDY, PROMPTS, 16) == [whole.text(prompt, 16) for prompt in PROMPTS]
    alone = [all_at_once(verifier, sampling, [prompt], 16)[0] for prompt in PROMPTS]
    assert all_at_once(verifier, sampling, PROMPTS, 16) == alone
    verifier.close()
