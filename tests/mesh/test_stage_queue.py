"""Who goes through a block next and in whose company, where each gets what it would get alone."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Block
from edgellm.errors import InvalidOption
from edgellm.layer_range import LayerRange
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.messages import Event, Failed, MicroBatch, StageAnswer, StageSpec
from edgellm.mesh.stage import SHARED_ROWS, Stage, StageQueue
from edgellm.mesh.verifier import MeshVerifier
from edgellm.mesh.weight_cache import WeightCache
from edgellm.spec.types import GREEDY, Sampling
from tests.engine.logits import some_ids
from tests.mesh.household import NOTHING, Cut, Device, Whole, all_at_once, even
from tests.mesh.test_stages import Posted, SlowLayers
from tests.verifier.asking import judged
from tests.watching import Calls, calls_of

WORK = StageSpec("ab" * 32, "a model", LayerRange(0, 6), 6, 8, 100, 512, sessions=8)


def batch(session: int, number: int, rows: int = 1) -> MicroBatch:
    return MicroBatch(session, number, 0, np.zeros(rows, dtype=np.int32))


def line(*came: tuple[int, int], stages: int = 1) -> StageQueue:
    """Micro-batches of (session, rows), numbered from 0."""
    made = StageQueue(replace(WORK, stages=stages))
    for number, (session, rows) in enumerate(came):
        made.put(batch(session, number, rows))
    return made


@pytest.mark.parametrize(
    ("came", "go"),
    [
        ([], []),
        ([(3, 1)], [0]),
        ([(2, 1), (0, 1), (1, 1)], [0, 2, 1]),  # each next to those who go
        ([(0, 1), (1, 5), (2, 1)], [0]),  # the one between has more rows: llama.cpp would take each alone
        ([(1, 1), (0, 5), (2, 1)], [0, 2]),
        ([(0, 5), (1, 5), (2, 1)], [0, 1]),
        ([(0, 1), (2, 1), (3, 1)], [0]),  # of the others, none follows
        ([(3, 1), (5, 1), (0, 1), (4, 1), (2, 1)], [0, 3, 1, 4]),
        ([(0, 1), (0, 1), (1, 1)], [0, 2]),  # a session's own micro-batches follow each other
        ([(0, SHARED_ROWS // 2), (1, SHARED_ROWS // 2), (2, SHARED_ROWS // 2)], [0, 1]),
        ([(0, SHARED_ROWS // 2 + 1), (1, SHARED_ROWS // 2 + 1)], [0]),
        ([(0, 256), (1, 256)], [0]),
        ([(0, 256), (1, 1)], [0]),
    ],
)
def test_who_goes_together(came: list[tuple[int, int]], go: list[int]) -> None:
    assert [entry.batch.number for entry in line(*came).next(1)] == go


@pytest.mark.parametrize(
    ("came", "go"),
    [
        ([(0, 1), (1, 1)], 1), ([(0, 1), (1, 1), (2, 1)], 1), ([(0, 1), (1, 1), (2, 1), (3, 1)], 4),
        ([(0, 2), (1, 2)], 2), ([(0, 1)], 1),
    ],
)  # fmt: skip
def test_where_few_rows_do_not_pay_the_oldest_goes_alone(came: list[tuple[int, int]], go: int) -> None:
    assert [entry.batch.number for entry in line(*came).next(1, least=4)] == list(range(go))


def test_a_token_goes_ahead_of_a_part_that_is_under_way_but_once() -> None:
    made, order = line((0, 256), (0, 256)), []
    made.put(batch(1, 2))
    for _ in range(9):
        (entry,) = made.next(3)
        entry.advance()
        order.append(entry.batch.number)
        if entry.at == 3:
            made.remove(entry)
    assert order == [0, 0, 0, 2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(("stages", "go"), [(1, 8), (2, 4), (3, 3), (4, 2), (8, 1), (9, 1)])
def test_every_stage_gets_a_share_of_the_sessions(stages: int, go: int) -> None:
    made = line(*((session, 1) for session in range(8)), stages=stages)
    assert len(made.next(1)) == go


def test_sessions_that_are_elsewhere_count() -> None:
    made = line(*((session, 1) for session in range(8)), stages=2)
    for entry in made.next(1):
        made.remove(entry)  # four of them are in the next stage now
    assert len(made.next(1)) == 4
    for _ in range(WORK.sessions):  # and when they come no more, the others may go together
        for entry in made.next(1):
            made.remove(entry)
            made.put(entry.batch)
    assert len(made.next(1)) == 2


came = st.tuples(st.integers(0, 7), st.sampled_from([1, 1, 1, 2, 5, 20, 256]))


@given(st.lists(st.one_of(came, st.integers(1, 3)), max_size=60), st.integers(1, 4))
def test_whatever_comes_nobody_overtakes_and_nobody_is_left(steps: list[tuple[int, int] | int], stages: int) -> None:
    """Micro-batches come, and go through up to three blocks, of which ever more are there."""
    made, blocks, expected = line(stages=stages), 1, dict[int, list[int]]()
    done: dict[int, list[int]] = {}

    def move() -> bool:
        group = made.next(blocks)
        for entry in group:
            entry.advance()
            if entry.at == 3:
                made.remove(entry)
                done.setdefault(entry.batch.session, []).append(entry.batch.number)
        sessions = sorted(entry.batch.session for entry in group)
        assert len({(entry.at, len(entry.data)) for entry in group}) <= 1
        assert sessions == list(range(sessions[0], sessions[0] + len(sessions))) if group else True
        assert len(group) < 2 or len(group) * len(group[0].data) <= SHARED_ROWS
        return bool(group)

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


SESSIONS, TOKENS = 4, 16
PROMPTS = [some_ids(20 + 7 * number, 2000, number + 1) for number in range(SESSIONS)]


@pytest.fixture
def company(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The blocks, and what went through them at a time; grows."""
    return calls_of(monkeypatch, Block, "forward_together")


