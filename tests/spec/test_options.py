"""Options of a reply: what cannot be meant is refused."""

from __future__ import annotations

import pytest

from edgellm.errors import InvalidOption
from edgellm.spec.gates import AlwaysGate, ConfidenceGate, NeverGate
from edgellm.spec.options import GATES, ReplyOptions


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0.0),
        ("top_p", 1.5), ("top_p", float("nan")), ("top_k", -1), ("top_k", 2.5), ("max_tokens", 0), ("max_tokens", True),
        ("gamma", 0), ("seed", -1), ("gate", "sometimes"), ("confidence_threshold", 1.1),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_meant_is_named_with_its_value(option: str, bad: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        ReplyOptions(**{option: bad})  # type: ignore[arg-type]
    assert str(bad) in caught.value.what
    assert option in caught.value.what or option == "gate"


def test_each_gate_has_a_name() -> None:
    made = [type(ReplyOptions(gate=name).make_gate(seed=1)) for name in GATES]
    assert made == [AlwaysGate, NeverGate, ConfidenceGate]
    own = NeverGate()
    assert ReplyOptions(gate=own).make_gate(seed=1) is own


def test_a_seed_is_picked_where_none_is_given() -> None:
    assert ReplyOptions().sampling().seed != ReplyOptions().sampling().seed
    assert ReplyOptions(seed=0).sampling().seed == 0
