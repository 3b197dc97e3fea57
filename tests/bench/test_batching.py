"""Draft lengths and batches chosen together beside greedy batching: both verify the same.

The long run is `python -m bench.papers.batching`.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise

import pytest

from bench.papers.batching import Asked, Counted, compared, cost, recorded, table
from edgellm.engine import Model

DEVICES = 3


@pytest.fixture(scope="module")
def replies() -> list[list[Asked]]:
    pair = Namespace(pair="home", draft="edgellm-draft", verifier="edgellm-verifier", threads=1)
    return recorded(DEVICES, "auto", pair)


def test_what_devices_ask_is_recorded_with_its_text(replies: list[list[Asked]]) -> None:
    assert len(replies) == DEVICES
    for reply in replies:
        assert len(reply) > 1
        for asked, after in pairwise(reply):
            known = [*asked.text, *asked.draft.ids[: asked.verdict.accepted], *asked.verdict.tokens]
            assert after.text.tolist() == known


def test_both_schedulers_answer_as_was_recorded(verifier_model: Model, replies: list[list[Asked]]) -> None:
    found = compared(verifier_model, replies, 0.001, Namespace(verdicts=4, repeats=2, threads=1))
    for shape in found["shape"].values():
        assert shape["different"] <= 0.1  # ties may turn with the shape of a batch
        assert 1 <= shape["requests_per_batch"] <= DEVICES
        assert 0 < shape["computing"] <= 1
    assert found["ratio"]["min"] > 0
    row = {"drafts": "copied", "devices": DEVICES, "pause_ms": 1.0, **found}
    assert len(table({"rows": [row]}).splitlines()) == 3


def test_the_cost_of_a_batch_is_fitted() -> None:
    counted = Counted(0)
    counted.batches.extend([(0, rows, 1)] * requests for requests in (1, 2, 5) for rows in (1, 3, 8))
    counted.taken.extend(1e-3 * (2.0 + len(batch) * (0.5 + 0.25 * batch[0][1])) for batch in counted.batches)
    assert list(cost([counted]).values()) == pytest.approx([2.0, 0.5, 0.25])
