"""Contexts with a speculator, what it predicts, and changed headers."""

from dataclasses import replace
from typing import Any

from edgellm.engine import Context, ContextSpec, Floats, GgufHeader, Ids, Model
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


def changed(header: GgufHeader, without: str = "", **metadata: object) -> GgufHeader:
    """Return a header with other hyperparameters, `__` for a dot in their names, and without a tensor."""
    more = {f"{header.architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    tensors = tuple(tensor for tensor in header.tensors if tensor.name != without)
    return replace(header, metadata={**header.metadata, **more}, tensors=tensors)
