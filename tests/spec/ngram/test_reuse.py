"""Reuse: which part of a rejected draft is kept, how long, and where it is offered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, LazyLogits, Model
from edgellm.spec.ngram.reuse import LIFETIME, Reuse, plausible_segment
from edgellm.spec.types import Chunk
from edgellm.spec.verification import LIKELY, plausible


def inside(token: int) -> bool:
    return token >= 50


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 12))
def test_the_longest_plausible_run_is_found(marks: list[bool], rejected: int) -> None:
    begin, end = plausible_segment(marks, rejected)
    runs = [(b, e) for b in range(rejected, len(marks)) for e in range(b + 1, len(marks) + 1) if all(marks[b:e])]
    if not runs:
        assert begin == end
        return
    longest = max(e - b for b, e in runs)
    assert (begin, end) == min(run for run in runs if run[1] - run[0] == longest)


def offered(reuse: Reuse) -> list[int]:
    """What is offered, one token after the other."""
    found: list[int] = []
    cursor = reuse.cursor()
    while cursor is not None and (token := cursor.offer()[0]) >= 0:
        assert cursor.offer() == (token, len(found) + 1, 1.0)
        found.append(token)
        cursor.advance(token)
    return found


@pytest.mark.parametrize(
    ("draft", "accepted", "plausible", "written", "wanted"),
    [
        ([1, 2, 3, 4, 5], 1, (True, False, True, True, False), [1, 9], [3, 4]),  # spliced behind the correction
        ([1, 50, 51, 4, 5], 0, None, [8], [4, 5]),  # without the rest of a rejected word
        ([4, 2, 4, 5], 1, None, [4, 9], [4, 5]),  # the accepted 4 is another one than the 4 that is kept
    ],
)
def test_what_is_kept_of_a_rejected_draft(
    draft: list[int], accepted: int, plausible: tuple[bool, ...] | None, written: list[int], wanted: list[int]
) -> None:
    reuse = Reuse(inside)
    reuse.rejected(draft, accepted, plausible)
    reuse.extend(written)
    assert offered(reuse) == wanted
    reuse.begin([])
    assert offered(reuse) == []  # the next reply begins without it


def test_a_segment_is_used_up_as_it_is_written_and_replaced_by_the_next() -> None:
    reuse = Reuse(inside)
    reuse.rejected([1, 2, 3, 4], 0, None)
    reuse.extend([9])
    reuse.rejected([2, 3], 2, None)
    reuse.extend([2, 3])
    assert offered(reuse) == [4]
    reuse.rejected([7, 6, 5], 0, None)
    reuse.extend([8])
    assert offered(reuse) == [6, 5]


def test_a_segment_of_which_nothing_comes_is_given_up() -> None:
    reuse = Reuse(inside)
    reuse.rejected([1, 2, 3], 0, None)
    for _ in range(LIFETIME):
        reuse.extend([9])
        assert offered(reuse) == [2, 3]
        reuse.rejected([], 0, None)
    assert offered(reuse) == []


@given(st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_plausible_is_what_has_the_probability(accepted: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (3 * rng.normal(size=(5, 7))).astype(np.float32)
    chunk = Chunk(rng.integers(0, 7, 4).astype(np.int32), retrieved=True)
    probs = np.exp(rows.astype(np.float64)) / np.exp(rows.astype(np.float64)).sum(axis=1, keepdims=True)
    own = probs[np.arange(4), chunk.ids]
    marks = plausible(chunk, rows, accepted)
    for at, mark in enumerate(marks):
        if at < accepted:
            assert mark
        elif abs(own[at] - LIKELY) > 1e-4:
            assert mark == (own[at] >= LIKELY)


def test_of_what_nobody_computed_nothing_is_known_to_the_contrary(verifier_model: Model) -> None:
    ids = np.arange(300, 309, dtype=np.int32)
    with Context(verifier_model, ContextSpec(n_ctx=32, threads=1, lazy=True)) as context:
        context.decode_lazy(ids[:2], outputs=2)  # finds out whether it can be late
        context.rollback(0)
        rows = context.decode_lazy(ids, outputs=9, reached=[0.0] * 8)
        assert isinstance(rows, LazyLogits)
        chunk = Chunk(ids[1:], retrieved=True)
        rows.upto(3)
        marks = plausible(chunk, rows, 1)
        context.rollback(0)
        all_known = plausible(chunk, context.decode(ids, outputs=9), 1)
    assert marks == (*all_known[:3], *[True] * 5)
    assert not all(all_known)
