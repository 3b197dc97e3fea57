"""Parallel inference: what is drafted while a verdict is on its way is what would have been drafted after it."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgellm.engine import Context, ContextSpec, Model, never
from edgellm.spec.drafters import parallel
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.parallel import ParallelDrafter, alternatives, predict_verdicts
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance, Probabilities
from edgellm.spec.gates.rules import AlwaysGate, Rule, at_random
from edgellm.spec.protocols import DraftRules, Gate, GenerationLimits, GenerationState, Session, VerifyRequest
from edgellm.spec.sampling import top2
from edgellm.spec.stats import Summary
from edgellm.spec.types import GREEDY, NO_IDS, Ids, Sampling, Source, Token, Verdict
from edgellm.verifier.in_process import LocalVerifier
from tests.spec.fakes import Late
from tests.spec.real import prompts as held_out
from tests.spec.running import going, tokens

POSITIONS = 512


def text(*parts: Ids | int | np.integer) -> Ids:
    return np.concatenate([np.atleast_1d(part) for part in parts]).astype(np.int32)


# --- guesses at the verdict -----------------------------------------------------------------------------------------


def test_the_likeliest_verdicts_come_first() -> None:
    def some(ids: list[int], probs: list[float]) -> tuple[np.ndarray, np.ndarray]:
        return np.array(ids, dtype=np.int32), np.array(probs, dtype=np.float32)

    sure = np.array([0.6], dtype=np.float32)
    found = predict_verdicts(
        np.array([0.3, 0.7]), sure, [some([5, 6], [0.3, 0.1]), some([8, 9, 3], [0.5, 0.3, 0.2])], limit=3
    )
    assert [(guess.accepted, guess.token) for guess in found] == [(1, 8), (0, 5), (1, 9)]
    assert [guess.probability for guess in found] == pytest.approx([0.35, 0.225, 0.21])
    rare = predict_verdicts(np.array([1.0, 0.0]), sure, [some([5], [0.1]), some([8], [1.0])], limit=1)
    assert rare[0].probability == pytest.approx(0.25)  # it is one of many that it may be
    assert predict_verdicts(np.array([1.0, 0.0]), sure, [some([], []), some([], [])], limit=2) == []


@given(
    logits=arrays(np.float32, 12, elements=st.floats(-9, 9, width=16), unique=True),
    known=st.sets(st.integers(0, 11)),
    limit=st.integers(0, 14),
)
def test_tokens_of_the_text_are_so_much_likelier(logits: np.ndarray, known: set[int], limit: int) -> None:
    chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    weights = {
        token: (parallel.CONTEXT_BOOST if token in known else 1.0) * float(chances[token]) for token in range(12)
    }
    ids, found = parallel.likely_corrections(logits, top2(logits).p1, limit, np.array(sorted(known), dtype=np.int32))
    assert len(set(ids.tolist())) == len(ids) == len(found) == min(limit, 12)
    assert found == pytest.approx([weights[token] for token in ids.tolist()], rel=1e-4)
    assert found == pytest.approx(sorted(weights.values(), reverse=True)[:limit], rel=1e-4)


# --- on the draft model ---------------------------------------------------------------------------------------------


class LateVerifier(LocalVerifier):
    patience = 0

    def open(self, state: GenerationState) -> Session:
        inner = super().open(state)

        def send(request: VerifyRequest) -> Future[Verdict]:
            prefix = request.prefix.copy()
            return Late(
                lambda found: found.set_result(inner.submit(prefix, request.draft, request.extra).result()),
                self.patience,
            )

        return Session(state, send, close=inner.close)


@pytest.fixture(scope="module")
def models(f32_pair: tuple[Path, Path]) -> Iterator[tuple[Model, Model]]:
    with Model.load(f32_pair[0]) as draft, Model.load(f32_pair[1]) as verifier:
        yield draft, verifier


@pytest.fixture(scope="module")
def prompts(models: tuple[Model, Model]) -> list[Ids]:
    return [models[0].chat_prompt(messages) for messages in held_out(seed=5)]


class Sure(ConfidenceAcceptance):
    """A chunk of one token is nearly always accepted."""

    def rejection(self, confidence: Sequence[float]) -> Probabilities:
        assert len(confidence) == 1
        return np.array([0.1, 0.9])


class Bench:
    """The draft model with branches, and a second one that drafts what it would have drafted."""

    def __init__(self, draft: Model, closing: ExitStack) -> None:
        self.draft, self._closing, self.stats = draft, closing, Summary()
        self.fresh = ModelDrafter(draft, Context(draft, ContextSpec(n_ctx=POSITIONS, threads=1)))
        closing.callback(self.fresh.close)

    def context(self, n_seq: int, n_ctx: int = POSITIONS) -> Context:
        return Context(self.draft, ContextSpec(n_ctx=n_ctx, n_seq=n_seq, spare=8, threads=1))

    def drafter(self, context: Context) -> parallel.BranchingDrafter:
        drafter = parallel.BranchingDrafter(self.draft, context)
        self._closing.callback(drafter.close)
        return drafter

    def ahead(self, branches: int, acceptance: ConfidenceAcceptance) -> ParallelDrafter:
        own = self.drafter(self.context(1 + branches))
        return ParallelDrafter(own, acceptance, self.stats, is_eog=lambda _token: False, branches=branches)


@pytest.fixture
def bench(models: tuple[Model, Model]) -> Iterator[Bench]:
    with ExitStack() as closing:
        yield Bench(models[0], closing)


def write(
    models: tuple[Model, Model], prompt: Ids, gate: Gate, *, branches: int = 0, patience: int = 0,
    sampling: Sampling = GREEDY,
) -> tuple[list[Token], int]:  # fmt: skip
    """Return what is written, and how many verdicts were predicted."""
    draft, model = models
    with ExitStack() as closing:
        context = Context(draft, ContextSpec(n_ctx=POSITIONS, n_seq=1 + branches, threads=1))
        stats, ahead, drafter = Summary(), None, ModelDrafter(draft, context)
        if branches:
            own = parallel.BranchingDrafter(draft, context)
            ahead = ParallelDrafter(own, ConfidenceAcceptance(), stats, is_eog=draft.is_eog, branches=branches)
        closing.callback(context.close)
        verifier = LateVerifier(model, ContextSpec(n_ctx=POSITIONS, threads=1))
        closing.callback(verifier.close)
        verifier.patience = patience
        state = GenerationState(prompt, sampling, GenerationLimits(24, POSITIONS))
        written = tokens(going(state, ahead or drafter, verifier, gate, vocabulary=draft, stats=stats))
        return written, stats.guesses_hit


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=4)], ids=["greedy", "sampling"])
def test_it_changes_nothing(models: tuple[Model, Model], prompts: list[Ids], sampling: Sampling) -> None:
    wanted = [write(models, prompt, AlwaysGate(), sampling=sampling)[0] for prompt in prompts[:2]]
    for patience, branches in ((0, 3), (1, 1), (3, 1), (3, 3), (99, 1), (99, 3)):
        hits = 0
        for prompt, plain in zip(prompts, wanted, strict=False):
            found, hit = write(models, prompt, AlwaysGate(), branches=branches, patience=patience, sampling=sampling)
            assert [token.id for token in found] == [token.id for token in plain], (patience, branches)
            hits += hit
        assert (hits > 0) == (patience > 1), (patience, branches)


def test_drafts_taken_over_are_marked_where_nobody_checks_them(models: tuple[Model, Model], prompts: list[Ids]) -> None:
    gate = Rule(at_random(None, 0.5), seed=1)
    sources = set()
    for prompt in prompts:
        wanted, _ = write(models, prompt, gate)
        found, _ = write(models, prompt, gate, branches=2, patience=99)
        assert [token.id for token in found] == [token.id for token in wanted]
        sources |= {token.source for token in found}
    assert Source.PARALLEL in sources


def test_what_was_drafted_ahead_is_not_computed_again(bench: Bench, prompts: list[Ids]) -> None:
    prompt, context = prompts[0], bench.context(3)
    drafter = bench.drafter(context)
    chunk = drafter.propose(GenerationState(prompt), 4)
    behind = text(prompt, chunk.ids)
    other = text(prompt, alternatives(chunk, 1, NO_IDS)[0][0])
    many = drafter.draft_many(GenerationState(prompt), [other], 2, never, whole=behind, tail=1)
    assert np.array_equal(many[0][0], other)
    assert np.array_equal(many[1][0], text(behind, bench.fresh.propose(GenerationState(behind), 1).ids))
    decoded: list[int] = []
    whole = context.decode
    context.decode = lambda ids, **more: decoded.append(len(ids)) or whole(ids, **more)  # type: ignore[method-assign, func-returns-value]
    rest = drafter.propose(GenerationState(text(many[1][0], many[1][1].ids)), 1)
    assert decoded == [1]
    for prefix, drafted in many:
        assert bench.fresh.propose(GenerationState(prefix), 2).ids.tolist() == drafted.ids.tolist()
    assert bench.fresh.propose(GenerationState(many[1][0]), 3).ids.tolist() == [*many[1][1].ids, *rest.ids]


def test_nor_is_it_where_it_is_to_be_verified_itself(bench: Bench, prompts: list[Ids]) -> None:
    """Nothing is drafted between two verdicts then, so that the branch is still one when others are to begin in it."""
    prompt, context = prompts[0], bench.context(4)
    drafter, state = bench.drafter(context), GenerationState(prompts[0])
    chunk = drafter.propose(state, 2)
    others = [text(prompt, token) for token in alternatives(chunk, 2, NO_IDS)[0][0]]
    (_, first), (right, second) = drafter.draft_many(state, others, 4, never, whole=text(prompt, chunk.ids), tail=0)
    assert len(first) == len(second) == 4
    decoded: list[list[int]] = []
    rows = context.decode_rows
    context.decode_rows = lambda asked, **more: decoded.append([len(row.ids) for row in asked]) or rows(asked, **more)  # type: ignore[method-assign, func-returns-value]
    corrected = text(right, alternatives(second, 1, NO_IDS)[0][0])
    drafter.draft_many(state, [corrected], 1, never, whole=text(right, second.ids[:2]), tail=1)
    assert decoded == [[1, 1], [1]]


def test_a_stop_is_heard_before_the_next_token(bench: Bench, prompts: list[Ids]) -> None:
    asked, drafter, state = itertools.count(), bench.drafter(bench.context(2)), GenerationState(prompts[0])
    drafter.propose(state, 1)
    found = drafter.draft_many(state, [text(prompts[0], 9)], 400, lambda: next(asked) == 3, whole=prompts[0], tail=0)
    assert [len(chunk) for _, chunk in found] == [3]


@pytest.mark.parametrize("left", [0, 1, 3])
def test_nothing_is_drafted_ahead_beyond_the_context(bench: Bench, prompts: list[Ids], left: int) -> None:
    prompt = prompts[0]
    drafter = bench.drafter(bench.context(2, len(prompt) + left))
    drafter.propose(GenerationState(prompt), 1)
    found = drafter.draft_many(GenerationState(prompt), [text(prompt, 9)], 4, never, whole=prompt, tail=0)
    assert all(len(chunk) <= left for _, chunk in found)


@pytest.mark.parametrize("doubt", [0.0, 0.9])
def test_what_is_drafted_beyond_a_chunk_is_there_for_the_next(bench: Bench, prompts: list[Ids], doubt: float) -> None:
    """Also behind a token that ends the chunk by its doubt: where it is taken over, the chunk ends there."""
    prompt, rules = prompts[0], DraftRules(stop_below=doubt)
    ahead = bench.ahead(2, ConfidenceAcceptance())
    chunk = ahead.propose(GenerationState(prompt, rules=rules), 2)
    ahead.look_ahead(GenerationState(prompt, rules=rules), chunk, 2, never)
    behind = text(prompt, chunk.ids)
    behind, taken = text(behind, bench.fresh.propose(GenerationState(behind), 1).ids), 0
    while (following := ahead.propose(GenerationState(behind, rules=rules), 2)).ahead:
        if bench.draft.is_eog(int(following.ids[0])):
            break
        wanted = bench.fresh.propose(GenerationState(behind, rules=rules), 2)
        assert following.ids.tolist() == wanted.ids.tolist()
        behind, taken = text(behind, following.ids), taken + following.ahead
    assert 2 < taken <= parallel.MAX_AHEAD
    assert (bench.stats.guesses_tried, bench.stats.guesses_hit) == (1, 1)


def test_what_was_drafted_behind_a_chunk_is_kept_while_that_is_verified(bench: Bench, prompts: list[Ids]) -> None:
    prompt = prompts[0]
    wanted = bench.fresh.propose(GenerationState(prompt), 12).ids
    ahead = bench.ahead(3, Sure())
    chunk = ahead.propose(GenerationState(prompt), 1)
    ahead.look_ahead(GenerationState(prompt), chunk, 1, never)
    behind = text(prompt, wanted[:2])
    chunk = ahead.propose(GenerationState(behind), 1)
    assert (chunk.ids.tolist(), chunk.ahead) == ([wanted[2]], 1)
    asked = iter((False, False, True))  # at once, before the first decode, and after it
    ahead.look_ahead(GenerationState(behind), chunk, 1, lambda: next(asked))
    kept = ahead.propose(GenerationState(text(behind, wanted[2:4])), 6)
    assert kept.ids.tolist() == wanted[4:10].tolist()
    assert kept.ahead == 6
