"""The worker, without a network."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model, SeqRows
from edgellm.errors import EngineFailed
from edgellm.spec.protocols import HERE, Tenant, VerifyRequest
from edgellm.spec.types import GREEDY, Chunk, Floats, Ids, Verdict
from edgellm.verifier.engine import VerifierEngine
from edgellm.verifier.scheduler import Job, Scheduler, SchedulerLimits
from edgellm.verifier.worker import VerifierWorker
from tests.services.conftest import Alone
from tests.waiting import until

SLOTS = 3


class Gate(Context):
    """A context whose decodes wait for permission, and fail on demand."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, ContextSpec(256, SLOTS, threads=1, unified=False))
        self.allowed = threading.Event()
        self.allowed.set()
        self.fails = False
        self.nan = False
        self.next: Callable[[], None] = lambda: None  # called by the next decode
        self.orders: list[list[int]] = []  # of the sequences in each batch
        self.threads: set[int] = set()

    def decode_rows(self, rows: list[SeqRows]) -> list[Floats]:  # type: ignore[override]
        self.orders.append([entry.seq for entry in rows])
        self.threads.add(threading.get_ident())
        begin, self.next = self.next, lambda: None
        begin()
        self.allowed.wait()
        if self.fails:
            raise EngineFailed("It is broken.", "Mend it.")
        return [np.full_like(view, np.nan) if self.nan else view for view in super().decode_rows(rows)]


@pytest.fixture
def gate(exact: Model) -> Gate:
    return Gate(exact)


@pytest.fixture
def worker(gate: Gate, exact: Model) -> Iterator[VerifierWorker]:
    running = VerifierWorker(gate, SLOTS, exact.is_eog)
    running.start()
    yield running
    gate.allowed.set()
    running.close()


class Asker:
    """One session at the worker."""

    answer: Future[Verdict]

    def __init__(self, worker: VerifierWorker, session: int, tenant: Tenant = HERE) -> None:
        self.worker, self.session, self.tenant = worker, session, tenant

    def ask(self, prefix: Ids, extra: int = 0) -> None:
        request = VerifyRequest(self.session, GREEDY, 0, prefix, Chunk(), extra, round=1, tenant=self.tenant)
        self.answer = self.worker.submit(request)

    def tokens(self) -> list[int]:
        return self.answer.result(120).tokens.tolist()

    def get(self, prefix: Ids) -> list[int]:
        self.ask(prefix)
        return self.tokens()


def test_who_waits_together_is_computed_together(gate: Gate, worker: VerifierWorker, prompt: Ids, alone: Alone) -> None:
    askers = [Asker(worker, i) for i in range(SLOTS)]
    gate.allowed.clear()
    askers[0].ask(prompt)
    for asker in askers[1:]:
        asker.ask(prompt, extra=3)
    gate.allowed.set()
    assert askers[0].tokens() == alone(prompt, 1)
    assert [asker.tokens() for asker in askers[1:]] == [alone(prompt, 4)] * 2
    assert worker.counters.shared >= 4
    assert worker.counters.verdicts == 3


def test_verifications_wait_for_one_chunk_alone(gate: Gate, worker: VerifierWorker, prompt: Ids, alone: Alone) -> None:
    short, long = Asker(worker, 1), Asker(worker, 2)
    short.ask(prompt)
    written = short.tokens()
    gate.allowed.clear()
    first = len(gate.orders)
    text = np.concatenate([prompt[::-1]] * 12)
    long.ask(text)
    until(lambda: len(gate.orders) > first)  # its first chunk is being computed
    short.ask(np.concatenate((prompt, np.array(written, dtype=np.int32))))
    gate.allowed.set()
    assert short.tokens() == alone(prompt, 2)[1:]
    assert long.tokens() == alone(text, 1)
    assert gate.orders[first : first + 3] == [[1], [0], [1]]


def test_who_is_alone_has_a_prompt_read_in_one_piece(worker: VerifierWorker, prompt: Ids, alone: Alone) -> None:
    long = np.concatenate([prompt] * 8)[:120]
    first, second = Asker(worker, 1), Asker(worker, 2)
    assert first.get(long) == alone(long, 1)
    assert worker.counters.prefills == 0
    assert second.get(long[1:]) == alone(long[1:], 1)
    assert worker.counters.prefills == 3  # of 32 tokens each: somebody else may ask at any time


def test_a_request_that_is_alone_is_computed_by_who_asks_until_another_comes(
    gate: Gate, worker: VerifierWorker, prompt: Ids, alone: Alone
) -> None:
    assert worker.answer(VerifyRequest(1, GREEDY, 0, prompt, Chunk(), extra=1)).done()
    assert gate.threads == {threading.get_ident()}
    other = Asker(worker, 2)
    gate.next = lambda: other.ask(prompt[1:])
    mine = worker.answer(VerifyRequest(1, GREEDY, 0, prompt, Chunk(), extra=1))
    assert mine.result(120).tokens.tolist() == alone(prompt, 2)
    assert gate.threads != {threading.get_ident()}
    assert other.tokens() == alone(prompt[1:], 1)


