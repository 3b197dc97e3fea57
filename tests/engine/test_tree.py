"""A token tree in one batch: every branch's logits are those of the branch alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine import Context, Model, Twig
from edgellm.errors import ContextFull, InvalidOption
from tests.engine.logits import CLOSE, difference, some_ids

BEFORE = some_ids(20, seed=1)
twigs = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 99)), max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), twigs, st.data())
def test_every_branch_has_its_own_logits(
    exact_model: Model, n: int, shapes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    ids = some_ids(n, seed=2)
    tree = [Twig(min(at, n), some_ids(length, seed=3 + seed)) for at, length, seed in shapes]
    outputs = data.draw(st.integers(0, n))
    with (
        Context(exact_model, n_ctx=64, n_seq=4, spare=32, threads=1) as context,
        Context(exact_model, n_ctx=64, threads=1) as alone,
    ):
        context.decode(BEFORE)
        own, others = context.decode_tree(ids, tree, outputs=outputs)
        alone.decode(BEFORE)
        wanted = alone.decode(ids, outputs=n)
        assert len(own) == outputs
        assert not outputs or difference(own, wanted[n - outputs :]) < CLOSE
        assert context.cached().tolist() == [*BEFORE, *ids]
        for number, (twig, rows) in enumerate(zip(tree, others, strict=True), 1):
            alone.rollback(len(BEFORE))
            branch = np.concatenate((ids[: twig.at], twig.ids))
            assert difference(rows, alone.decode(branch, outputs=len(twig.ids))) < CLOSE
            assert context.cached(number).tolist() == [*BEFORE, *branch]
        for number, twig in enumerate(tree, 1):  # whichever stands goes on as if it had been alone
            context.branch(number, 0)
            alone.rollback(len(BEFORE))
            alone.decode(np.concatenate((ids[: twig.at], twig.ids)))
            assert difference(context.decode(ids[:1]), alone.decode(ids[:1])) < CLOSE


def test_what_cannot_be_a_tree_is_refused(exact_model: Model) -> None:
    with Context(exact_model, n_ctx=32, n_seq=2, threads=1) as context:
        context.decode(BEFORE)
        for tree in ([Twig(0, BEFORE[:1])], [Twig(3, BEFORE[:1])], [Twig(1, BEFORE[:0])], [Twig(1, BEFORE[:1])] * 2):
            with pytest.raises(InvalidOption):
                context.decode_tree(BEFORE[:2], tree, outputs=1)
        with pytest.raises(ContextFull):
            context.decode_tree(BEFORE[:2], [Twig(1, BEFORE[:12])], outputs=1)
        assert context.cached().tolist() == BEFORE.tolist()
    with Context(exact_model, n_ctx=32, n_seq=2, unified=False, threads=1) as parted, pytest.raises(InvalidOption):
        parted.decode_tree(BEFORE[:2], [Twig(1, BEFORE[:1])], outputs=1)
