"""Sessions that begin alike: the beginning is computed once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgellm.engine import Model
from edgellm.spec.types import Ids
from edgellm.verifier.scheduler import SchedulerLimits
from edgellm.verifier.worker import VerifierWorker
from tests.services.conftest import Alone
from tests.verifier.test_worker import SLOTS, Asker, Gate

CHUNK = 8


@pytest.fixture
def gate(exact: Model) -> Gate:
    return Gate(exact)


@pytest.fixture
def worker(gate: Gate, exact: Model) -> Iterator[VerifierWorker]:
    worker = VerifierWorker(gate, SLOTS, exact.is_eog, SchedulerLimits(chunk=CHUNK))
    worker.start()
    yield worker
    gate.allowed.set()
    worker.close()


@pytest.fixture(scope="module")
def system(exact: Model) -> Ids:
    return exact.tokenize("These are the rules of the house, and they are the same for everybody who asks. " * 3)


@pytest.fixture(scope="module")
def questions(exact: Model, system: Ids) -> list[Ids]:
    texts = ("Where is the mug?", "Who has the key to the shed?", "What is in the box?")
    return [np.concatenate((system, exact.tokenize(text))) for text in texts]


def test_a_live_sessions_beginning_is_copied(
    worker: VerifierWorker, system: Ids, questions: list[Ids], alone: Alone
) -> None:
    one, two = Asker(worker, 1), Asker(worker, 2)
    assert one.get(questions[0], extra=4) == alone(questions[0], 5)
    rows = worker.counters.rows
    assert two.get(questions[1], extra=4) == alone(questions[1], 5)
    common = int(np.argmin(questions[0][: len(system) + 1] == questions[1][: len(system) + 1])) or len(system)
    assert worker.counters.copied == common >= len(system)
    assert worker.counters.rows - rows == len(questions[1]) - common + 4
    assert (
        one.get(np.concatenate((questions[0], alone(questions[0], 5))), position=len(questions[0]) + 4)
        == alone(questions[0], 6)[5:]
    )  # the other's cache is as it was
    assert worker.counters.evictions == 0


def test_drafts_are_judged_the_same_with_a_copied_beginning(
    worker: VerifierWorker, questions: list[Ids], alone: Alone
) -> None:
    one, two = Asker(worker, 1), Asker(worker, 2)
    one.get(questions[0])
    wanted = alone(questions[1], 4)
    drafted = np.array([*wanted[:2], wanted[2] ^ 1, 7], dtype=np.int32)
    two.ask(questions[1], chunk=drafted)
    answer = two.answer()
    assert (answer.accepted, answer.tokens.tolist()) == (2, wanted[2:3])  # type: ignore[union-attr]


def test_a_beginning_shorter_than_a_chunk_is_not_worth_a_copy(worker: VerifierWorker, questions: list[Ids]) -> None:
    one, two = Asker(worker, 1), Asker(worker, 2)
    one.get(questions[0])
    two.get(np.concatenate((questions[0][: CHUNK - 1], questions[1][::-1])))
    assert worker.counters.copied == 0
