"""A verifier that drafts the extra tokens of a verdict writes the same ones, in fewer passes, where that is faster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from edgellm import LLM
from edgellm.engine import Context, ContextSpec, Ids, Message, Model, ModelFile
from edgellm.engine.model import LoadSpec
from edgellm.engine.speculators.speculator import Speculator
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import GREEDY, NO_IDS, Chunk, Penalties, Sampling, Verdict
from edgellm.verifier.engine import VerifierEngine
from edgellm.verifier.extra_drafts import Bandit, ExtraDrafts
from edgellm.verifier.scheduler import Job, Scheduler, SchedulerLimits
from tests.conftest import Architectures, Heads

EXTRA = 7
QUESTION = "Where is the mug, and where is the key?"


@pytest.fixture(params=["qwen35", "glm4moe", "llama"])
def load(request: pytest.FixtureRequest, architectures: Architectures, heads: Heads) -> tuple[Path, LoadSpec]:
    """A model with an MTP layer or, the last one, with an EAGLE-3 head beside it."""
    if request.param == "llama":
        head = ModelFile.open(heads(request.param, own=True))
        return architectures(request.param), LoadSpec(speculates=True, eagle3=head)
    return architectures(request.param, mtp="useful"), LoadSpec(speculates=True)


@pytest.fixture
def model(load: tuple[Path, LoadSpec]) -> Iterator[Model]:
    with Model.load(*load) as loaded:
        yield loaded


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are taken for the faster way, whatever they took."""
    monkeypatch.setattr(Bandit, "second", lambda _self: True)
    monkeypatch.setattr(Bandit, "record", lambda *_given: None)


class Asking:
    """One session at an engine of its own, whose verdicts are written to `ids`."""

    def __init__(self, model: Model, sampling: Sampling = GREEDY, *, drafts: bool) -> None:
        self.context = Context(model, ContextSpec(n_ctx=256, threads=1, rolls_back=True, speculates=drafts))
        self._is_eog, self._sampling, self.end, self.passes = model.is_eog, sampling, -1, 0
        self.ids = self.prompt = model.chat_prompt([Message("user", QUESTION)])
        layer = self.context.speculator
        extra_drafts = ExtraDrafts(layer, self.is_eog) if layer is not None else None
        self._engine = VerifierEngine(self.context, 1, self.is_eog, Scheduler(SchedulerLimits()), extra_drafts)

    def is_eog(self, token: int) -> bool:
        return self._is_eog(token) or token == self.end

    def ask(self, draft: Ids = NO_IDS, extra: int = EXTRA) -> Verdict:
        job = Job(VerifyRequest(0, self._sampling, 0, self.ids, Chunk(draft), extra), self.ids)
        self._engine.add(job)
        while not job.answer.done():
            self._engine.step()
        verdict = job.answer.result()
        self.passes += verdict.passes
        self.ids = np.concatenate((self.ids, draft[: verdict.accepted], verdict.tokens))
        return verdict


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=0.8, seed=5), Sampling(penalties=Penalties(repeat=1.3, frequency=0.4))]
)
def test_the_tokens_are_the_same_in_fewer_passes(model: Model, sampling: Sampling, always: None) -> None:
    plain, drafting = (Asking(model, sampling, drafts=drafts) for drafts in (False, True))
    with plain.context, drafting.context:
        for turn in range(8):
            chunk = np.array([5, 6], dtype=np.int32) if turn % 3 == 2 else NO_IDS
            one, two = plain.ask(chunk), drafting.ask(chunk)
            assert (one.accepted, one.tokens.tolist()) == (two.accepted, two.tokens.tolist())
        assert drafting.passes < plain.passes


def test_never_more_tokens_than_asked_for_and_none_behind_the_end(model: Model, always: None) -> None:
    plain, drafting = (Asking(model, drafts=drafts) for drafts in (False, True))
    with plain.context, drafting.context:
        text = plain.ask(extra=40).tokens.tolist()
        assert [len(drafting.ask(extra=extra).tokens) for extra in (0, 1, 2, 3, 7)] == [1, 2, 3, 4, 8]
        for drafting.end in set(text[4:16]):
            drafting.ids = drafting.prompt
            assert drafting.ask(extra=31).tokens.tolist() == text[: text.index(drafting.end) + 1]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 6}])
def test_a_served_verifier_writes_as_before(load: tuple[Path, LoadSpec], options: dict[str, Any], always: None) -> None:
    found = []
    for spec in (load[1], LoadSpec()):
        with (
            Model.load(load[0], spec) as served,
            VerifierServer(served, Address("127.0.0.1", 0), context=256, sessions=2, threads=1) as server,
            LLM.open(None, str(server.address), tokenizer=load[0], threads=1, history=False) as llm,
        ):
            reply = llm.reply(QUESTION, max_tokens=40, retrieval="off", **options)
            found.append(([token.id for token in reply], reply.summary.rounds, server.counters.batches))
    (ids, rounds, batches), plain = found
    assert (ids, rounds) == plain[:2]  # as many round trips
    assert batches < plain[2]  # and fewer passes


class Sure:
    """A speculator that is sure of the same token, always."""

    def predict(self, *_given: object) -> Any:
        return np.array([0.0, 50.0], dtype=np.float32)

    follow = predict


def tried(right: bool, rounds: int) -> list[int]:
    """Return the lengths of drafts, each of which takes three times as long as a pass."""
    extra_drafts, text = ExtraDrafts(cast(Speculator, Sure()), lambda _token: False), np.array([1, 1], np.int32)
    lengths = []
    for _ in range(rounds):
        job = Job(VerifyRequest(0, GREEDY, 0, text, Chunk(), 16), text, tokens=[1])
        lengths.append(len(extra_drafts.draft(job)))
        extra_drafts.observe(lengths[-1], lengths[-1] + 1 if right else 1, 4.0 if lengths[-1] else 1.0)
    return lengths


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("right", "lengths"), [(False, [4, 4, 4]), (True, [4, 8, 15])])
def test_a_useless_speculator_is_tried_with_short_drafts(right: bool, lengths: list[int]) -> None:
    assert tried(right, 3) == lengths


def test_drafts_that_take_longer_than_they_save_end() -> None:
    assert sum(length > 0 for length in tried(False, 40)) == 4


ROUNDS = 4000


def test_a_way_that_has_become_faster_is_found() -> None:
    choice, chosen = Bandit(), list[bool]()
    for second in (2.0, 0.2):
        for _ in range(ROUNDS):
            chosen.append(choice.second())
            choice.record(chosen[-1], 1, second if chosen[-1] else 1.0)
    assert chosen[ROUNDS - 500 : ROUNDS].count(True) < 20
    assert chosen[-500:].count(False) < 20
