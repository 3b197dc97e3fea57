"""Ids to decode, and logits to compare with."""

import numpy as np

from edgellm.engine import Context, ContextSpec, Floats, Ids, Model

CLOSE = 1e-4  # of the largest logit
ROUNDED = 0.02  # a cache of 16 bits, and 8-bit products


def ids(*tokens: int) -> Ids:
    return np.array(tokens, dtype=np.int32)


def some_ids(n: int, n_vocab: int = 1_000, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


def difference(a: Floats, b: Floats) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(b).max())


def one_by_one(model: Model, ids: Ids) -> Floats:
    with Context(model, ContextSpec(n_ctx=len(ids), threads=1)) as fresh:
        return np.concatenate([fresh.decode(ids[i : i + 1]).copy() for i in range(len(ids))])
