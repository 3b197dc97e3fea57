"""Draft lengths and batches chosen together: the choice itself, what it learns from, and what must not change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Context, Model
from edgellm.spec.types import GREEDY, Chunk, Ids, Sampling, Verdict
from edgellm.verifier import batch_shapes
from edgellm.verifier.batch_shapes import (
    MAX_UNSEEN,
    ROWS,
    BatchShapes,
    BatchTimes,
    DraftAcceptance,
    Offer,
    Times,
    choose_rows,
)
from edgellm.verifier.engine import VerifierEngine
from edgellm.verifier.fairness import FairScheduler
from edgellm.verifier.requests import Answer, Tenant, VerifyRequest
from edgellm.verifier.scheduler import BatchKind, ScheduledBatch, SchedulerLimits, next_batch

chances = st.lists(st.floats(0.0, 1.0), max_size=6).map(lambda some: np.cumprod(some).tolist())
offers = st.lists(
    st.builds(lambda unseen, some: Offer(unseen, np.cumsum([1.0, *some]).tolist()), st.integers(1, 3), chances),
    min_size=1,
    max_size=4,
)
costs = st.builds(
    lambda fixed, steps: Times(fixed, np.cumsum([0.0, *steps]).tolist()),
    st.floats(0.0, 3.0),
    st.lists(st.floats(0.0, 1.0), min_size=ROWS[-1], max_size=ROWS[-1]),
)


def worth(some: Sequence[Offer], rows: Sequence[int], cost: Times) -> float:
    """Return the expected tokens of a partition beyond its cost; an offer of 0 rows is in none."""
    tokens = sum(one.expected[r - one.unseen] - cost.each[r] for one, r in zip(some, rows, strict=True) if r)
    return tokens - cost.fixed * len({*rows} - {0})


@given(offers, costs)
def test_no_other_partition_is_better(some: list[Offer], cost: Times) -> None:
    """Of all numbers of rows for every offer, that an offer has and that are allowed."""
    allowed = {some[0].unseen, *ROWS}
    options = [[r for r in range(one.unseen, one.unseen + len(one.expected)) if r in allowed] for one in some]
    chosen = choose_rows(some, cost)
    assert all(r in able if able else r == 0 for r, able in zip(chosen, options, strict=True))
    assert chosen[0]
    best = max(worth(some, rows, cost) for rows in product(*(able or [0] for able in options)))
    assert worth(some, chosen, cost) == pytest.approx(best)


def test_what_is_unlikely_to_stand_is_cut_off_where_rows_cost_much_and_joins_where_batches_do() -> None:
    sure, doubtful = Offer(1, [1.0, 1.9, 2.7, 3.4, 4.0]), Offer(1, [1.0, 1.4, 1.55, 1.6, 1.62])
    dear, cheap = (Times(fixed, [row * r for r in range(ROWS[-1] + 1)]) for fixed, row in ((0.3, 0.5), (5.0, 0.01)))
    assert choose_rows([sure, doubtful], dear) == [5, 1]
    assert choose_rows([sure, doubtful], cheap) == [5, 5]
    assert choose_rows([sure, Offer(1, [1.0])], Times(5.0, dear.each)) == [1, 1]


def request(session: int, drafted: int, unseen: int = 1, copied: bool = True) -> VerifyRequest:
    chunk, prefix = Chunk(ids=np.arange(drafted, dtype=np.int32), retrieved=copied), np.zeros(unseen, np.int32)
    asked = VerifyRequest(session, GREEDY, 0, prefix, chunk, tenant=Tenant(str(session)))
    asked.ids = asked.prefix
    return asked


class Verifier:
    """A verifier whose batches take `fixed` seconds, `each` for a request and `row` for a row. It accepts the first
    `right` drafted tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fixed: float, each: float, row: float, right: int) -> None:
        self.now, self.shapes, self.right = 0.0, BatchShapes(), right
        self._fixed, self._each, self._row = fixed, each, row
        monkeypatch.setattr(batch_shapes, "monotonic", lambda: self.now)
        monkeypatch.setattr(batch_shapes, "MIN_REQUESTS", 1)

    def verify(self, asked: Sequence[VerifyRequest], waiting: int = 1) -> list[int]:
        """Compute a batch with the first of the requests; return the rows of its requests."""
        slices = tuple(self.shapes.shape(asked, None))
        batch = ScheduledBatch(BatchKind.VERIFY, slices)
        self.shapes.on_chosen(batch, waiting)
        rows = [piece.tokens for piece in slices]
        self.now += self._fixed + len(rows) * self._each + sum(rows) * self._row
        for piece in slices:
            one = piece.request
            one.accepted = min(one.accepted + piece.outputs, self.right, len(one.draft))
            if one.accepted >= min(self.right, len(one.draft)):
                one.tokens.append(0)
        self.shapes.on_batch(batch)
        return rows


def test_drafts_are_cut_where_computing_is_the_limit_and_not_where_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for fixed, row, cut in ((0.001, 0.01, True), (0.1, 0.00001, False)):
        verifier = Verifier(monkeypatch, fixed, 0.0001, row, right=4)
        for number in range(300):
            verifier.verify([request(session, 1 + (number + session) % 8) for session in range(4)])
        rows = verifier.verify([request(session, 8) for session in range(4)])
        assert len(rows) == 4
        assert (rows[0] < 9) == cut, verifier.shapes.reason
        assert verifier.verify([request(session, 8, copied=False) for session in range(4)]) == [9] * 4


