"""Options of a reply: what cannot be meant is refused."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from edgellm.errors import InvalidOption
from edgellm.spec.gates.rules import NeverGate
from edgellm.spec.model_sampling import ModelSampling
from edgellm.spec.params import DEFAULT_SOURCES, GATES, ReplyOptions
from edgellm.spec.types import Penalties, Sampling


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0.0),
        ("top_p", 1.5), ("top_p", float("nan")), ("top_k", -1), ("top_k", 2.5), ("max_tokens", 0), ("max_tokens", True),
        ("gamma", 0), ("seed", -1), ("gate", "sometimes"), ("confidence_threshold", 1.1),
        ("budget", 1.2), ("budget", -0.1), ("budget", float("nan")), ("early_exit", "maybe"), ("exit_threshold", 2.0),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_meant_is_named_with_its_value(option: str, bad: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        ReplyOptions(**{option: bad})  # type: ignore[arg-type]
    assert str(bad) in caught.value.what
    assert option in caught.value.what or option == "gate"


@pytest.mark.parametrize("gate", sorted(set(GATES) - {"auto", "confidence", "always", "never"}))
def test_a_gate_that_means_nothing_without_a_budget_is_refused(gate: str) -> None:
    with pytest.raises(InvalidOption, match=f"{gate} needs a budget"):
        ReplyOptions(gate=gate)
    ReplyOptions(gate=gate, budget=0.2)


@pytest.mark.parametrize(("gate", "budget"), [("always", 0.5), ("never", 0.5), (NeverGate(), 0.5)])
def test_a_gate_that_keeps_no_budget_is_refused_with_one(gate: str, budget: float) -> None:
    with pytest.raises(InvalidOption, match=r"does not keep a budget of 0\.5"):
        ReplyOptions(gate=gate, budget=budget)
    ReplyOptions(gate="always", budget=1.0)
    ReplyOptions(gate="never", budget=0.0)


WANTED = ModelSampling(temperature=0.6, top_k=20, top_p=0.9, min_p=0.02, repeat_penalty=1.1)


def test_a_seed_is_picked_where_none_is_given() -> None:
    assert ReplyOptions().sampling(WANTED).seed != ReplyOptions().sampling(WANTED).seed
    assert ReplyOptions(seed=0).sampling(WANTED).seed == 0


def test_what_is_left_open_is_as_the_model_wants() -> None:
    rule = Sampling(0.6, 20, 0.9, 5, 0.02, Penalties(repeat=1.1, start=7))
    assert ReplyOptions(seed=5).sampling(WANTED, 7) == rule
    assert ReplyOptions(seed=5, top_p=0.5).sampling(WANTED, 7) == replace(rule, top_p=0.5)


@pytest.mark.parametrize(
    ("option", "given"), [("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("repeat_penalty", 1.0)]
)
def test_what_is_given_is_exact_also_where_it_switches_something_off(option: str, given: float) -> None:
    rule = ReplyOptions(**{option: given}).sampling(WANTED)  # type: ignore[arg-type]
    found = {"repeat_penalty": 1.0 if rule.penalties is None else rule.penalties.repeat} | asdict(rule)
    assert {name: found[name] for name in WANTED.figures()} == WANTED.figures() | {option: given}


def test_sources_are_named_in_any_order_and_come_in_one() -> None:
    assert ReplyOptions(retrieval="off").sources() == ()
    assert ReplyOptions().sources() == DEFAULT_SOURCES
    assert ReplyOptions(retrieval="reuse, context").sources() == ("context", "reuse")
    with pytest.raises(InvalidOption, match="'dreams'"):
        ReplyOptions(retrieval="context,dreams")
