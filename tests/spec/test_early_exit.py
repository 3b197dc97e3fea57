"""Layer-wise early exit: what leaves early, and that what does not is what the uncut model says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.engine import Capture, Context, ContextSpec, Floats, Ids, Model
from edgellm.errors import InvalidOption
from edgellm.spec.drafters.early_exit import EarlyExitDrafter
from edgellm.spec.gates.rules import AlwaysGate, NeverGate
from edgellm.spec.loop import generate
from edgellm.spec.ngram.sources import ContextLookup
from edgellm.spec.protocols import Drafter, Gate
from edgellm.spec.state import DraftRules, GenerationLimits, GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import GREEDY, Chunk, Sampling, Source, Token
from edgellm.verifier.in_process import ContextPool, LocalVerifier
from tests.spec.exits import CLOSE, EXIT, N_CTX, Counted, Parts, check_same, counted, shards, verdicts
from tests.spec.real import case

WARM = Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def parts(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    made = Parts(f32_pair[0], tmp_path_factory.mktemp("shards"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts(parts: Parts) -> list[Ids]:
    """Held-out prompts of the little world."""
    return [parts.whole.chat_prompt(case(number)) for number in range(12)]


# --- exactness ------------------------------------------------------------------------------------------------------


def test_with_a_threshold_of_1_it_is_the_uncut_model(parts: Parts, prompts: list[Ids]) -> None:
    cut_in_two, whole = parts.drafter(1.0), parts.plain()
    for number, prompt in enumerate(prompts):  # on one cache, so each prompt rolls the one before back
        for prefix, chunk in verdicts(cut_in_two, prompt, 6, number, parts.whole.n_vocab):
            expected = whole.propose(GenerationState(prefix), len(chunk))
            assert chunk.exit_layers == (None,) * len(chunk)
            assert expected.exit_layers is None
            assert chunk.ids.tolist() == expected.ids.tolist()
            np.testing.assert_allclose(chunk.margin, expected.margin, atol=CLOSE)
    cut_in_two.close()
    whole.close()


def test_it_asks_the_context_as_the_uncut_model_does(parts: Parts, prompts: list[Ids]) -> None:
    cut_in_two, whole, copied = parts.drafter(1.0), parts.plain(), 0
    for prompt in prompts:
        rules = DraftRules(lookup_below=0.95)
        state = GenerationState(prompt, rules=replace(rules, context=ContextLookup(prompt)))
        other = GenerationState(prompt, rules=replace(rules, context=ContextLookup(prompt)))
        ours, theirs = cut_in_two.propose(state, 24), whole.propose(other, 24)
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.context_match is not None
        assert theirs.context_match is not None
        assert ours.context_match.copied.tolist() == theirs.context_match.copied.tolist()
        copied += int(ours.context_match.copied.sum())
    assert copied > 0
    cut_in_two.close()
    whole.close()


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_full_depth_logits_are_the_uncut_models_after_any_exits(
    parts: Parts, prompts: list[Ids], threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = parts.drafter(threshold)
    deep: list[tuple[Ids, Floats]] = []
    deepen = EarlyExitDrafter._run_upper

    def noted(self: EarlyExitDrafter, outputs: int) -> Floats:
        logits = deepen(self, outputs)
        if outputs:
            deep.append((self._lower.cached().copy(), logits[0].copy()))
        return logits

    monkeypatch.setattr(EarlyExitDrafter, "_run_upper", noted)
    exits: list[int | None] = []
    for number, prompt in enumerate(prompts):
        for _, chunk in verdicts(drafter, prompt, 5, number, parts.whole.n_vocab):
            exits += chunk.exit_layers or ()
    monkeypatch.undo()
    assert len(deep) == exits.count(None) > 0
    assert exits.count(EXIT) > 40
    for ids, logits in deep:
        expected = parts.logits(parts.whole, ids)
        assert np.abs(logits - expected).max() < CLOSE * np.abs(expected).max()
    drafter.close()


operations = st.one_of(
    st.tuples(st.just("verdict"), st.integers(0, 6), st.integers(2, 2000)),  # accepted tokens, then another
    st.tuples(st.just("back"), st.integers(1, 90), st.just(0)),  # an earlier text again
    st.tuples(st.just("other"), st.integers(0, 11), st.integers(1, 60)),  # the beginning of another prompt
)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(operations, st.integers(1, 5)), min_size=1, max_size=7),
    threshold=st.sampled_from([0.3, 0.7, 0.95]),
    start=st.integers(1, 75),
)
def test_whatever_prefixes_come_it_drafts_as_if_nothing_were_cached(
    parts: Parts, prompts: list[Ids], sampling: Sampling, steps: Sequence[tuple[tuple[str, int, int], int]],
    threshold: float, start: int,
) -> None:  # fmt: skip
    drafter = parts.drafter(threshold)
    prefix, chunk = prompts[0][:start], Chunk()
    for (kind, a, b), gamma in steps:
        if kind == "verdict":
            prefix = np.concatenate((prefix, chunk.ids[:a], np.array([b]))).astype(np.int32)
        elif kind == "back":
            prefix = prefix[: max(1, len(prefix) - a)]
        else:
            prefix = prompts[a][:b]
        chunk = drafter.propose(GenerationState(prefix, sampling), gamma)
        check_same(chunk, parts.naive(prefix, gamma, sampling, threshold))
        assert drafter._upper.length() <= drafter._lower.length() == len(prefix) + len(chunk) - 1
    drafter.close()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 36, 37, 70])
def test_prompts_of_every_length(parts: Parts, prompts: list[Ids], length: int) -> None:
    drafter = parts.drafter(0.7)
    prefix = np.concatenate(prompts)[:length]
    check_same(drafter.propose(GenerationState(prefix), 3), parts.naive(prefix, 3, GREEDY, 0.7))
    drafter.close()


# --- economy --------------------------------------------------------------------------------------------------------


def test_rows_wait_and_then_go_through_the_deeper_layers_in_one_batch(parts: Parts, prompts: list[Ids]) -> None:
    drafter, lower, upper = counted(parts, 0.0)
    n = len(prompts[1])
    chunk = drafter.propose(GenerationState(prompts[1]), 6)
    assert chunk.exit_layers == (EXIT,) * 6
    assert (sum(lower.calls), lower.calls[-5:]) == (n + 5, [1] * 5)
    assert upper.calls == [n - 4]  # the prompt, but for the few rows that were read with the head
    drafter._threshold = 1.0
    prefix = np.concatenate((prompts[1], chunk.ids[:5], [7])).astype(np.int32)
    deep = drafter.propose(GenerationState(prefix), 3)
    assert deep.exit_layers == (None,) * 3
    assert lower.calls[-3:] == [1, 1, 1]  # the correction and two drafted tokens; nothing a second time
    assert upper.calls[1:] == [4 + 5 + 1, 1, 1]  # all that had waited with the correction; nothing a second time
    drafter.close()


def test_rows_of_rejected_tokens_are_forgotten(parts: Parts, prompts: list[Ids]) -> None:
    drafter, lower, upper = counted(parts, 0.0)
    drafter.propose(GenerationState(prompts[1]), 6)
    drafter._threshold = 1.0
    upper.calls.clear()
    drafter.propose(GenerationState(np.append(prompts[1], 7).astype(np.int32)), 1)
    assert upper.calls == [4 + 1]
    assert lower.length() == upper.length() == len(prompts[1]) + 1
    drafter.close()


def test_in_a_prefill_the_head_stays_out(parts: Parts, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, lower, _ = counted(parts, 0.7)
    assert lower.captured is not None
    stops: list[tuple[bool, int]] = []
    decode = Counted.decode

    def noted(self: Counted, ids: Ids, *, seq: int = 0, outputs: int = 1) -> Floats:
        assert self.captured is not None
        stops.append((self.captured.stops, len(ids)))
        return decode(self, ids, seq=seq, outputs=outputs)

    monkeypatch.setattr(Counted, "decode", noted)
    prompt = np.concatenate(prompts)[:100]
    drafter.propose(GenerationState(prompt), 2)
    assert stops == [(True, 32), (True, 32), (True, 32), (False, 4), (False, 1)]
    drafter.close()


# --- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["_lower", "_upper"])
@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupted_decode_leaves_nothing_behind(
    parts: Parts, prompts: list[Ids], where: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = parts.drafter(0.7)
    drafter.propose(GenerationState(prompts[2]), 4)
    context = getattr(drafter, where)
    name = "decode" if where == "_lower" else "decode_embeddings"
    call, calls = getattr(context, name), [0]

    def interrupted(*args: object, **kwargs: object) -> Floats:
        calls[0] += 1
        result: Floats = call(*args, **kwargs)
        if calls[0] == at:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(context, name, interrupted)
    drafter._threshold = 1.0
    with pytest.raises(KeyboardInterrupt):
        drafter.propose(GenerationState(prompts[3]), 5)
    monkeypatch.undo()
    assert drafter._lower.length() == drafter._upper.length() == 0
    drafter._threshold = 0.7
    check_same(drafter.propose(GenerationState(prompts[3]), 4), parts.naive(prompts[3], 4, GREEDY, 0.7))
    drafter.close()


def written(
    parts: Parts, drafter: Drafter | None, gate: Gate, verifier: LocalVerifier | None, prompt: Ids
) -> list[Token]:
    events = generate(
        GenerationState(prompt, GREEDY, GenerationLimits(24, N_CTX)),
        vocabulary=parts.whole,
        drafter=drafter,
        gate=gate,
        verifier=verifier,
        stats=Summary(),
    )
    return [event for event in events if isinstance(event, Token)]


def test_the_layer_travels_with_the_token_and_verification_stays_lossless(
    parts: Parts, prompts: list[Ids], f32_pair: tuple[Path, Path]
) -> None:
    drafter = parts.drafter(0.5)
    with Model.load(f32_pair[1]) as big:
        verifier = LocalVerifier(big, ContextPool(partial(Context, big, ContextSpec(N_CTX, threads=1))), N_CTX)
        seen: list[tuple[Source, int | None]] = []
        for prompt in prompts[:6]:
            alone = [token.id for token in written(parts, None, AlwaysGate(), verifier, prompt)]
            checked = written(parts, drafter, AlwaysGate(), verifier, prompt)
            assert [token.id for token in checked] == alone
            kept = written(parts, drafter, NeverGate(), None, prompt)
            seen += [(token.source, token.exit_layer) for token in (*checked, *kept)]
        verifier.close()
    assert {layer for _, layer in seen} == {EXIT, None}
    assert {source for source, layer in seen if layer is not None} == {Source.ACCEPTED, Source.DRAFT}
    drafter.close()


def test_quantised_shards(draft_path: Path, prompts: list[Ids], tmp_path: Path) -> None:
    lower, upper = shards(draft_path, tmp_path)
    with lower, upper:
        drafter = EarlyExitDrafter.open(lower, upper, n_ctx=N_CTX, threads=1)
        chunk = drafter.propose(GenerationState(prompts[1]), 4)
        assert len(chunk) == len(chunk.exit_layers or ()) == 4
        drafter.close()


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_must_be_a_share(parts: Parts, threshold: float) -> None:
    with pytest.raises(InvalidOption, match=r"exit threshold .* is not in"):
        parts.drafter(threshold)


def test_contexts_must_fit_together(parts: Parts) -> None:
    lower = Context(parts.lower, ContextSpec(n_ctx=64), capture=Capture(outputs=(EXIT,), stop_after=EXIT))
    for upper in (Context(parts.upper, ContextSpec(n_ctx=32)), Context(parts.lower, ContextSpec(n_ctx=32))):
        with pytest.raises(InvalidOption, match=r"do not fit together.* 64 and 32 positions"):
            EarlyExitDrafter(lower, upper)
    for capture in (None, Capture(outputs=(EXIT,)), Capture(outputs=(2,), stop_after=EXIT)):
        with pytest.raises(InvalidOption, match="does not capture the output of its last layer"):
            EarlyExitDrafter(
                Context(parts.lower, ContextSpec(n_ctx=64), capture=capture),
                Context(parts.upper, ContextSpec(n_ctx=64)),
            )
