"""Decodes that are filled up to another number of rows: what they say and keep is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Model
from edgellm.errors import ContextFull

WIDTHS = [0, 1, 4, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("outputs", [0, 1, 2])
def test_it_changes_nothing_that_is_seen(f32_pair: tuple[Path, Path], n: int, outputs: int) -> None:
    ids = np.arange(300, 330, dtype=np.int32)
    with (
        Model.load(f32_pair[0]) as model,
        Context(model, ContextSpec(n_ctx=64)) as one,
        Context(model, ContextSpec(n_ctx=64)) as other,
    ):
        one.fill(WIDTHS)
        rows: list[int] = []
        run = one._run

        def noted(total: int, *more: Any) -> None:
            rows.append(total)
            run(total, *more)

        one._run = noted  # type: ignore[method-assign, assignment]
        for at in (0, n, 2 * n):
            given = min(outputs, n)
            filled, plain = (c.decode(ids[at : at + n], outputs=given).copy() for c in (one, other))
            assert filled.shape == plain.shape
            assert np.allclose(filled, plain, atol=1e-4)
        assert one.cached().tolist() == other.cached().tolist()
        assert rows == [WIDTHS[n] if n < len(WIDTHS) else n] * 3
        assert one.decode(ids[:9]).argmax() == other.decode(ids[:9]).argmax()  # nothing is left of the copies


def test_where_there_is_no_room_it_is_not_filled(f32_pair: tuple[Path, Path]) -> None:
    ids = np.arange(300, 310, dtype=np.int32)
    with Model.load(f32_pair[0]) as model, Context(model, ContextSpec(n_ctx=10)) as context:
        context.fill(WIDTHS)
        context.decode(ids[:5])
        context.decode(ids[5:])  # three more would be beyond the end
        assert context.length() == 10
        with pytest.raises(ContextFull):
            context.decode(ids[:1])
    with Model.load(f32_pair[0]) as model, Context(model, ContextSpec(n_ctx=8, n_seq=2, spare=0)) as context:
        context.fill(WIDTHS)
        context.decode(ids[:3])
        context.decode(ids[:3], seq=1)  # there are cells for these, and none for a copy
        assert [context.length(seq) for seq in (0, 1)] == [3, 3]
        assert context.decode(ids[3:5]).shape[0] == 1


def test_a_context_that_shows_its_insides_is_not_filled(f32_pair: tuple[Path, Path]) -> None:
    with Model.load(f32_pair[0]) as model:
        context = Context(model, ContextSpec(n_ctx=16), capture=Capture(attention=(1,)))
        context.fill(WIDTHS)
        context.decode(np.arange(300, 303, dtype=np.int32))
        assert context.captured is not None
        assert context.captured.attention(1).shape[1] == 3
        context.close()
