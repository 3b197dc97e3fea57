"""Importance: what later tokens look at, kept row by row while a chunk is drafted."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Floats, Ids, Model
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk
from tests.spec.real import case

N_CTX = 768
LAYERS = (1, 4)


@pytest.fixture(scope="module")
def model(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[0]) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[Ids]:
    return [model.chat_prompt(case(number)) for number in range(6)]


def watching(model: Model, layers: tuple[int, ...] = LAYERS) -> Context:
    return Context(model, ContextSpec(n_ctx=N_CTX, threads=1), capture=Capture(attention=layers))


def measured(chunk: Chunk) -> list[float]:
    return [one.importance for one in chunk.drafted if one.importance is not None]


def check(chunk: Chunk, by_layer: Floats | None, model: Model, prefix: Ids, atol: float = 1e-5) -> None:
    """Compare with the mean attention to each token from itself and later ones, decoded at once by a context of its
    own. Nothing has seen the last token, which has not been fed."""
    n = len(chunk)
    wanted = np.zeros((len(LAYERS), n))
    with watching(model) as context:
        assert context.captured is not None
        context.decode(prefix)
        if n > 1:
            context.decode(chunk.ids[:-1])
            rows = np.stack([context.captured.attention(layer) for layer in LAYERS]).mean(axis=1)
            for token in range(n - 1):
                wanted[:, token] = rows[:, token:, len(prefix) + token].mean(axis=1)
    *importance, last = measured(chunk)
    np.testing.assert_allclose([*importance, last], wanted.mean(axis=0), atol=atol)
    assert min(importance, default=1.0) > 0.0 == last
    if by_layer is not None:
        np.testing.assert_allclose(by_layer, wanted, atol=atol)


def test_it_is_the_attention_of_the_drafted_tokens_whatever_was_rolled_back(model: Model, prompts: list[Ids]) -> None:
    drafter = ModelDrafter(model, watching(model), LAYERS)
    plain = ModelDrafter(model, Context(model, ContextSpec(n_ctx=N_CTX, threads=1)))
    rng = np.random.default_rng(0)
    for prompt in prompts:
        prefix = prompt
        for gamma in (4, 1, 6, 3, 4):
            chunk, other = (one.propose(GenerationState(prefix), gamma) for one in (drafter, plain))
            # With flash attention switched off by the capture, float32 stays float32.
            assert chunk.ids.tolist() == other.ids.tolist()
            np.testing.assert_allclose(chunk.confidence, other.confidence, atol=1e-4)
            assert other.importance is None
            check(chunk, drafter.importance_by_layer(len(chunk)), model, prefix)
            kept = chunk.ids[: rng.integers(0, len(chunk) + 1)]
            prefix = np.concatenate((prefix, kept, rng.integers(2, model.n_vocab, 1))).astype(np.int32)
    drafter.close()
    plain.close()


@pytest.mark.parametrize("unified", [True, False])
def test_other_sequences_in_the_context_do_not_matter(model: Model, prompts: list[Ids], unified: bool) -> None:
    capture = Capture(attention=LAYERS)
    context = Context(model, ContextSpec(n_ctx=N_CTX, n_seq=3, threads=1, unified=unified), capture=capture)
    drafter, alone = ModelDrafter(model, context, LAYERS), ModelDrafter(model, watching(model), LAYERS)
    rng = np.random.default_rng(0)
    context.decode(prompts[2][:20], seq=2)  # in the first cells
    prefix = prompts[1]
    for turn in range(6):
        chunk, expected = (one.propose(GenerationState(prefix), 5) for one in (drafter, alone))
        np.testing.assert_allclose(measured(chunk), measured(expected), atol=1e-5)
        if unified:  # a branch goes on behind the prompt, and takes cells there
            context.branch(0, 1)
            context.rollback(len(prefix), 1)
            context.decode(rng.integers(2, model.n_vocab, 3).astype(np.int32), seq=1)
        context.rollback(max(0, 19 - turn), 2)
        context.decode(prompts[2][:3], seq=2)
        prefix = np.concatenate((prefix, chunk.ids[: turn % 4], [7])).astype(np.int32)
        if unified and turn == 3:  # and is taken over
            context.branch(1, 0)
            prefix = np.append(context.cached(0), np.int32(9))
    drafter.close()
    alone.close()
