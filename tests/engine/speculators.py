"""Contexts with a speculator, and what it predicts."""

from __future__ import annotations

from typing import Any

from edgellm.engine import Context, ContextSpec, Floats, Ids, Model
from edgellm.engine.speculators.speculator import Speculator


def opened(model: Model, n_ctx: int = 128, **options: Any) -> Context:
    return Context(model, ContextSpec(n_ctx=n_ctx, threads=1, speculates=True, rolls_back=True, **options))


def speculator(context: Context) -> Speculator:
    assert context.speculator is not None
    return context.speculator


def predicted(context: Context, ids: Ids, seq: int = 0) -> Floats:
    row = speculator(context).predict(ids, seq)
    assert row is not None
    return row.copy()