def test_sessions_of_this_process_are_waited_for_after_an_answer(gate: Gate, exact: Model, prompt: Ids) -> None:
    engine = VerifierEngine(gate, SLOTS, exact.is_eog, Scheduler(SchedulerLimits()))

    def answered(*sessions: int, tenant: Tenant = HERE) -> None:
        for session in sessions:
            engine.add(Job(VerifyRequest(session, GREEDY, 0, prompt, Chunk(), tenant=tenant), prompt))
        while engine.step():
            pass

    answered(1)
    assert not engine.more_come  # nothing would be shared
    answered(1, 2)
    assert engine.more_come
    engine.drop(2)
    assert not engine.more_come
    answered(3, tenant=Tenant("far away"))
    assert not engine.more_come
    gate.close()


def test_what_a_waiting_request_builds_on_is_not_evicted(
    gate: Gate, worker: VerifierWorker, exact: Model, prompt: Ids, alone: Alone
) -> None:
    """Else it would be computed a second time, because sessions that wait for a slot had taken its own."""
    askers = [Asker(worker, i) for i in range(2 * SLOTS)]
    for asker in askers[:SLOTS]:
        asker.get(prompt)
    other = exact.tokenize("Something else altogether.")
    rows = worker.counters.rows
    gate.allowed.clear()
    begun = len(gate.orders)
    askers[0].ask(prompt)  # keeps the worker at it
    until(lambda: len(gate.orders) > begun)  # else it might hear of some of the others first, and not of all
    for asker in askers[SLOTS:]:
        asker.ask(other)
    askers[1].ask(prompt)
    gate.allowed.set()
    for asker in askers[:2]:
        assert asker.tokens() == alone(prompt, 1)
    for asker in askers[SLOTS:]:
        assert asker.tokens() == alone(other, 1)
    assert worker.counters.rows - rows == 1 + 1 + SLOTS * len(other)


def test_a_session_that_left_is_forgotten(gate: Gate, worker: VerifierWorker, prompt: Ids, alone: Alone) -> None:
    gone, stays = Asker(worker, 1), Asker(worker, 2)
    gate.allowed.clear()
    stays.ask(prompt)
    gone.ask(prompt, extra=100)
    worker.end_session(1)
    gate.allowed.set()
    assert stays.tokens() == alone(prompt, 1)
    stays.get(prompt)
    assert not gone.answer.done()
    assert worker.waiting == 0


@pytest.mark.parametrize("trouble", ["fails", "nan"])
def test_a_failed_decode_fails_its_requests_and_leaves_a_sound_worker(
    gate: Gate, worker: VerifierWorker, prompt: Ids, alone: Alone, trouble: str
) -> None:
    asker = Asker(worker, 1)
    setattr(gate, trouble, True)
    asker.ask(prompt)
    assert isinstance(asker.answer.exception(120), EngineFailed)
    setattr(gate, trouble, False)
    assert asker.get(prompt) == alone(prompt, 1)


def test_closing_answers_everybody(gate: Gate, exact: Model, prompt: Ids) -> None:
    worker = VerifierWorker(gate, SLOTS, exact.is_eog)
    askers = [Asker(worker, i) for i in range(SLOTS + 2)]
    gate.allowed.clear()
    worker.start()
    for asker in askers:
        asker.ask(prompt, extra=200)
    closing = threading.Thread(target=worker.close)
    closing.start()
    gate.allowed.set()
    closing.join()
    assert all(isinstance(asker.answer.exception(120), EngineFailed | None) for asker in askers)


def test_a_device_without_a_slot_takes_one_from_a_device_that_has_several(
    gate: Gate, worker: VerifierWorker, prompt: Ids, alone: Alone
) -> None:
    gate.allowed.clear()
    flood, last = (
        [Asker(worker, session, Tenant("flood")) for session in range(SLOTS)],
        Asker(worker, 10, Tenant("last")),
    )
    for one in flood:
        one.ask(prompt, extra=60)
    last.ask(prompt)
    gate.allowed.set()
    assert last.tokens() == alone(prompt, 1)
    assert [one.tokens() for one in flood] == [alone(prompt, 61)] * SLOTS  # each goes on where it was
    assert worker.counters.preemptions == 1


@pytest.mark.parametrize("salt", ["one", "other"])
def test_prompts_are_shared_within_a_device_only(worker: VerifierWorker, prompt: Ids, alone: Alone, salt: str) -> None:
    long = np.concatenate([prompt] * 5)
    first = Asker(worker, 1, Tenant("one", cache_salt="one"))
    assert first.get(long) == alone(long, 1)
    second = Asker(worker, 2, Tenant(salt, cache_salt=salt))
    assert second.get(long) == alone(long, 1)
    assert first.get(np.append(long, alone(long, 1)).astype(np.int32)) == alone(long, 2)[1:]
    assert bool(worker.counters.copied) == (salt == "one")
    worker.end_session(1)
    third, rows = Asker(worker, 3, Tenant("third", cache_salt="third")), worker.counters.rows
    third.get(long)
    assert worker.counters.rows - rows == len(long)
