"""What is decoded after any rollback, branch or copy is what a fresh context decodes, whatever keeps the past."""

import random

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Ids, Model, SeqRows, common_prefix
from testkit.cache_walk import walk
from testkit.gguf.architectures import ARCHITECTURES
from tests.conftest import Architectures
from tests.engine.logits import difference

N_CTX, ROWS = 320, 64
NEAR = 0.01  # of the largest logit; a wrong state is off by more than a twentieth
KINDS = (
    "qwen3", "deepseek2", "gemma3", "gpt-oss", "mimo2", "qwen35", "qwen3next", "lfm2", "granitehybrid", "nemotron_h",
    "falcon-h1", "kimi-linear", "mamba2", "rwkv7",
)  # fmt: skip
"""Plain and latent attention, sliding windows, hybrids with and without snapshots, and recurrent states alone."""
WALKED = ("qwen3", "gpt-oss", "qwen35", "lfm2", "granitehybrid", "mamba2", "deepseek4", "plamo2")
"""Some of them, and the two that llama.cpp copies late or computes wrongly; every night, all are walked."""


def ids(rng: random.Random, n: int) -> Ids:
    return np.array([rng.randrange(300, 2_500) for _ in range(n)], dtype=np.int32)


def off(model: Model, context: Context, logits: np.ndarray) -> float:
    """Return how far the last row of `logits` is from a fresh context's, as a share of the largest logit."""
    with Context(model, ContextSpec(n_ctx=N_CTX, n_batch=ROWS, threads=1)) as fresh:
        return difference(logits[-1], fresh.decode(context.cached())[0])


def test_a_drafter_reads_few_tokens_again(architectures: Architectures) -> None:
    rng = random.Random(5)
    with (
        Model.load(architectures("qwen35"), faults=()) as model,
        Context(model, ContextSpec(n_ctx=N_CTX, n_batch=ROWS, threads=1)) as context,
    ):
        text = ids(rng, 50)
        for _ in range(6):
            feed = text[context.sync(text) :]
            assert len(feed) <= 8 or not context.length()  # since the last checkpoint
            assert off(model, context, context.decode(feed)) < NEAR
            for _ in range(4):
                context.decode(ids(rng, 1))
            text = np.concatenate((text, ids(rng, 3)))  # the draft was rejected


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen35", "lfm2"])
@pytest.mark.parametrize("thoughts", ["kept", "left out", "left out once there is another question"])
def test_a_loop_of_tools_reads_only_what_is_new(architectures: Architectures, name: str, thoughts: str) -> None:
    rng = random.Random(8)
    with (
        Model.load(architectures(name), faults=()) as model,
        Context(model, ContextSpec(n_ctx=6_144, n_batch=ROWS, threads=1, rolls_back=True)) as context,
    ):
        end = np.array([model.end_of_turn], dtype=np.int32)
        begin, think = ids(rng, 2), ids(rng, 2)
        history = np.concatenate((ids(rng, 700), end))
        for question in range(3):
            whole = history = np.concatenate((history, ids(rng, 50), end))
            for turn in range(3):
                text = np.concatenate((whole, begin, think))
                new = len(text) - common_prefix(context.cached(), text[:-1])
                unread = text[context.sync(text) :]
                assert len(unread) <= (1.1 * new if question or turn else len(text))
                row = context.decode(unread)[-1].copy()
                thought, call, result = ids(rng, 340), np.append(ids(rng, 20), end), np.append(ids(rng, 50), end)
                for start in range(0, 360, ROWS):
                    context.decode(np.concatenate((thought, call))[start : min(start + ROWS, 360)])
                kept = np.concatenate((whole, begin, think, thought, call, result))
                history = np.concatenate((history, begin, call, result))
                whole = history if thoughts == "left out" else kept
            history = whole if thoughts == "kept" else history
        with Context(model, ContextSpec(n_ctx=6_144, n_batch=ROWS, threads=1)) as fresh:
            assert difference(row, fresh.decode(text)[-1]) < NEAR


def test_an_interrupted_batch_is_not_trusted(architectures: Architectures) -> None:
    rng = random.Random(6)
    with (
        Model.load(architectures("mamba2"), faults=()) as model,
        Context(model, ContextSpec(n_ctx=N_CTX, n_batch=ROWS, threads=1)) as context,
    ):
        context.decode(ids(rng, 20))
        with pytest.raises(Exception, match="cannot decode"):
            context.decode(np.array([5, 10**6], dtype=np.int32))
        assert context.length() == 20
        assert off(model, context, context.decode(ids(rng, 3))) < NEAR


@pytest.mark.parametrize("name", ["qwen35", "lfm2", "nemotron_h"])
def test_sequences_with_several_numbers_of_rows_go_through_llama_cpp_in_parts(
    architectures: Architectures, name: str
) -> None:
    spec = ContextSpec(n_ctx=N_CTX, n_seq=4, n_batch=ROWS, threads=1, unified=False, rolls_back=True)
    with Model.load(architectures(name), faults=()) as model, Context(model, spec) as context:
        rng = random.Random(4)
        for seq in (2, 0, 1, 3):
            context.decode(ids(rng, 5), seq=seq)
        context.decode_rows([SeqRows(seq, ids(rng, n), outputs=2) for seq, n in enumerate((3, 3, 4, 4))])
        context.rollback(context.length(0) - 1)
        assert off(model, context, context.decode(ids(rng, 1))) < NEAR


@pytest.mark.parametrize(
    "name", [name if name in WALKED else pytest.param(name, marks=pytest.mark.nightly) for name in ARCHITECTURES]
)
def test_a_walk_finds_no_wrong_state(architectures: Architectures, name: str) -> None:
    with Model.load(architectures(name), faults=()) as model:
        found = walk(model, 150)
    assert found.wrong == []
    assert found.rows > 150
    assert set(found.operations) == {"decode", "rollback", "draft", "branch", "copy", "batch", "clear"}
    assert found.operations.total() == 150
