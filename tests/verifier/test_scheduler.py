"""The choice of the next batch, as a pure function, and what it promises over time."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, Model
from edgellm.spec.types import GREEDY, Chunk
from edgellm.spec.verifier import VerifyRequest
from edgellm.verifier.judgement import Answer, Job
from edgellm.verifier.scheduler import DELAY, SOLO_DELAY, SchedulerLimits, Slice, next_batch
from edgellm.verifier.worker import VerifierWorker
from tests.verifier.wants import want

LIMITS = SchedulerLimits(rows=128, chunk=32)
ROWS = (1, 2, 4, 8, 16, 32, 48, 64)

wants = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 16), st.integers(0, 3)), max_size=12).map(
    lambda sizes: [want(i, *size) for i, size in enumerate(sizes)]
)
limits = st.builds(SchedulerLimits, rows=st.integers(32, 200), chunk=st.just(32))


def shapes(batch: list[Slice]) -> list[tuple[int, int, int]]:
    return [(piece.request.session, piece.tokens, piece.outputs) for piece in batch]


@pytest.mark.parametrize(
    ("waiting", "prefills", "batch"),
    [
        ([], 0, []),
        ([(1, 1, 4), (2, 3, 4), (3, 1, 4), (4, 5, 0)], 0, [(1, 5, 5), (3, 5, 5), (4, 5, 1)]),  # equal numbers of rows
        ([(1, 70, 4)], 0, [(1, 32, 0)]),
        ([(1, 6, 4)], 2, [(1, 10, 5)]),  # a prompt's end joins the verification
        ([(1, 1000, 4), (2, 1, 4, 6)], 6, [(1, 32, 0)]),  # a prefill goes first,
        ([(2, 1, 4, 6), (3, 1, 9, 7), (1, 1000, 4)], 7, [(2, 5, 5)]),  # but not twice ahead of a verification
        ([(3, 1, 9, 7), (1, 1000, 4)], 7, [(1, 32, 0)]),
        ([(1, 32, 256), (2, 1, 0)], 0, [(1, 288, 257)]),  # larger than a batch
    ],
)
def test_next_batch(waiting: list[tuple[int, int, int]], prefills: int, batch: list[tuple[int, int, int]]) -> None:
    assert shapes(next_batch([want(*one) for one in waiting], LIMITS, prefills)) == batch


@pytest.mark.parametrize(("unseen", "steps"), [(33, [33]), (140, [128, 12]), (300, [128, 128, 44])])
def test_who_is_alone_is_prefilled_in_larger_pieces(unseen: int, steps: list[int]) -> None:
    found: list[int] = []
    while unseen:
        found.append(next_batch([want(1, unseen, 0)], SchedulerLimits(), len(found), single_session=True)[0].tokens)
        unseen -= found[-1]
    assert found == steps
    assert shapes(next_batch([want(1, 300, 0)], SchedulerLimits(rows=64), 0, single_session=True)) == [(1, 64, 0)]


@given(wants, limits, st.integers(0, 3))
def test_a_batch_keeps_its_promises(waiting: list[Job], limits: SchedulerLimits, prefills: int) -> None:
    batch = next_batch(waiting, limits, prefills)
    assert bool(batch) == bool(waiting)
    by_session = {one.session: one for one in waiting}
    assert len(batch) <= 1 or sum(piece.tokens for piece in batch) <= limits.rows
    assert len({piece.tokens for piece in batch}) <= 1
    for piece in batch:
        one = by_session.pop(piece.request.session)  # no session twice
        if piece.outputs:
            assert (piece.tokens, piece.outputs) == (one.unseen + one.drafted, one.drafted + 1)
        else:
            assert piece.tokens < one.unseen  # at least one token is left, whose logits the verdict needs


def curve(base: float, slope: float) -> list[float]:
    return [base + slope * rows for rows in ROWS]


@pytest.mark.parametrize(("base", "slope"), [(0.010, 0.00005), (0.010, 0.001), (0.060, 0.004), (1.0, 0.0)])
def test_chunks_take_as_long_as_a_verdict_may_wait_and_are_never_below_the_papers(base: float, slope: float) -> None:
    limits = SchedulerLimits().measured(ROWS, curve(base, slope))
    for size, least, delay in ((limits.chunk, 32, DELAY), (limits.solo_chunk, 128, SOLO_DELAY)):
        assert least <= size <= limits.rows
        assert size == least or base + slope * size <= 1.001 * delay
        assert size == limits.rows or base + slope * (size + 1) >= 0.999 * delay


def test_a_pass_holds_many_rows_where_each_costs_little() -> None:
    assert SchedulerLimits().measured(ROWS, curve(0.1, 0.001)).budget > 30
    assert SchedulerLimits().measured(ROWS, curve(0.0, 0.001)).budget == 10


@pytest.mark.parametrize("fast", [True, False])
def test_a_worker_prefills_in_the_chunks_that_its_curve_chooses(exact: Model, fast: bool) -> None:
    """Two sessions, so that the chunks are those beside another session."""
    counts: dict[int, int] = {}
    ids = np.arange(400, 730, dtype=np.int32)
    context = Context(exact, ContextSpec(n_ctx=512, n_seq=2, n_batch=512, threads=1, unified=False))
    worker = VerifierWorker(context, 2, exact.is_eog)
    worker.use_curve(ROWS, curve(0.010, 0.00005) if fast else curve(0.060, 0.004))
    worker.start()
    for session, prompt in ((1, ids[:5]), (2, ids)):
        before, answers = worker.counters.prefills, SimpleQueue[Answer]()
        worker.submit(VerifyRequest(session, GREEDY, 0, prompt, Chunk()), answers.put)
        answers.get(timeout=120)
        counts[session] = worker.counters.prefills - before
    worker.close()
    assert counts == {1: 0, 2: 0 if fast else 10}
