"""What is decoded after any rollback, branch or copy is what a fresh context decodes, whatever keeps the past."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Ids, Model, SeqRows
from edgellm.engine.kv import kv_cache
from edgellm.engine.kv.kv_cache import KVCache
from tests.conftest import Architectures
from tests.engine.cache_faults import trusting

N_CTX, ROWS = 320, 64
NEAR = 0.01  # of the largest logit; a wrong state is off by more than a twentieth
KINDS = (
    "qwen3", "deepseek2", "gemma3", "gpt-oss", "mimo2", "qwen35", "qwen3next", "lfm2", "granitehybrid", "nemotron_h",
    "falcon-h1", "kimi-linear", "mamba2", "rwkv7",
)  # fmt: skip
"""Plain and latent attention, sliding windows, hybrids with and without snapshots, and recurrent states alone."""


def ids(rng: random.Random, n: int) -> Ids:
    return np.array([rng.randrange(300, 2_500) for _ in range(n)], dtype=np.int32)


def off(model: Model, context: Context, logits: np.ndarray, seq: int = 0) -> float:
    """Return how far the last row of `logits` is from a fresh context's, as a share of the largest logit."""
    with Context(model, ContextSpec(n_ctx=N_CTX, n_batch=ROWS, threads=1)) as fresh:
        expected = fresh.decode(context.cached(seq))[0]
        return float(np.abs(logits[-1] - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("n_seq", "rolls_back"), [(1, False), (1, True), (3, False)])
def test_any_rollback_and_branch_leaves_what_a_fresh_context_has(
    architectures: Architectures, name: str, n_seq: int, rolls_back: bool
) -> None:
    rng = random.Random(f"{name} {n_seq} {rolls_back}")
    with (
        Model.load(architectures(name), faults=()) as model,
        Context(
            model, ContextSpec(n_ctx=N_CTX, n_seq=n_seq, n_batch=ROWS, threads=1, rolls_back=rolls_back)
        ) as context,
    ):
        for _ in range(16):
            seq = rng.randrange(n_seq)
            length = context.length(seq)
            action = rng.choice(("decode", "one", "rollback", "sync", "branch", "clear"))
            if action == "branch" and n_seq > 1:
                context.branch(seq, rng.randrange(n_seq))
            elif length > N_CTX - 100 or action == "clear":
                context.clear(seq)
            elif action == "rollback":
                context.rollback(rng.choice((rng.randrange(length + 1), max(0, length - rng.randrange(1, 9)))), seq)
            elif action == "sync":
                text = np.concatenate((context.cached(seq)[: max(0, length - rng.randrange(9))], ids(rng, 6)))
                feed = text[context.sync(text, seq) :]
                assert off(model, context, context.decode(feed, seq=seq), seq) < NEAR
            else:
                feed = ids(rng, 1 if action == "one" else rng.randrange(2, 90))
                logits = context.decode(feed, seq=seq, outputs=min(len(feed), 5))
                assert off(model, context, logits, seq) < NEAR


def start_of_a_batch(context: Context, rng: random.Random) -> None:
    context.decode(ids(rng, 40))
    context.decode(ids(rng, 5), outputs=5)
    context.rollback(40)


def single_tokens(context: Context, rng: random.Random) -> None:
    context.decode(ids(rng, 40))
    for _ in range(4):
        context.decode(ids(rng, 1))
    context.rollback(42)


def beyond_a_window(context: Context, rng: random.Random) -> None:
    for _ in range(4):
        context.decode(ids(rng, 60))
    for _ in range(60):
        context.decode(ids(rng, 1))
    context.rollback(30)


@pytest.mark.parametrize(
    ("name", "trap"),
    [("lfm2", start_of_a_batch), ("lfm2", single_tokens), ("nemotron_h", single_tokens), ("gpt-oss", beyond_a_window)],
)
def test_a_rollback_that_llama_cpp_accepts_and_gets_wrong_is_noticed(
    architectures: Architectures,
    name: str,
    trap: Callable[[Context, random.Random], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for guarded in (True, False):
        if not guarded:
            monkeypatch.setattr(KVCache, "_cut", trusting)
        with (
            Model.load(architectures(name), faults=()) as model,
            Context(model, ContextSpec(n_ctx=N_CTX, n_batch=ROWS, threads=1, rolls_back=True)) as context,
        ):
            rng = random.Random(3)
            trap(context, rng)
            found.append(off(model, context, context.decode(ids(rng, 2))))
    guarded_off, trusted_off = found
    assert guarded_off < NEAR < trusted_off


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
@pytest.mark.parametrize("guarded", [True, False])
def test_a_state_that_makes_room_for_others_loses_its_snapshots(
    architectures: Architectures, name: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guarded:
        monkeypatch.setattr(KVCache, "begin_shared_batch", lambda _self, _seqs: None)
    rng = random.Random(3)
    with served(architectures, name, 3) as (model, context):
        for seq in (0, 2, 1):  # the order of their states
            context.decode(ids(rng, 5), seq=seq)
        context.decode_rows([SeqRows(0, ids(rng, 1)), SeqRows(1, ids(rng, 1))])
        context.rollback(4, seq=2)
        assert (off(model, context, context.decode(ids(rng, 1), seq=2), seq=2) < NEAR) == guarded


@pytest.mark.parametrize("name", ["qwen35", "lfm2", "nemotron_h"])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_batch_that_llama_cpp_divides_is_decoded_one_by_one(
    architectures: Architectures, name: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guarded:
        monkeypatch.setattr(KVCache, "may_share", lambda _self, _rows: True)
    rng = random.Random(4)
    with served(architectures, name, 4) as (model, context):
        for seq in (2, 0, 1, 3):
            context.decode(ids(rng, 5), seq=seq)
        context.decode_rows([SeqRows(seq, ids(rng, n), outputs=2) for seq, n in enumerate((3, 3, 4, 4))])
        context.rollback(context.length(0) - 1)
        assert (off(model, context, context.decode(ids(rng, 1))) < NEAR) == guarded


def test_a_state_that_is_copied_late_is_read_again(
    architectures: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    for guarded in (True, False):
        if not guarded:
            monkeypatch.setattr(kv_cache, "_COPIED_LATE", frozenset())
        with (
            Model.load(architectures("deepseek4"), faults=()) as model,
            Context(model, ContextSpec(n_ctx=N_CTX, n_seq=2, n_batch=ROWS, threads=1)) as context,
        ):
            context.decode(ids(rng, 3))
            context.branch(0, 1)
            context.branch(1, 0)  # clears what the first copy has not copied yet
            assert (off(model, context, context.decode(ids(rng, 1))) < NEAR) == guarded


@contextmanager
def served(architectures: Architectures, name: str, n_seq: int) -> Iterator[tuple[Model, Context]]:
    """Yield a model and a context of a served verifier, with snapshots for each of its slots."""
    with (
        Model.load(architectures(name), faults=()) as model,
        Context(
            model, ContextSpec(n_ctx=N_CTX, n_seq=n_seq, n_batch=ROWS, threads=1, unified=False, rolls_back=True)
        ) as context,
    ):
        assert context._cache.snapshots
        yield model, context