def test_drafts_are_whole_where_few_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier(monkeypatch, 0.001, 0.0001, 0.01, right=4)
    for number in range(300):
        verifier.verify([request(session, 1 + (number + session) % 8) for session in range(4)])
    monkeypatch.setattr(batch_shapes, "MIN_REQUESTS", 8)
    for many, whole in ((7, True), (8, False)):
        rows = verifier.verify([request(session, 8) for session in range(many)])
        assert (rows[0] == 9) == whole, many


def test_drafts_are_whole_where_the_verifier_is_mostly_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier(monkeypatch, 0.001, 0.0001, 0.01, right=4)
    for number in range(300):
        verifier.now += 1.0
        verifier.verify([request(1, 1 + number % 8)], waiting=0)
    assert verifier.verify([request(1, 8)]) == [9], verifier.shapes.reason


def test_times_are_learned_from_batches() -> None:
    times = BatchTimes()
    for number in range(400):
        n, r = 1 + number % 7, ROWS[number % 5]
        times.add(n, r, 10, 0.004 + n * (0.001 + 0.002 * r), 0.0)
    cost = times.cost
    assert cost is not None
    assert [cost.each[r] / cost.fixed for r in ROWS[:5]] == pytest.approx([(1 + 2 * r) / 4 for r in ROWS[:5]], rel=0.1)


def test_acceptance_is_learned_by_device_and_place() -> None:
    acceptance = DraftAcceptance()
    for number in range(200):
        good, bad = request(1, 4), request(2, 4)
        good.accepted, bad.accepted = 4, number % 2
        acceptance.observe(good, 0, 4)
        acceptance.observe(bad, 0, 4)
    (sure, doubtful) = (list(acceptance.chances(request(session, 4))) for session in (1, 2))
    assert sure[-1] > 0.7 > 0.6 > doubtful[0] > doubtful[-1]
    later = request(2, 4)
    later.accepted, later.remaining = 2, Chunk(ids=later.draft.ids[2:])
    assert len(list(acceptance.chances(later))) == 2


wants = st.lists(st.tuples(st.integers(1, 2 * MAX_UNSEEN), st.integers(0, 40)), min_size=1, max_size=8)


@given(st.lists(wants, min_size=12, max_size=16), st.integers(0, 4))
def test_the_first_in_line_is_always_served_and_nobody_gets_what_does_not_fit(
    rounds: list[list[tuple[int, int]]], right: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        verifier = Verifier(monkeypatch, 0.001, 0.001, 0.01, right)
        for some in rounds:
            asked = [request(session, drafted, unseen) for session, (unseen, drafted) in enumerate(some)]
            batch = next_batch(asked, SchedulerLimits(), 0, budget=10, shape=verifier.shapes.shape)
            assert batch is not None
            assert batch.slices[0].request is asked[0]
            assert len({piece.tokens for piece in batch.slices}) == 1
            for one, tokens, outputs in batch.slices:
                assert one.unseen <= tokens <= one.unseen + one.drafted
                assert outputs == tokens - one.unseen + 1
            verifier.verify(asked)


def verdicts(
    model: Model, prompt: Ids, drafts: list[Chunk], sampling: Sampling, cut: bool
) -> tuple[list[Verdict], int]:
    """Return the verdicts of an engine on the drafts of as many devices, asked for at the same moment, and the passes
    that they took."""
    found: dict[int, Answer] = {}
    with Context(model, n_ctx=128, n_seq=len(drafts), threads=1, unified=False) as context:
        scheduler = FairScheduler(SchedulerLimits(cut_drafts=cut))
        engine = VerifierEngine(context, len(drafts), model.is_eog, scheduler)
        for chunks in ([Chunk()] * len(drafts), drafts):
            found.clear()
            for session, chunk in enumerate(chunks):
                asked = VerifyRequest(session, sampling, 0, prompt, chunk, extra=2, tenant=Tenant(str(session)))
                engine.add(asked, partial(found.__setitem__, session))
            while len(engine):
                engine.step()
    answers = [found[session] for session in range(len(drafts))]
    some = [answer for answer in answers if isinstance(answer, Verdict)]
    assert len(some) == len(drafts)
    return some, sum(verdict.passes for verdict in some)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_verdicts_do_not_depend_on_cuts(
    exact: Model, prompt: Ids, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    """Each device drafts the verifier's own text, up to an error."""
    (whole,), _ = verdicts(exact, prompt, [Chunk()], sampling, cut=False)
    text = np.array(whole.tokens)
    while len(text) < 12:
        (more,), _ = verdicts(exact, np.concatenate((prompt, text)), [Chunk()], sampling, cut=False)
        text = np.concatenate((text, more.tokens))
    drafts = []
    for wrong, length in ((0, 5), (3, 8), (7, 12), (12, 12), (12, 2), (12, 0)):
        ids = text[:length].astype(np.int32)
        ids[wrong : wrong + 1] ^= 1
        drafts.append(Chunk(ids=ids, retrieved=True))
    expected, at_once = verdicts(exact, prompt, drafts, sampling, cut=False)
    dear = Times(0.1, [0.3 * r for r in range(ROWS[-1] + 1)])
    monkeypatch.setattr(BatchTimes, "cost", dear)
    monkeypatch.setattr(batch_shapes, "MIN_REQUESTS", 1)
    found, in_parts = verdicts(exact, prompt, drafts, sampling, cut=True)
    assert in_parts > at_once  # drafts were cut
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.accepted, ours.tokens.tolist()) == (theirs.accepted, theirs.tokens.tolist())
    assert [one.accepted for one in found] == [0, 3, 7, 12, 2, 0]
