"""Importance: what later tokens look at, kept row by row while a chunk is drafted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Capture, Context, ContextSpec, Floats, Ids, Model, cut
from edgellm.engine.graph_hooks import Recorder
from edgellm.errors import InvalidOption
from edgellm.spec.drafters.early_exit import EarlyExitDrafter
from edgellm.spec.drafters.importance import ColumnSums, importance
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.rules import NeverGate
from edgellm.spec.loop import generate
from edgellm.spec.state import GenerationLimits, GenerationState
from edgellm.spec.stats import Stats
from edgellm.spec.types import GREEDY, Chunk, Token
from tests.spec.real import case

N_CTX = 768
LAYERS = (1, 4)


def attention(layers: int, heads: int, first: int, queries: int, seed: int = 0) -> Floats:
    """Random rows as a model makes them: each sums to 1 over the positions up to its own."""
    rows = np.random.default_rng(seed).random((layers, heads, queries, first + queries + 3)).astype(np.float32)
    rows *= np.tri(queries, rows.shape[-1], first)
    return rows / rows.sum(axis=-1, keepdims=True)


# --- the arithmetic -------------------------------------------------------------------------------------------------


@given(layers=st.integers(1, 3), heads=st.integers(1, 4), first=st.integers(0, 9), n=st.integers(1, 7))
def test_row_by_row_or_all_at_once_or_by_the_book(layers: int, heads: int, first: int, n: int) -> None:
    rows = attention(layers, heads, first, n - 1)
    book = np.zeros(n)
    for token in range(n - 1):  # the last one has not been fed, so nothing has seen it
        looks = [rows[:, :, query, first + token].mean() for query in range(token, n - 1)]
        book[token] = sum(looks) / len(looks)
    kept = ColumnSums(n + 2, layers)
    for query in range(n - 1):
        kept.add([layer[:, query : query + 1, first : first + n] for layer in rows])
    for got in (kept.importance(n), importance(rows, first, n)):
        assert got.shape == (n,)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, book, atol=1e-6)
        assert got[-1] == 0
    apart = kept.by_layer(n)
    for layer in range(layers):
        np.testing.assert_allclose(apart[layer], importance(rows[layer : layer + 1], first, n), atol=1e-6)


def test_by_hand() -> None:
    rows = np.array([[[[0.5, 0.5, 0, 0], [0.25, 0.25, 0.5, 0]], [[0.75, 0.25, 0, 0], [0.5, 0.5, 0.0, 0]]]], np.float32)
    np.testing.assert_allclose(importance(rows, 1, 3), [(0.375 + 0.375) / 2, 0.25, 0])
    np.testing.assert_allclose(importance(rows, 1, 3, own=False), [0.375, 0, 0])
    np.testing.assert_allclose(importance(rows[:, :1], 1, 3), [(0.5 + 0.25) / 2, 0.5, 0])  # one head
    np.testing.assert_allclose(importance(rows[..., :2], 1, 3), [0.375, 0, 0])  # keys may end anywhere


# --- on the draft model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[0]) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[Ids]:
    return [model.chat_prompt(case(number)) for number in range(6)]


def watching(model: Model, layers: tuple[int, ...] = LAYERS, n_seq: int = 1) -> Context:
    return Context(model, ContextSpec(n_ctx=N_CTX, n_seq=n_seq, threads=1), capture=Capture(attention=layers))


def whole_rows(model: Model, prefix: Ids, chunk: Chunk) -> Floats:
    """Attention of all drafted tokens but the last, decoded at once behind their prefix by a context of its own."""
    with watching(model) as context:
        assert context.captured is not None
        context.decode(prefix)
        if len(chunk) > 1:
            context.decode(chunk.ids[:-1])
        return np.stack([context.captured.attention(layer) for layer in LAYERS])


def test_it_is_the_attention_of_the_drafted_tokens_whatever_was_rolled_back(model: Model, prompts: list[Ids]) -> None:
    drafter = ModelDrafter(model, watching(model), LAYERS)
    plain = ModelDrafter(model, Context(model, ContextSpec(n_ctx=N_CTX, threads=1)))
    rng = np.random.default_rng(0)
    for prompt in prompts:
        prefix = prompt
        for gamma in (4, 1, 6, 3, 4):
            chunk, expected = (
                drafter.propose(GenerationState(prefix), gamma),
                plain.propose(GenerationState(prefix), gamma),
            )
            # with flash attention switched off by the capture, float32 stays float32
            assert chunk.ids.tolist() == expected.ids.tolist()
            np.testing.assert_allclose(chunk.confidence, expected.confidence, atol=1e-4)
            assert len(expected.importance) == 0
            if len(chunk) == 1:
                assert chunk.importance.tolist() == [0]
            else:
                rows = whole_rows(model, prefix, chunk)
                np.testing.assert_allclose(chunk.importance, importance(rows, len(prefix), len(chunk)), atol=1e-5)
                assert (chunk.importance[:-1] > 0).all()
                assert chunk.importance[-1] == 0
            kept = chunk.ids[: rng.integers(0, len(chunk) + 1)]
            prefix = np.concatenate((prefix, kept, rng.integers(2, model.n_vocab, 1))).astype(np.int32)
    drafter.close()
    plain.close()


@pytest.mark.parametrize("unified", [True, False])
def test_other_sequences_in_the_context_do_not_matter(model: Model, prompts: list[Ids], unified: bool) -> None:
    capture = Capture(attention=LAYERS)
    context = Context(model, ContextSpec(n_ctx=N_CTX, n_seq=3, threads=1, unified=unified), capture=capture)
    drafter = ModelDrafter(model, context, LAYERS)
    alone = ModelDrafter(model, watching(model), LAYERS)
    rng = np.random.default_rng(0)
    context.decode(prompts[2][:20], seq=2)  # in the first cells
    prefix, moved = prompts[1], False
    for turn in range(6):
        chunk, expected = drafter.propose(GenerationState(prefix), 5), alone.propose(GenerationState(prefix), 5)
        np.testing.assert_allclose(chunk.importance, expected.importance, atol=1e-5)
        moved |= any(cell != len(prefix) + i for i, cell in enumerate(drafter._meter._cells))
        if unified:  # a branch goes on behind the prompt, and takes cells there
            context.branch(0, 1)
            context.rollback(len(prefix), 1)
            context.decode(rng.integers(2, model.n_vocab, 3).astype(np.int32), seq=1)
        context.rollback(max(0, 19 - turn), 2)
        context.decode(prompts[2][:3], seq=2)
        prefix = np.concatenate((prefix, chunk.ids[: turn % 4], [7])).astype(np.int32)
        if unified and turn == 3:  # and is taken over
            context.branch(1, 0)
            prefix = context.cached(0).copy()
            prefix = np.append(prefix, np.int32(9))
    assert moved == unified
    drafter.close()
    alone.close()


def test_nothing_is_read_before_the_chunk_and_little_in_it(
    model: Model, prompts: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, shapes = Recorder._read, []

    def noted(self: Recorder, address: int, name: bytes) -> Floats:
        shapes.append(read(self, address, name).shape)
        return read(self, address, name)

    monkeypatch.setattr(Recorder, "_read", noted)
    drafter = ModelDrafter(model, watching(model), LAYERS)
    for _ in range(2):
        shapes.clear()
        drafter.propose(GenerationState(prompts[0]), 4)
        heads = int(model.metadata["llama.attention.head_count"])
        assert shapes == [(heads, 1, 4)] * (3 * len(LAYERS))
    drafter.close()
    idle = ModelDrafter(model, watching(model))  # captured, and not asked for
    shapes.clear()
    assert len(idle.propose(GenerationState(prompts[0]), 4).importance) == 0
    assert shapes == []
    idle.close()


def test_a_drafter_that_exits_measures_in_its_lower_layers(
    model: Model, prompts: list[Ids], f32_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    cut(f32_pair[0], tmp_path / "lower.gguf", 0, 5, head=True)
    cut(f32_pair[0], tmp_path / "upper.gguf", 6, model.n_layer - 1, head=True)
    with Model.load(tmp_path / "lower.gguf") as lower, Model.load(tmp_path / "upper.gguf") as upper:
        drafter = EarlyExitDrafter.open(lower, upper, n_ctx=N_CTX, threads=1, threshold=0.5, layers=LAYERS)
        exits = 0
        for prompt in prompts:
            chunk = drafter.propose(GenerationState(prompt), 5)
            rows = whole_rows(model, prompt, chunk)
            exits += sum(layer is not None for layer in chunk.exit_layers or ())
            np.testing.assert_allclose(chunk.importance, importance(rows, len(prompt), len(chunk)), atol=1e-4)
        assert exits > 0
        drafter.close()


def test_it_travels_with_the_token(model: Model, prompts: list[Ids]) -> None:
    drafter = ModelDrafter(model, watching(model), LAYERS)
    events = generate(
        GenerationState(prompts[1], GREEDY, GenerationLimits(4, N_CTX)),
        vocabulary=model,
        drafter=drafter,
        gate=NeverGate(),
        verifier=None,
        stats=Stats(),
    )
    written = [event for event in events if isinstance(event, Token)]
    chunk = drafter.propose(GenerationState(prompts[1]), 4)
    np.testing.assert_allclose([token.importance or 0.0 for token in written], chunk.importance, atol=1e-5)
    assert all(token.importance is not None for token in written)
    drafter.close()


def test_what_cannot_be_measured_is_refused(model: Model) -> None:
    for context in (Context(model, ContextSpec(n_ctx=32)), watching(model, (1,))):
        with pytest.raises(InvalidOption, match="does not capture the attention of layer 4"):
            ModelDrafter(model, context, (4,))
