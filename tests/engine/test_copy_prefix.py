"""A prefix that one sequence has computed serves another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model, SeqRows
from edgellm.errors import InvalidOption

TEXT = np.arange(10, 90, dtype=np.int32)


@pytest.fixture(scope="module")
def model(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[1]) as loaded:
        yield loaded


@pytest.fixture(params=[False, True], ids=["streams", "unified"])
def context(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    with Context(model, ContextSpec(n_ctx=128, n_seq=4, threads=1, unified=request.param)) as opened:
        yield opened


@pytest.mark.parametrize("length", [0, 1, 50, 79, 80])
def test_what_follows_a_copied_prefix_is_what_follows_a_computed_one(context: Context, length: int) -> None:
    other = np.concatenate((TEXT[:length], TEXT[::-1][:20]))
    wanted = context.decode(other, seq=3)[0].copy()
    context.decode(TEXT, seq=0)
    context.decode(TEXT[::-1][:30], seq=1)  # is overwritten
    context.copy_prefix(0, 1, length)
    assert np.array_equal(context.cached(1), TEXT[:length])
    assert np.array_equal(context.cached(0), TEXT)
    assert np.allclose(context.decode(other[length:], seq=1)[0], wanted, atol=1e-4)


def test_copies_that_wait_for_the_next_decode_do_not_disturb_each_other(context: Context) -> None:
    wanted = context.decode(TEXT, seq=3)[0].copy()
    context.clear(3)
    context.decode(TEXT[:60], seq=0)
    context.copy_prefix(0, 1, 60)
    context.copy_prefix(1, 2, 40)
    context.rollback(20, 0)
    ids = [TEXT[20:], TEXT[60:], TEXT[40:]]
    rows = context.decode_rows([SeqRows(seq, rest, 1) for seq, rest in enumerate(ids)])
    for row in rows:
        assert np.allclose(row[0], wanted, atol=1e-4)


@pytest.mark.parametrize(("src", "dst", "length"), [(0, 1, 81), (0, 1, -1), (4, 1, 0), (0, 4, 0)])
def test_what_cannot_be_copied_is_refused_and_nothing_changes(
    context: Context, src: int, dst: int, length: int
) -> None:
    context.decode(TEXT, seq=0)
    context.decode(TEXT[:5], seq=1)
    with pytest.raises(InvalidOption):
        context.copy_prefix(src, dst, length)
    assert (context.length(0), context.length(1)) == (80, 5)