def opened(cut: Cut, stages: int) -> MeshVerifier:
    devices = [Device(f"device {at}", cut.layers) for at in range(stages)]
    mesh = Mesh(devices, even(cut.work, [one.name for one in devices]), replace(cut.work, sessions=SESSIONS))
    return MeshVerifier(mesh, lambda _token: False, rows=16)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_greedy_replies_are_the_whole_models(verifier_cut: Cut, whole: Whole, stages: int, company: Calls) -> None:
    verifier = opened(verifier_cut, stages)
    assert all_at_once(verifier, GREEDY, PROMPTS, TOKENS) == [whole.text(prompt, TOKENS) for prompt in PROMPTS]
    assert max(len(passages) for _, passages in company) <= -(-SESSIONS // stages)
    verifier.close()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_seed_gives_the_same_reply_in_company_and_alone(verifier_cut: Cut, stages: int) -> None:
    verifier, sampling = opened(verifier_cut, stages), Sampling(0.9, seed=7)
    together = all_at_once(verifier, sampling, PROMPTS, TOKENS)
    alone = [all_at_once(verifier, sampling, [prompt], TOKENS)[0] for prompt in PROMPTS]
    assert together == alone
    assert len({tuple(reply) for reply in together}) == SESSIONS
    verifier.close()


class Held:
    """A stage of all layers that computes nothing before it is let go; so who is put together goes together."""

    def __init__(self, cut: Cut) -> None:
        self.posted, self._slow = Posted(), SlowLayers(cut.layers, 0)
        work = replace(cut.work, sessions=SESSIONS)
        self.stage = Stage(work, WeightCache(self._slow), self.posted)
        self.stage.start()

    def results(self, n: int) -> dict[int, StageAnswer | Failed]:
        """Lets it go, and waits for what comes of `n` micro-batches."""
        self._slow.go.set()
        found: dict[int, StageAnswer | Failed] = {}
        done = threading.Event()

        def wanted(event: Event) -> bool:
            if isinstance(event, StageAnswer | Failed):
                found[event.number] = event
            if len(found) == n:
                done.set()
            return done.is_set()

        self.posted.wait(wanted)
        return found


@pytest.fixture
def held(verifier_cut: Cut) -> Iterator[Held]:
    one = Held(verifier_cut)
    yield one
    one.stage.close()


def test_one_that_fails_takes_nobody_along(held: Held, whole: Whole, company: Calls) -> None:
    texts = [some_ids(8, 2000, session + 1) for session in range(SESSIONS)]
    for session, text in enumerate(texts):
        start = 5 if session == 2 else 0  # nothing is there before it
        held.stage.put(MicroBatch(session, session, start, text, judged(NOTHING, GREEDY, start + 8)))
    found = held.results(SESSIONS)
    assert max(len(passages) for _, passages in company) == SESSIONS  # they have been tried together
    failed = found[2]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidOption)
    for session in (0, 1, 3):
        answer = found[session]
        assert isinstance(answer, StageAnswer)
        assert answer.verdict.tokens.tolist() == whole.text(texts[session], 1)
