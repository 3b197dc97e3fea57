"""Sessions that go through a stage in one batch get what each would get alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from edgellm.engine import Block, BlockRows, Floats
from edgellm.errors import InvalidOption
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.messages import Event, Failed, MicroBatch, StageAnswer
from edgellm.mesh.stage import Stage
from edgellm.mesh.verifier import MeshVerifier
from edgellm.mesh.weight_cache import WeightCache
from edgellm.spec.state import GenerationState
from edgellm.spec.types import GREEDY, Chunk, Sampling
from tests.engine.logits import some_ids
from tests.mesh.household import NOTHING, Cut, Device, Whole, all_at_once, even
from tests.mesh.test_stages import Posted, SlowLayers
from tests.verifier.asking import judged

SESSIONS, TOKENS = 4, 16
PROMPTS = [some_ids(20 + 7 * number, 2000, number + 1) for number in range(SESSIONS)]


@pytest.fixture
def company(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sessions went through a block at a time; grows."""
    seen: list[int] = []
    forward = Block.forward_together

    def noted(self: Block, passages: Sequence[BlockRows]) -> list[Floats]:
        seen.append(len(passages))
        return forward(self, passages)

    monkeypatch.setattr(Block, "forward_together", noted)
    return seen


def opened(cut: Cut, stages: int) -> MeshVerifier:
    devices = [Device(f"device {at}", cut.layers) for at in range(stages)]
    mesh = Mesh(devices, even(cut.work, [one.name for one in devices]), replace(cut.work, sessions=SESSIONS))
    return MeshVerifier(mesh, lambda _token: False, rows=16)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_greedy_replies_are_the_whole_models_own(
    verifier_cut: Cut, whole: Whole, stages: int, company: list[int]
) -> None:
    verifier = opened(verifier_cut, stages)
    assert all_at_once(verifier, GREEDY, PROMPTS, TOKENS) == [whole.text(prompt, TOKENS) for prompt in PROMPTS]
    assert max(company) <= -(-SESSIONS // stages)
    verifier.close()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_seed_gives_the_same_reply_in_company_and_alone(verifier_cut: Cut, stages: int) -> None:
    verifier, sampling = opened(verifier_cut, stages), Sampling(0.9, seed=7)
    together = all_at_once(verifier, sampling, PROMPTS, TOKENS)
    alone = [all_at_once(verifier, sampling, [prompt], TOKENS)[0] for prompt in PROMPTS]
    assert together == alone
    assert len({tuple(reply) for reply in together}) == SESSIONS
    verifier.close()


def test_drafts_are_judged_as_alone(verifier_cut: Cut, whole: Whole) -> None:
    """Right ones, wrong ones, and none: some have company, and others have not."""
    verifier = opened(verifier_cut, 2)
    own = [whole.text(prompt, 8) for prompt in PROMPTS]
    drafts = [own[0][:4], [*own[1][:2], 7, 8], [9, *own[2][1:4]], []]
    sessions = [verifier.open(GenerationState()) for _ in PROMPTS]
    for _ in range(2):  # the second time over what the first one has left behind
        pending = [
            session.submit(prompt, Chunk(np.array(draft, dtype=np.int32)))
            for session, prompt, draft in zip(sessions, PROMPTS, drafts, strict=True)
        ]
        verdicts = [one.result() for one in pending]
        assert [verdict.accepted for verdict in verdicts] == [4, 2, 0, 0]
        for verdict, text in zip(verdicts, own, strict=True):
            assert verdict.tokens.tolist() == text[verdict.accepted : verdict.accepted + 1]
            assert verdict.seconds > 0.0
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


def test_who_is_there_goes_together(held: Held, whole: Whole, company: list[int], verifier_cut: Cut) -> None:
    texts = [some_ids(8, 2000, session + 1) for session in range(SESSIONS)]
    for session, text in enumerate(texts):
        held.stage.put(MicroBatch(session, session, 0, text, judged(NOTHING, GREEDY, 8, logits=True)))
    answers = held.results(SESSIONS)
    assert company == [SESSIONS] * verifier_cut.work.n_layers
    for session, text in enumerate(texts):
        answer = answers[session]
        assert isinstance(answer, StageAnswer)
        assert answer.logits is not None
        whole.context.clear()
        assert np.abs(answer.logits - whole.context.decode(text)).max() < 1e-4


def test_one_that_fails_takes_nobody_along(held: Held, whole: Whole, company: list[int]) -> None:
    texts = [some_ids(8, 2000, session + 1) for session in range(SESSIONS)]
    for session, text in enumerate(texts):
        start = 5 if session == 2 else 0  # nothing is there before it
        held.stage.put(MicroBatch(session, session, start, text, judged(NOTHING, GREEDY, start + 8)))
    found = held.results(SESSIONS)
    assert max(company) == SESSIONS  # they have been tried together
    failed = found[2]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidOption)
    for session in (0, 1, 3):
        answer = found[session]
        assert isinstance(answer, StageAnswer)
        assert answer.verdict.tokens.tolist() == whole.text(texts[session], 1)
