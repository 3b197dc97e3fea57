"""Penalties, logit_bias and JSON schemas over stock servers: the text is that of the model with the same rule here."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import InvalidOption
from edgellm.llm import LLM
from edgellm.spec.sampling import distribution, penalised
from edgellm.spec.types import Floats, Ids, Notice, Penalties, Sampling
from edgellm.upstream.rows import Steering, Undecided, added, distribution_of_top
from testkit.upstream.dialects import Vllm
from testkit.upstream.engine import Engine, logprobs, top
from testkit.upstream.text_dialects import Ollama
from tests.spec.real import case, ids
from tests.upstream.conftest import MOST, WAYS, OpenPair

TELLING = (
    "vllm-score", "vllm-fan-out", "vllm-continue", "llama-server", "sglang-score",
    "sglang-fan-out",
)  # fmt: skip
SCHEMA = json.dumps({
    "type": "object", "properties": {"day": {"enum": ["Friday", "Monday"]}, "open": {"type": "boolean"}},
    "required": ["day", "open"], "additionalProperties": False,
})  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.7},
    "a reward": {"frequency_penalty": -1.0, "logit_bias": {17: 3.5, 300: -8.0}},
    "schema": {"json_schema": SCHEMA},
    "schema and penalties": {"json_schema": SCHEMA, "frequency_penalty": 1.0},
}


DRAWN: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_k": 8, "top_p": 0.9, "seed": 5}}
TRIED = [*((way, "schema and penalties") for way in TELLING), *(("vllm-fan-out", rule) for rule in RULES),
         *((way, "a reward") for way in ("vllm-score", "llama-server", "sglang-score"))]  # fmt: skip
"""Each way with a rule of both kinds, each rule by one way, and each dialect with a bias of the user's own."""


@pytest.fixture(scope="module")
def here(f32_pair: tuple[Path, Path]) -> Iterator[LLM]:
    """The served model in this process, alone."""
    with LLM.open(None, f32_pair[1], threads=1) as pair:
        yield pair


@pytest.fixture(scope="module")
def wanted_by_rule(here: LLM) -> Callable[[str, str], list[int]]:
    """What the model here writes by a rule, greedily or drawn."""

    @cache
    def written(rule: str, drawn: str) -> list[int]:
        return ids(here.reply(case(2), max_tokens=MOST, **RULES[rule], **DRAWN[drawn]))

    return written


@pytest.mark.parametrize(("way", "rule"), dict.fromkeys(TRIED))
def test_a_reply_by_a_rule_is_that_of_the_model_here(
    way: str, rule: str, open_pair: OpenPair, wanted_by_rule: Callable[[str, str], list[int]]
) -> None:
    pair, _ = open_pair(*WAYS[way])
    for drawn, options in DRAWN.items():
        reply = pair.reply(case(2), budget=1.0, max_tokens=MOST, **RULES[rule], **options)
        assert ids(reply) == wanted_by_rule(rule, drawn)
        assert reply.summary.share_verified == 1.0


@pytest.mark.parametrize("way", ["vllm-score", "vllm-fan-out", "llama-server", "sglang-score"])
@pytest.mark.parametrize("drawn", [{}, {"temperature": 0.8, "top_k": 8, "seed": 5}], ids=["greedy", "sampled"])
def test_a_server_is_steered_where_its_likeliest_tokens_do_not_decide(
    way: str, drawn: dict[str, Any], open_pair: OpenPair, engine: Engine, here: LLM
) -> None:
    pair, server = open_pair(*WAYS[way])
    likeliest = top(engine.rows(here.prompt_writer.ids(case(2)).tolist(), 1)[0], 80)  # more than a server tells
    bias = {token: -90.0 for token, _ in likeliest}
    before = len(server.requests)
    reply = pair.reply(case(2), budget=1.0, max_tokens=MOST, logit_bias=bias, **drawn)
    written = ids(reply)
    assert reply.summary.share_verified == 1.0
    assert any("logit_bias" in str(body) for _, body, _ in server.requests[before:])
    if not drawn:  # else the server has drawn some tokens by itself
        assert written == ids(here.reply(case(2), max_tokens=MOST, logit_bias=bias))
    assert not {*written[:1]} & {*bias}


