"""The choice of the next batch, turns between devices, and few slots for more sessions."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edgellm.engine import Context, ContextSpec, Ids, Model
from edgellm.services.server import verification_service
from edgellm.services.server.verification_service import BURST, EVENTS_PER_SECOND, Pacing, Queue
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.protocols import Tenant, VerifyRequest
from edgellm.spec.types import GREEDY, NO_IDS, Chunk, Floats, Sampling, Verdict
from edgellm.spec.verification import Judgement
from edgellm.verifier import scheduler
from edgellm.verifier.engine import SlotTable
from edgellm.verifier.scheduler import DELAY, SOLO_DELAY, DeviceTurns, Job, SchedulerLimits, Slice, next_batch
from edgellm.verifier.worker import VerifierWorker
from tests.engine.logits import ids


def want(session: int, unseen: int, drafted: int, arrival: int = 0, device: str = "", turn: int = 0) -> Job:
    draft = Chunk(np.zeros(drafted, np.int32))
    request = VerifyRequest(session, GREEDY, 0, NO_IDS, draft, tenant=Tenant(device))
    return Job(request, np.zeros(unseen, np.int32), arrival=arrival, turn=turn)


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
    worker.use_curve(CostCurve(ROWS, tuple(curve(0.010, 0.00005) if fast else curve(0.060, 0.004))))
    worker.start()
    for session, prompt in ((1, ids[:5]), (2, ids)):
        before = worker.counters.prefills
        worker.submit(VerifyRequest(session, GREEDY, 0, prompt, Chunk())).result(120)
        counts[session] = worker.counters.prefills - before
    worker.close()
    assert counts == {1: 0, 2: 0 if fast else 10}


TURNS = SchedulerLimits(budget=12)


def flood(n: int = 8) -> list[Job]:
    return [want(i, 1, 0, 5, "flood") for i in range(1, n + 1)]


def shared(waiting: list[Job], prefills: int = 5) -> list[Slice]:
    return next_batch(DeviceTurns().order(waiting), TURNS, prefills, turns=True)


def sessions(batch: list[Slice]) -> list[int]:
    return [piece.request.session for piece in batch]


def test_each_device_has_a_turn_before_any_has_another() -> None:
    turns = DeviceTurns()
    ordered = turns.order([*flood(), want(20, 1, 0, 5, "other")])
    assert [(one.session, one.turn) for one in ordered[:4]] == [(1, 0), (20, 0), (2, 1), (3, 2)]
    turns.record_batch(["flood"])
    assert turns.order([*flood(), want(20, 1, 0, 5, "other")])[0].session == 20


def test_beyond_the_first_turn_a_batch_is_no_heavier_than_its_budget() -> None:
    assert sessions(shared([*flood(), want(20, 1, 0, 5, "other")])) == [1, 20, 2, 3]
    assert len(shared([want(i, 1, 4, 5, str(i)) for i in range(64)])) == 64


def test_a_long_verification_is_done_in_portions_where_others_ask() -> None:
    first = shared([want(20, 1, 256, 0, "a"), *flood(2)], 0)[0]
    assert first.tokens == first.outputs == 1 + TURNS.chunk


def test_the_first_in_line_decides_between_prefill_and_verification() -> None:
    assert shared([want(1, 1, 0, 5, "flood"), want(20, 1, 4, 5, "other"), want(2, 300, 0, 5, "flood")])[0].outputs
    honest = want(9, 40, 4, arrival=2, device="honest")
    crowd = [want(session, 1, 0, device="flood", turn=session) for session in range(8)]
    first = next_batch([honest, *crowd], SchedulerLimits(), 2, turns=True)
    assert (first[0].outputs, sessions(first)) == (0, [9])
    assert next_batch([crowd[0], honest, *crowd[1:]], SchedulerLimits(), 3, turns=True)[0].outputs


def test_the_verifier_is_shared_while_more_than_one_device_has_asked_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(scheduler, "monotonic", lambda: now)
    turns = DeviceTurns()
    turns.record_request("a")
    assert not turns.several_devices()
    turns.record_request("b")
    assert turns.several_devices()
    now = scheduler.RECENT + 1.0
    turns.record_request("a")
    assert not turns.several_devices()


def test_the_device_that_fills_the_queue_is_told_first() -> None:
    queue = Queue(8)
    for _ in range(8):
        assert not queue.full("flood")
        queue.enter("flood")
    assert queue.full("flood")
    assert not queue.full("other")
    queue.enter("other")
    for _ in range(4):
        assert queue.full("flood")
        queue.leave("flood")
    queue.leave("flood")
    assert not queue.full("flood")


def test_a_device_that_asks_in_vain_too_often_is_not_heard_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(verification_service, "monotonic", lambda: now)
    pacing = Pacing()
    assert not any(pacing.delay("flood") for _ in range(BURST - 1))
    delays = [pacing.delay("flood") for _ in range(51)]
    assert delays[-1] == pytest.approx(50 / EVENTS_PER_SECOND)
    assert pacing.delay("other") == 0.0
    now = 60.0
    assert pacing.delay("flood") == 0.0


class Caches:
    """What a context holds per slot."""

    def __init__(self, slots: int) -> None:
        self.slots_of = [ids() for _ in range(slots)]

    def __call__(self, slot: int) -> Ids:
        return self.slots_of[slot]

    def clear(self, slot: int) -> None:
        self.slots_of[slot] = ids()


def table(slots: int) -> tuple[SlotTable, Caches]:
    caches = Caches(slots)
    return SlotTable(slots, caches, caches.clear), caches


def serve(sessions: SlotTable, caches: Caches, session: int, *tokens: int) -> int:
    slot = sessions.claim(session, ids(*tokens))
    assert slot is not None
    caches.slots_of[slot] = ids(*tokens)
    sessions.release(session)
    return slot


def test_the_least_recently_used_session_is_evicted_and_others_keep_their_slots() -> None:
    sessions, caches = table(2)
    first = serve(sessions, caches, 1, 1)
    serve(sessions, caches, 2, 2)
    assert serve(sessions, caches, 1, 1, 1) == first
    assert serve(sessions, caches, 3, 3) != first
    assert (sessions.slot(1), sessions.slot(2), sessions.evictions) == (first, None, 1)


def test_who_begins_like_an_ended_session_gets_its_slot() -> None:
    sessions, caches = table(3)
    serve(sessions, caches, 1, 1, 2, 3)
    like = serve(sessions, caches, 2, 7, 8, 9)
    serve(sessions, caches, 3, 4)
    for session in (1, 2, 3):
        sessions.drop(session)
    assert serve(sessions, caches, 4, 7, 8, 1) == like
    assert sessions.evictions == 0


def test_a_cached_prompt_is_not_given_up_for_two_tokens_of_a_template() -> None:
    sessions, caches = table(2)
    first = serve(sessions, caches, 1, 1, 2, 30, 31, 32, 33)
    sessions.drop(1)
    assert serve(sessions, caches, 2, 1, 2, 40, 41, 42, 43) != first
    sessions.drop(2)
    assert serve(sessions, caches, 3, 1, 2, 30, 31, 32, 33, 34) == first


def test_what_one_device_asked_is_removed_before_another_one_gets_the_slot() -> None:
    sessions, caches = table(1)
    sessions.claim(1, ids(1, 2, 3), Tenant("a", cache_salt="a"))
    caches.slots_of[0] = ids(1, 2, 3)
    sessions.drop(1)
    sessions.claim(2, ids(1, 2, 3), Tenant("a", cache_salt="a"))
    assert caches.slots_of[0].tolist() == [1, 2, 3]
    sessions.drop(2)
    sessions.claim(3, ids(1, 2, 3), Tenant("b", cache_salt="b"))
    assert not len(caches.slots_of[0])


def test_a_device_with_more_slots_evicts_its_own_sessions() -> None:
    sessions, _caches = table(3)
    much, little = Tenant("much"), Tenant("little")
    sessions.claim(1, ids(1), little)
    sessions.release(1)
    for session in (2, 3):
        sessions.claim(session, ids(session), much)
        sessions.release(session)
    assert sessions.claim(4, ids(4), much) is not None
    assert (sessions.slot(1), sessions.slot(2)) == (0, None)  # though the first was idle for longer
    assert (sessions.slots_of("little"), sessions.slots_of("much")) == (1, 2)


class TableMachine(RuleBasedStateMachine):
    """Any order of events."""

    SLOTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.table, self.caches = table(self.SLOTS)
        self.busy: set[int] = set()

    @rule(session=st.integers(0, 6), token=st.integers(0, 2))
    def begin(self, session: int, token: int) -> None:
        had = self.table.slot(session)
        slot = self.table.claim(session, ids(token, session))
        if session not in self.busy:
            assert (slot is None) == (had is None and len(self.busy) == self.SLOTS)
        if slot is not None:
            assert had in (None, slot)
            self.caches.slots_of[slot] = ids(token, session)
            self.busy.add(session)

    @rule(session=st.integers(0, 6))
    def finish(self, session: int) -> None:
        self.table.release(session)
        self.busy.discard(session)

    @rule(session=st.integers(0, 6))
    def leave(self, session: int) -> None:
        self.table.drop(session)
        self.busy.discard(session)
        assert self.table.slot(session) is None

    @invariant()
    def nobody_shares_and_nobody_busy_is_lost(self) -> None:
        slots = [self.table.slot(session) for session in range(7)]
        owned = [slot for slot in slots if slot is not None]
        assert len(owned) == len(set(owned))
        assert all(slots[session] is not None for session in self.busy)


TestTable = TableMachine.TestCase


# --- verdicts in portions ---------------------------------------------------------------------------------------------


VOCABULARY, END = 8, 7
PROMPT = np.array([1, 2], np.int32)


def row(text: Ids) -> Floats:
    """Return the logits after `text` of a model that sees all of it."""
    rng = np.random.default_rng([*text.tolist()])
    return rng.normal(0.0, 2.0, VOCABULARY).astype(np.float32)


@dataclass
class Judged:
    """A verdict, and what it took."""

    verdict: Verdict
    rows: int


def judged(draft: Chunk, portions: list[int], sampling: Sampling, extra: int, end: int = END) -> Judged:
    """Return the verdict on `draft`, of which a pass has as many tokens as the next of `portions` says."""
    job = Job(VerifyRequest(0, sampling, 0, PROMPT, draft, extra, logprobs=1), PROMPT)
    computed = 0
    for number in range(200):
        drafted = min(portions[number % len(portions)], job.drafted)
        text = np.concatenate((job.ids, job.remaining.ids[:drafted]))
        rows = np.array([row(text[: len(job.ids) + place]) for place in range(drafted + 1)])
        before, computed = len(job.ids), computed + job.unseen + drafted
        needs_pass = job.judge(rows, drafted, lambda token: token == end)
        assert job.request.computed <= before + drafted  # nothing counts as computed that was not
        if not needs_pass:
            return Judged(job.verdict(), computed)
        assert job.unseen == 1
    raise AssertionError("it never ends")


@given(
    st.integers(0, 9),
    st.integers(0, 12),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([GREEDY, Sampling(temperature=1.0, seed=3)]),
)
def test_a_verdict_in_portions_is_the_verdict_at_once(
    right: int, length: int, portions: list[int], extra: int, copied: bool, sampling: Sampling
) -> None:
    own = judged(Chunk(), [0], sampling, 12).verdict.tokens
    draft = np.resize(np.concatenate((own[:right], [0])), length).astype(np.int32)
    chunk = Chunk(ids=draft, confidence=np.ones(length, np.float32), retrieved=copied)
    whole, parts = (judged(chunk, sizes, sampling, extra).verdict for sizes in ([length], portions))
    assert (parts.accepted, parts.tokens.tolist()) == (whole.accepted, whole.tokens.tolist())
    if END not in (*draft[: whole.accepted], *whole.tokens):
        assert whole.accepted + len(whole.tokens) == max(whole.accepted, extra) + 1
    assert [entry.own for entry in parts.logprobs] == [entry.own for entry in whole.logprobs]
    if copied:
        assert parts.plausible is not None
        assert whole.plausible is not None
        assert parts.plausible[: parts.accepted + 1] == whole.plausible[: parts.accepted + 1]


def test_a_portion_is_not_computed_twice() -> None:
    own = judged(Chunk(), [0], GREEDY, 8, end=-1).verdict.tokens[:6]
    draft = Chunk(ids=own, confidence=np.ones(6, np.float32))
    assert {judged(draft, sizes, GREEDY, 0, end=-1).rows for sizes in ([6], [1], [2], [0], [4, 1])} == {len(PROMPT) + 6}


def test_nothing_is_written_after_an_end_that_the_last_row_of_a_portion_judged() -> None:
    own = judged(Chunk(), [0], GREEDY, 12).verdict.tokens
    assert own[-1] == END
    judgement = Judgement(VerifyRequest(0, GREEDY, 0, PROMPT, Chunk(), extra=12), PROMPT)
    assert judgement.judge(row(PROMPT)[None], 0, lambda token: token == END)
    judgement.remaining = Chunk(ids=own[1:], confidence=np.ones(len(own) - 1, np.float32))
    drafted = len(own) - 2  # all but the end
    text = np.concatenate((PROMPT, own))
    rows = np.array([row(text[: len(PROMPT) + 1 + place]) for place in range(drafted + 1)])
    assert not judgement.judge(rows, drafted, lambda token: token == END)
    assert judgement.verdict().tokens.tolist() == own.tolist()
