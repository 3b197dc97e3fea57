"""Parallel inference: what is drafted while a verdict is on its way is what would have been drafted after it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.spec.drafters import verdict_prediction
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.parallel import ParallelDrafter
from edgellm.spec.drafters.verdict_prediction import MAX_AHEAD, alternatives
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance
from edgellm.spec.gates.rules import AlwaysGate, RandomGate
from edgellm.spec.loop import generate
from edgellm.spec.protocols import Gate
from edgellm.spec.state import DraftRules, GenerationLimits, GenerationState
from edgellm.spec.stats import Stats
from edgellm.spec.types import GREEDY, NO_IDS, Ids, Sampling, Source, Token, Verdict
from edgellm.spec.verifier import Session, VerifyRequest
from edgellm.verifier.in_process import ContextPool, LocalVerifier
from models.home.corpus import held_out
from models.home.families import FAMILIES

POSITIONS = 512


class Late(Future[Verdict]):
    """A verdict that is there once the device has looked often enough, or waits for it."""

    def __init__(self, compute: Callable[[], Future[Verdict]], patience: int) -> None:
        super().__init__()
        self._compute, self._patience = compute, patience

    def done(self) -> bool:
        self._patience -= 1
        return self._patience < 0

    def result(self, timeout: float | None = None) -> Verdict:
        return self._compute().result()


class LateSession(Session):
    def wait(self, pending: Future[Verdict]) -> Verdict:
        return pending.result()


class LateVerifier(LocalVerifier):
    patience = 0

    def open(self, state: GenerationState) -> Session:
        inner = super().open(state)

        def send(request: VerifyRequest) -> Future[Verdict]:
            ask = partial(inner.submit, request.prefix.copy(), request.draft, request.extra)
            return Late(ask, self.patience)

        return LateSession(state, send, close=inner.close)


@pytest.fixture(scope="module")
def models(f32_pair: tuple[Path, Path]) -> Iterator[tuple[Model, Model]]:
    with Model.load(f32_pair[0]) as draft, Model.load(f32_pair[1]) as verifier:
        yield draft, verifier


@pytest.fixture(scope="module")
def prompts(models: tuple[Model, Model]) -> list[Ids]:
    cases = [next(held_out(family, 1, seed=5)) for family in FAMILIES]
    return [models[0].chat_prompt([Message(t.role, t.text) for t in case.prompt]) for case in cases]


def write(
    models: tuple[Model, Model], prompt: Ids, gate: Gate, *, branches: int | None, patience: int = 0,
    sampling: Sampling = GREEDY,
) -> tuple[list[Token], ParallelDrafter | None]:  # fmt: skip
    draft, model = models
    context = Context(draft, ContextSpec(n_ctx=POSITIONS, n_seq=1 + (branches or 0), threads=1))
    own = ModelDrafter(draft, context, keeps_logits=bool(branches))
    ahead = ParallelDrafter(own, is_eog=draft.is_eog, rejection=ConfidenceAcceptance().rejection) if branches else None
    verifier = LateVerifier(
        model, ContextPool(lambda: Context(model, ContextSpec(n_ctx=POSITIONS, threads=1))), POSITIONS
    )
    verifier.patience = patience
    events = generate(
        GenerationState(prompt, sampling, GenerationLimits(24, POSITIONS)),
        vocabulary=draft,
        drafter=ahead or own,
        gate=gate,
        verifier=verifier,
        stats=Stats(),
    )
    written = [event for event in events if isinstance(event, Token)]
    (ahead or own).close()
    verifier.close()
    return written, ahead


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=4)], ids=["greedy", "sampling"])
def test_it_changes_nothing(models: tuple[Model, Model], prompts: list[Ids], sampling: Sampling) -> None:
    wanted = [write(models, prompt, AlwaysGate(), branches=None, sampling=sampling)[0] for prompt in prompts[:2]]
    for patience, branches in ((0, 3), (1, 1), (3, 1), (3, 3), (99, 1), (99, 3)):
        hits = 0
        for prompt, plain in zip(prompts, wanted, strict=False):
            found, ahead = write(models, prompt, AlwaysGate(), branches=branches, patience=patience, sampling=sampling)
            assert [token.id for token in found] == [token.id for token in plain], (patience, branches)
            assert ahead is not None
            hits += ahead.guessed.hits
        assert (hits > 0) == (patience > 1), (patience, branches)


def test_drafts_taken_over_are_marked_where_nobody_checks_them(models: tuple[Model, Model], prompts: list[Ids]) -> None:
    gate = RandomGate(0.5, seed=1)
    sources = set()
    for prompt in prompts:
        wanted, _ = write(models, prompt, gate, branches=None)
        found, _ = write(models, prompt, gate, branches=2, patience=99)
        assert [token.id for token in found] == [token.id for token in wanted]
        sources |= {token.source for token in found}
    assert Source.PARALLEL in sources


def hits(models: tuple[Model, Model], prompts: list[Ids], branches: int) -> int:
    found = [write(models, prompt, AlwaysGate(), branches=branches, patience=99)[1] for prompt in prompts]
    return sum(ahead.guessed.hits for ahead in found if ahead is not None)


def test_several_branches_and_tokens_of_the_text_hit_more_often(
    models: tuple[Model, Model], prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_the_text = hits(models, prompts, 4)
    assert by_the_text > hits(models, prompts, 1)
    monkeypatch.setattr(verdict_prediction, "CONTEXT_BOOST", 1.0)
    assert by_the_text > hits(models, prompts, 4)


def test_nor_is_it_where_it_is_to_be_verified_itself(models: tuple[Model, Model], prompts: list[Ids]) -> None:
    """Nothing is drafted between two verdicts then, so that the branch is still one when others are to begin in it."""
    draft, prompt = models[0], prompts[0]
    context = Context(draft, ContextSpec(n_ctx=POSITIONS, n_seq=4, threads=1))
    drafter = ModelDrafter(draft, context, keeps_logits=True)
    chunk = drafter.propose(GenerationState(prompt), 2)
    others = [np.append(prompt, token).astype(np.int32) for token in alternatives(chunk, 2, NO_IDS)[0][0]]
    (_, first), (right, second) = drafter.draft_many(
        GenerationState(prompt), others, 4, lambda: False, whole=np.concatenate((prompt, chunk.ids)), tail=0
    )
    assert len(first) == len(second) == 4
    whole = np.concatenate((right, second.ids[:2]))
    decoded: list[list[int]] = []
    rows = context.decode_rows
    context.decode_rows = lambda asked, **more: decoded.append([len(row.ids) for row in asked]) or rows(asked, **more)  # type: ignore[method-assign, func-returns-value]
    corrected = np.append(right, alternatives(second, 1, NO_IDS)[0][0]).astype(np.int32)
    drafter.draft_many(GenerationState(prompt), [corrected], 1, lambda: False, whole=whole, tail=1)
    assert decoded == [[1, 1], [1]]


def test_what_was_drafted_ahead_is_not_computed_again(models: tuple[Model, Model], prompts: list[Ids]) -> None:
    draft, prompt = models[0], prompts[0]
    context = Context(draft, ContextSpec(n_ctx=POSITIONS, n_seq=3, threads=1))
    drafter = ModelDrafter(draft, context, keeps_logits=True)
    chunk = drafter.propose(GenerationState(prompt), 4)
    behind = np.concatenate((prompt, chunk.ids))
    other = np.append(prompt, alternatives(chunk, 1, NO_IDS)[0][0]).astype(np.int32)
    many = drafter.draft_many(GenerationState(prompt), [other], 2, lambda: False, whole=behind, tail=1)
    assert np.array_equal(many[0][0], other)
    assert np.array_equal(many[1][0][:-1], behind)
    decoded: list[int] = []
    whole = context.decode
    context.decode = lambda ids, **more: decoded.append(len(ids)) or whole(ids, **more)  # type: ignore[method-assign, func-returns-value]
    rest = drafter.propose(GenerationState(np.concatenate((many[1][0], many[1][1].ids))), 1)
    assert decoded == [1]
    fresh = ModelDrafter(draft, Context(draft, ContextSpec(n_ctx=POSITIONS, threads=1)))
    assert int(many[1][0][-1]) == int(
        fresh.propose(GenerationState(behind), 1).ids[0]
    )  # the likeliest token behind the chunk
    for prefix, drafted in many:
        assert fresh.propose(GenerationState(prefix), 2).ids.tolist() == drafted.ids.tolist()
    assert fresh.propose(GenerationState(many[1][0]), 3).ids.tolist() == [*many[1][1].ids.tolist(), *rest.ids.tolist()]
    fresh.close()
    drafter.close()


def test_a_stop_is_heard_before_the_next_token(models: tuple[Model, Model], prompts: list[Ids]) -> None:
    draft, asked = models[0], itertools.count()
    drafter = ModelDrafter(draft, Context(draft, ContextSpec(n_ctx=POSITIONS, n_seq=2, threads=1)))
    drafter.propose(GenerationState(prompts[0]), 1)
    ((_, chunk),) = drafter.draft_many(
        GenerationState(prompts[0]),
        [np.append(prompts[0], 9).astype(np.int32)],
        400,
        lambda: next(asked) == 3,
        whole=prompts[0],
        tail=0,
    )
    assert len(chunk) == 3
    assert not any(draft.is_eog(int(token)) for token in chunk.ids)
    drafter.close()


def test_nothing_is_drafted_ahead_beyond_the_context(models: tuple[Model, Model], prompts: list[Ids]) -> None:
    draft, prompt = models[0], prompts[0]
    for left in (0, 1, 3):
        context = Context(draft, ContextSpec(n_ctx=len(prompt) + left, n_seq=2, spare=8, threads=1))
        drafter = ModelDrafter(draft, context, keeps_logits=True)
        drafter.propose(GenerationState(prompt), 1)
        ((_, chunk),) = drafter.draft_many(
            GenerationState(prompt), [np.append(prompt, 9).astype(np.int32)], 4, lambda: False, whole=prompt, tail=0
        )
        assert len(chunk) <= left
        drafter.close()


@pytest.mark.parametrize("doubt", [0.0, 0.9])
def test_what_is_drafted_beyond_a_chunk_is_there_for_the_next_one(
    models: tuple[Model, Model], prompts: list[Ids], doubt: float
) -> None:
    """Also behind a token that ends the chunk by its doubt: where it is taken over, the chunk ends there."""
    draft, prompt = models[0], prompts[0]
    own = ModelDrafter(draft, Context(draft, ContextSpec(n_ctx=POSITIONS, n_seq=3, threads=1)), keeps_logits=True)
    fresh = ModelDrafter(draft, Context(draft, ContextSpec(n_ctx=POSITIONS, threads=1)))
    rules = DraftRules(stop_below=doubt)
    ahead = ParallelDrafter(own, is_eog=lambda _token: False, rejection=ConfidenceAcceptance().rejection)
    state = GenerationState(prompt, rules=rules)
    chunk = ahead.propose(state, 2)
    ahead.look_ahead(state, chunk, 2, lambda: False)
    token = fresh.propose(GenerationState(np.concatenate((prompt, chunk.ids))), 1).ids
    text = np.concatenate((prompt, chunk.ids, token))
    taken = 0
    while (next_one := ahead.propose(GenerationState(text, rules=rules), 2)).ahead:
        if draft.is_eog(int(next_one.ids[0])):
            break
        assert next_one.ids.tolist() == fresh.propose(GenerationState(text, rules=rules), 2).ids.tolist()
        text = np.concatenate((text, next_one.ids))
        taken += next_one.ahead
    assert 2 < taken <= MAX_AHEAD
    assert (ahead.guessed.tries, ahead.guessed.hits) == (1, 1)
    ahead.close()
    fresh.close()


def test_what_was_drafted_behind_a_chunk_is_kept_while_that_is_verified(
    models: tuple[Model, Model], prompts: list[Ids]
) -> None:
    draft, prompt = models[0], prompts[0]
    own = ModelDrafter(draft, Context(draft, ContextSpec(n_ctx=POSITIONS, n_seq=4, threads=1)), keeps_logits=True)
    fresh = ModelDrafter(draft, Context(draft, ContextSpec(n_ctx=POSITIONS, threads=1)))
    wanted = fresh.propose(GenerationState(prompt), 12).ids
    ahead = ParallelDrafter(own, is_eog=lambda _token: False, rejection=lambda _confidence: np.array([0.1, 0.9]))
    chunk = ahead.propose(GenerationState(prompt), 1)
    ahead.look_ahead(GenerationState(prompt), chunk, 1, lambda: False)
    text = np.concatenate((prompt, wanted[:2]))
    chunk = ahead.propose(GenerationState(text), 1)
    assert (chunk.ids.tolist(), chunk.ahead) == ([wanted[2]], 1)
    asked = iter((False, False, True))  # at once, before the first decode, and after it
    ahead.look_ahead(GenerationState(text), chunk, 1, lambda: next(asked))
    text = np.append(text, wanted[2:4]).astype(np.int32)
    kept = ahead.propose(GenerationState(text), 6)
    assert kept.ids.tolist() == wanted[4:10].tolist()
    assert kept.ahead == 6
    ahead.close()
    fresh.close()
