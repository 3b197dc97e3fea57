"""The choice of the next batch, as a pure function, and what it promises over time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, Model
from edgellm.spec.types import GREEDY, Chunk
from edgellm.spec.verifier import VerifyRequest
from edgellm.verifier.in_process import VerifierWorker
from edgellm.verifier.judgement import Answer
from edgellm.verifier.scheduler import (
    DELAY,
    SOLO_DELAY,
    BatchKind,
    ScheduledBatch,
    ScheduledSlice,
    SchedulerLimits,
    next_batch,
)
from tests.verifier.wants import Want

LIMITS = SchedulerLimits(rows=128, chunk=32)

wants = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 16), st.integers(0, 3)), max_size=12).map(
    lambda sizes: [Want(i, *size) for i, size in enumerate(sizes)]
)
limits = st.builds(
    SchedulerLimits,
    rows=st.integers(32, 200),
    chunk=st.just(32),
    max_prefill_ahead=st.integers(1, 4),
    equal_rows=st.booleans(),
)


def test_nothing_wanted_nothing_done() -> None:
    assert next_batch([], LIMITS, 0) is None


def test_verifications_of_equal_row_counts_share_a_batch() -> None:
    mixed = [Want(1, 1, 4), Want(2, 3, 4), Want(3, 1, 4), Want(4, 5, 0)]
    assert next_batch(mixed, LIMITS, 0) == ScheduledBatch(
        BatchKind.VERIFY,
        (ScheduledSlice(mixed[0], 5, 5), ScheduledSlice(mixed[2], 5, 5), ScheduledSlice(mixed[3], 5, 1)),
    )
    together = next_batch(mixed, replace(LIMITS, equal_rows=False), 0)
    assert together is not None
    assert [piece.request.session for piece in together.slices] == [1, 2, 3, 4]


def test_a_long_prefix_is_prefilled_in_chunks_and_its_end_joins_the_verification() -> None:
    kinds: list[tuple[BatchKind, int, int]] = []
    unseen = 70
    while unseen:
        batch = next_batch([Want(1, unseen, 4)], LIMITS, len(kinds))
        assert batch is not None
        kinds.append((batch.kind, batch.slices[0].tokens, batch.slices[0].outputs))
        unseen -= min(unseen, batch.slices[0].tokens)
    assert kinds == [(BatchKind.PREFILL, 32, 0), (BatchKind.PREFILL, 32, 0), (BatchKind.VERIFY, 10, 5)]


@pytest.mark.parametrize(("unseen", "steps"), [(33, [33]), (128, [128]), (140, [128, 12]), (300, [128, 128, 44])])
def test_who_is_alone_is_prefilled_in_larger_pieces(unseen: int, steps: list[int]) -> None:
    found: list[int] = []
    while unseen:
        batch = next_batch([Want(1, unseen, 0)], SchedulerLimits(), len(found), single_session=True)
        assert batch is not None
        found.append(batch.slices[0].tokens)
        unseen -= found[-1]
    assert found == steps
    few = next_batch([Want(1, 300, 0)], SchedulerLimits(rows=64), 0, single_session=True)
    assert few == ScheduledBatch(BatchKind.PREFILL, (ScheduledSlice(Want(1, 300, 0), 64, 0),))


def test_prefill_goes_first_but_not_twice_ahead_of_the_same_verification() -> None:
    long, waiting, late = Want(1, 1000, 4), Want(2, 1, 4, arrival=6), Want(3, 1, 9, arrival=7)
    first = next_batch([long, waiting], LIMITS, 6)
    assert first == ScheduledBatch(BatchKind.PREFILL, (ScheduledSlice(long, 32, 0),))
    second = next_batch([waiting, late, long], LIMITS, 7)
    assert second == ScheduledBatch(BatchKind.VERIFY, (ScheduledSlice(waiting, 5, 5),))
    third = next_batch([late, long], LIMITS, 7)
    assert third == first


@pytest.mark.parametrize(("ahead", "sessions"), [(1, [1]), (2, [1, 2]), (9, [1, 2, 3, 4])])
def test_a_prefill_batch_has_as_many_chunks_as_may_go_ahead(ahead: int, sessions: list[int]) -> None:
    batch = next_batch([Want(i, 100, 4) for i in range(1, 6)], replace(LIMITS, max_prefill_ahead=ahead), 0)
    assert batch is not None
    assert [piece.request.session for piece in batch.slices] == sessions


def test_a_verification_bigger_than_a_batch_goes_alone() -> None:
    batch = next_batch([Want(1, 32, 256), Want(2, 1, 0)], LIMITS, 0)
    assert batch == ScheduledBatch(BatchKind.VERIFY, (ScheduledSlice(Want(1, 32, 256), 288, 257),))


@given(wants, limits, st.integers(0, 3))
def test_a_batch_keeps_its_promises(waiting: list[Want], limits: SchedulerLimits, prefills: int) -> None:
    batch = next_batch(waiting, limits, prefills)
    if batch is None:
        assert not waiting
        return
    by_session = {want.session: want for want in waiting}
    assert batch.slices
    total = sum(piece.tokens for piece in batch.slices)
    assert len(batch.slices) == 1 or total <= limits.rows
    assert batch.kind is BatchKind.VERIFY or total <= limits.max_prefill_ahead * limits.chunk
    assert (
        batch.kind is BatchKind.PREFILL or not limits.equal_rows or len({piece.tokens for piece in batch.slices}) == 1
    )
    for piece in batch.slices:
        want = by_session.pop(piece.request.session)  # no session twice
        if batch.kind is BatchKind.VERIFY:
            assert (piece.tokens, piece.outputs) == (want.unseen + want.drafted, want.drafted + 1)
        else:
            assert piece.outputs == 0
            assert piece.tokens < want.unseen  # at least one token is left, whose logits the verdict needs


arrivals = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 150), st.integers(0, 8)), max_size=25)


@given(arrivals, limits)
def test_over_time_nobody_waits_longer_than_promised(
    comings: list[tuple[int, int, int]], limits: SchedulerLimits
) -> None:
    """Requests come while others are computed, each some batches behind the one before, and are served to the end."""
    times, at = [], 0
    for delay, unseen, drafted in comings:
        at += delay
        times.append((at, unseen, drafted))
    waiting: dict[int, Want] = {}
    went_ahead: dict[int, int] = {}  # chunks of prefill computed while a verification waited
    verified_since_prefill: set[int] = set()
    step = prefills = served = 0
    while served < len(times):
        now = {i: Want(i, unseen, drafted, prefills) for i, (when, unseen, drafted) in enumerate(times) if when == step}
        waiting |= now
        batch = next_batch(waiting.values(), limits, prefills)
        step += 1
        if batch is None:
            continue
        ready = [want.session for want in waiting.values() if want.unseen <= limits.chunk]
        if batch.kind is BatchKind.PREFILL:
            prefills += 1
            verified_since_prefill.clear()
            for session in ready:
                went_ahead[session] = went_ahead.get(session, 0) + len(batch.slices)
                assert went_ahead[session] <= limits.max_prefill_ahead
        elif len(ready) < len(waiting):  # a prefill waits: only for those that the last one went ahead of
            assert min(waiting[piece.request.session].arrival for piece in batch.slices) < prefills
            assert not verified_since_prefill & {piece.request.session for piece in batch.slices}
            verified_since_prefill |= {piece.request.session for piece in batch.slices}
        for piece in batch.slices:
            want = waiting.pop(piece.request.session)
            if piece.outputs:
                served += 1
            else:
                waiting[piece.request.session] = Want(want.session, want.unseen - piece.tokens, want.drafted, prefills)
        assert step < 2000


def test_a_prefill_does_not_wait_for_what_another_device_has_asked_before() -> None:
    flood = [Want(session, 1, 0, arrival=0, device="flood", turn=session) for session in range(8)]
    honest = Want(9, 28, 4, arrival=2, device="honest")
    first = next_batch([honest, *flood], SchedulerLimits(), prefills=2, budget=10)
    assert first is not None
    assert (first.kind, [piece.request.session for piece in first.slices]) == (BatchKind.PREFILL, [9])
    then = next_batch([flood[0], honest, *flood[1:]], SchedulerLimits(), prefills=3, budget=10)
    assert then is not None
    assert then.kind is BatchKind.VERIFY


ROWS = (1, 2, 4, 8, 16, 32, 48, 64)


def curve(base: float, slope: float) -> list[float]:
    return [base + slope * rows for rows in ROWS]


def test_chunks_take_as_long_as_a_verdict_may_wait_and_are_never_below_the_papers() -> None:
    for base, slope in ((0.010, 0.00005), (0.010, 0.001), (0.060, 0.004), (1.0, 0.0)):
        limits = SchedulerLimits().measured(ROWS, curve(base, slope))
        for size, least, delay in ((limits.chunk, 32, DELAY), (limits.solo_chunk, 128, SOLO_DELAY)):
            assert least <= size <= limits.rows
            assert size == least or base + slope * size <= 1.001 * delay
            assert size == limits.rows or base + slope * (size + 1) >= 0.999 * delay


@pytest.mark.parametrize("fast", [True, False])
def test_a_worker_prefills_in_the_chunks_that_its_curve_chooses(exact: Model, fast: bool) -> None:
    """Two sessions, so that the chunks are those beside another session."""
    counts: dict[int, int] = {}
    ids = np.arange(400, 730, dtype=np.int32)
    context = Context(exact, ContextSpec(n_ctx=512, n_seq=2, n_batch=512, threads=1, unified=False))
    worker = VerifierWorker(context, 2, exact.is_eog)
    engine = worker._engine
    worker.use_curve(ROWS, curve(0.010, 0.00005) if fast else curve(0.060, 0.004))
    try:
        for session, prompt in ((1, ids[:5]), (2, ids)):
            answers: list[Answer] = []
            engine.add(VerifyRequest(session, GREEDY, 0, prompt, Chunk()), answers.append)
            before = engine.prefills
            while not answers:
                engine.step()
            counts[session] = engine.prefills - before
    finally:
        worker.close()
    assert counts == {1: 0, 2: 0 if fast else 10}
