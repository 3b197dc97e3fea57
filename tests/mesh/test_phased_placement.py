"""Which placement begins a reply, which take over, and where the model lies afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgellm.coldstart.cost_model import ModelCosts, TransformerShape
from edgellm.coldstart.hardware import Device
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.fleet_file import Fleet
from edgellm.mesh.phases.phased_placement import place_in_phases

MODEL = ModelCosts.of(TransformerShape(12, 896, 14, 2, 64, 4864), "small")
SLOW = Device("a", 1e11, 1.0, 0.05, 5e7, 2e10, 2e7, 2e7, 5e-3, 5e9)
HOME = Fleet((SLOW, replace(SLOW, name="b"), replace(SLOW, name="c")))
WIDE = tuple(StageShare(name, LayerRange(at, at + 4)) for at, name in zip((0, 4, 8), "abc", strict=True))


def test_a_reply_begins_where_its_first_token_comes_soonest_and_moves() -> None:
    found = place_in_phases(HOME, MODEL, WIDE, tokens_in=8, tokens_out=256, objective="ttft")
    assert found is not None
    assert found.shares == WIDE
    assert [share.layers for share in found.following[-1]] == [LayerRange(0, 12)]
    assert found.rest == ()  # it lies there already
    again = found.predict(8, 256)
    assert again.seconds == pytest.approx(found.plan.reply.seconds)
    assert found.predict(8, 64).seconds < again.seconds


def test_after_a_short_reply_the_model_still_moves_for_the_next_one() -> None:
    found = place_in_phases(HOME, MODEL, WIDE, tokens_in=8, tokens_out=4, objective="ttft")
    assert found is not None
    assert found.following == ()
    assert [share.layers for share in found.rest] == [LayerRange(0, 12)]


def test_for_a_whole_reply_any_placement_may_begin() -> None:
    alone = (StageShare("a", LayerRange(0, 12)),)
    found = place_in_phases(HOME, MODEL, alone, tokens_in=8, tokens_out=256, objective="reply")
    assert found is not None
    assert len(found.shares) > 1
    assert [share.layers for share in found.following[-1]] == [LayerRange(0, 12)]
    kept = place_in_phases(HOME, MODEL, alone, tokens_in=8, tokens_out=1024, objective="ttft")
    assert kept is not None
    assert kept.shares == alone
    assert kept.following == ()
    assert kept.rest == ()