@pytest.mark.parametrize("way", ["vllm-score", "vllm-fan-out", "llama-server", "sglang-score"])
def test_a_schema_may_ask_for_the_unlikely(way: str, open_pair: OpenPair, here: LLM) -> None:
    schema = json.dumps({"enum": ["xyzzy qwfp", "zxcv jkl"]})
    pair, _ = open_pair(*WAYS[way])
    reply = pair.reply(case(2), budget=1.0, max_tokens=MOST, json_schema=schema)
    assert ids(reply) == ids(here.reply(case(2), max_tokens=MOST, json_schema=schema))
    assert reply.summary.share_verified == 1.0


def test_a_rule_is_applied_to_what_a_server_tells_and_else_refused(open_pair: OpenPair, here: LLM) -> None:
    pair, _ = open_pair(Vllm)
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5, "json_schema": SCHEMA, "max_tokens": MOST}
    for top_k in (0, 21):
        assert ids(pair.reply(case(2), top_k=top_k, **drawn)) == ids(here.reply(case(2), top_k=20, **drawn))
    with pytest.raises(InvalidOption, match="the repeat penalty divides logits"):
        pair.reply(case(2), repeat_penalty=1.1)


def test_drafts_follow_other_schemas(open_pair: OpenPair, f32_pair: tuple[Path, Path]) -> None:
    mute, server = open_pair(Ollama)
    before, events = len(server.requests), list[Notice]()
    reply = mute.reply(case(2), json_schema=SCHEMA)
    reply.listen(on_notice=events.append)
    with LLM.open(f32_pair[0], None, threads=1) as alone:
        assert ids(reply) == ids(alone.reply(case(2), json_schema=SCHEMA, retrieval="off"))
    assert json.loads(reply.summary.text)["day"] in ("Friday", "Monday")
    assert (reply.summary.share_verified, len(server.requests)) == (None, before)
    assert "writes alone, unverified" in events[0].text
    for rule in ({"presence_penalty": 1.0}, {"json_schema": SCHEMA, "logprobs": 1}):
        with pytest.raises(InvalidOption, match=r"no penalties|does not send them"):
            mute.reply(case(2), **rule)


ROWS = st.lists(st.floats(-12.0, 6.0, width=32), min_size=24, max_size=24)
BIAS = st.dictionaries(st.integers(0, 23), st.floats(-9.0, 9.0), max_size=6)


@given(
    logits=ROWS, text=st.lists(st.integers(0, 23), max_size=12), bias=BIAS, frequency=st.floats(-2.0, 2.0),
    presence=st.floats(-2.0, 2.0), told=st.integers(1, 24), top_k=st.integers(0, 6),
)  # fmt: skip
def test_what_the_likeliest_tokens_decide_is_what_the_whole_row_decides(
    logits: list[float], text: list[int], bias: dict[int, float], frequency: float, presence: float, told: int,
    top_k: int,
) -> None:  # fmt: skip
    row: Floats = np.array(logits, dtype=np.float32)
    before: Ids = np.array(text, dtype=np.int32)
    penalties = Penalties(frequency=frequency, presence=presence, bias=tuple(sorted(bias.items())))
    sampling = Sampling(1.0 if top_k else 0.0, min(top_k, told), penalties=penalties)
    steering = None
    try:
        found = distribution_of_top(tuple(top(row, told)), sampling, len(row), before)
    except Undecided as undecided:
        steering = undecided.steering or Steering()
    if steering is not None:
        assert told < len(row)
        moved = row.copy()
        for token, amount in steering.bias:
            moved[token] += amount
        assert np.allclose(moved, penalised(row, before, penalties), atol=1e-5)
        return
    wanted = distribution(penalised(logprobs(row), before, penalties), sampling)
    ties = len(np.unique(np.round(penalised(row, before, penalties), 4))) < len(row)
    if not ties:
        assert found.ids.tolist() == wanted.ids.tolist()
        assert np.allclose(found.probs, wanted.probs, atol=1e-4)


def test_a_penalty_beyond_what_servers_take_is_not_asked_for() -> None:
    penalties = Penalties(bias=((3, -100.0), (5, -100.0)), frequency=1.0)
    with pytest.raises(Undecided) as raised:
        distribution_of_top(((3, -0.1), (5, -3.0)), Sampling(penalties=penalties), 9, np.array([3], dtype=np.int32))
    assert raised.value.steering is None
    assert added(penalties, np.array([3, 3], dtype=np.int32)) == {3: -102.0, 5: -100.0}
