"""Records to messages and back; whatever else comes in is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import ContextFull, ProtocolError
from edgellm.rpc.channel import MAX_CHUNK
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services.verification_codec import (
    RequestLimits,
    read_sampling,
    read_verdict,
    read_verify,
    write_open,
    write_verdict,
    write_verify,
)
from edgellm.spec.params import MAX_LOGPROBS
from edgellm.spec.types import GREEDY, Chunk, Constraint, Logprobs, Penalties, Sampling, Verdict
from edgellm.spec.verifier import VerifyRequest
from tests.verifier.asking import request

VOCABULARY = 300
BOUNDS = RequestLimits(VOCABULARY, 512)

tokens = st.integers(0, VOCABULARY - 1)
ids = st.lists(tokens, max_size=20)


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@st.composite
def asks(draw: st.DrawFn) -> VerifyRequest:
    position, prefix = draw(st.integers(0, 100)), draw(ids)
    if position + len(prefix) == 0:
        position = 1
    chunk, extra = Chunk(array(draw(ids))), draw(st.integers(0, 20))
    return request(draw(st.integers(1, 2**64 - 1)), position, array(prefix), chunk, extra)


@given(asks())
def test_a_request_arrives_as_it_was_sent(ask: VerifyRequest) -> None:
    frame = pb.DeviceFrame.FromString(write_verify(ask).SerializeToString())
    got = read_verify(frame.verify, BOUNDS, 0, GREEDY)
    assert (got.round, got.position, got.extra) == (ask.round, ask.position, ask.extra)
    assert np.array_equal(got.prefix, ask.prefix)
    assert got.prefix.dtype == np.int32
    assert np.array_equal(got.draft.ids, ask.draft.ids)


@given(st.integers(0, 5), st.lists(tokens, min_size=1, max_size=4), st.floats(0, 1e3), st.integers(0, 9))
def test_a_verdict_arrives_as_it_was_sent(accepted: int, own: list[int], seconds: float, passes: int) -> None:
    ask = request(7, 0, array([1]), Chunk(ids=array([0] * 5)), 3)
    verdict = Verdict(accepted, array(own), seconds, passes=passes)
    frame = pb.VerifierFrame.FromString(write_verdict(7, verdict).SerializeToString())
    got = read_verdict(frame.verdict, ask, VOCABULARY)
    assert frame.verdict.round == 7
    assert (got.accepted, got.tokens.tolist(), got.seconds, got.passes) == (accepted, own, seconds, passes)


@given(st.lists(st.booleans(), min_size=1, max_size=MAX_CHUNK))
def test_what_of_a_copied_chunk_is_plausible_arrives(marks: list[bool]) -> None:
    chunk = Chunk(ids=array([0] * len(marks)), retrieved=True)
    asked = pb.DeviceFrame.FromString(write_verify(request(7, 0, array([1]), chunk, 0)).SerializeToString())
    ask = read_verify(asked.verify, BOUNDS, 0, GREEDY)
    assert ask.draft.retrieved
    frame = write_verdict(7, Verdict(0, array([3]), plausible=tuple(marks)))
    assert read_verdict(frame.verdict, ask, VOCABULARY).plausible == tuple(marks)


def test_a_verifier_need_not_say_what_is_plausible() -> None:
    ask = request(7, 0, array([1]), Chunk(ids=array([0] * 9), retrieved=True), 0)
    assert read_verdict(pb.Verdict(round=7, tokens=[1]), ask, VOCABULARY).plausible is None
    with pytest.raises(ProtocolError, match="plausibility bits for 8"):
        read_verdict(pb.Verdict(round=7, tokens=[1], plausible=b"a"), ask, VOCABULARY)


def valid() -> pb.Verify:
    return pb.Verify(round=1, prefix=[1, 2], chunk=[5])


def changed(**fields: object) -> pb.Verify:
    """`valid`, with fields of it replaced."""
    message = valid()
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def test_the_valid_one_is_valid() -> None:
    assert read_verify(valid(), BOUNDS, 0, GREEDY).draft.ids.tolist() == [5]


@pytest.mark.parametrize(
    "message",
    [
        changed(prefix=[1, VOCABULARY]),
        changed(prefix=[2**32 - 1]),
        changed(chunk=[VOCABULARY]),
        changed(prefix=[]),  # nothing before the chunk
        changed(chunk=[5] * 257),
        changed(extra=4097),
    ],
    ids=str,
)
def test_a_request_that_breaks_the_contract_is_refused(message: pb.Verify) -> None:
    with pytest.raises(ProtocolError):
        read_verify(message, BOUNDS, 0, GREEDY)


def test_more_than_the_context_holds_is_said_with_the_numbers() -> None:
    with pytest.raises(ContextFull, match="context of 512"):
        read_verify(changed(position=510), BOUNDS, 0, GREEDY)
    with pytest.raises(ContextFull):
        read_verify(changed(extra=510), BOUNDS, 0, GREEDY)
    read_verify(changed(position=509), BOUNDS, 0, GREEDY)


@pytest.mark.parametrize(
    "verdict",
    [
        pb.Verdict(accepted=2, tokens=[1]),
        pb.Verdict(accepted=1),
        pb.Verdict(accepted=1, tokens=[1, 2, 3]),
        pb.Verdict(accepted=1, tokens=[VOCABULARY]),
        pb.Verdict(accepted=1, tokens=[1], seconds=math.nan),
        pb.Verdict(accepted=1, tokens=[1], seconds=-1),
        pb.Verdict(accepted=1, tokens=[1], seconds=math.inf),
        pb.Verdict(accepted=1, tokens=[1], passes=4),
        pb.Verdict(accepted=1, tokens=[1], passes=2**32 - 1),
    ],
    ids=str,
)
def test_a_verdict_that_does_not_answer_is_refused(verdict: pb.Verdict) -> None:
    ask = request(1, 0, array([1]), Chunk(ids=array([5])), 1)
    with pytest.raises(ProtocolError):
        read_verdict(verdict, ask, VOCABULARY)


shares = st.floats(0.0, 1.0)
numbers = st.one_of(tokens, st.integers(0, 2**32 - 1))


@given(
    st.builds(
        pb.Verify,
        round=st.integers(0, 2**64 - 1),
        position=numbers,
        prefix=st.lists(numbers, max_size=5),
        chunk=st.lists(numbers, max_size=3),
        extra=numbers,
    )
)
def test_nothing_but_our_errors_comes_out_of_a_strange_request(message: pb.Verify) -> None:
    try:
        ask = read_verify(message, BOUNDS, 0, GREEDY)
    except (ProtocolError, ContextFull):
        return
    assert 0 < ask.position + len(ask.prefix) + len(ask.draft) <= BOUNDS.context


@given(
    st.builds(Sampling, st.floats(0, 5), st.integers(0, 1000), st.floats(0.01, 1), st.integers(0, 2**64 - 1), shares),
    st.none()
    | st.builds(
        Penalties,
        repeat=st.floats(0.01, 100.0),
        frequency=st.floats(-100.0, 100.0),
        presence=st.floats(-100.0, 100.0),
        bias=st.dictionaries(tokens, st.floats(-100.0, 100.0), max_size=8).map(
            lambda bias: tuple(sorted(bias.items()))
        ),
        start=st.integers(0, 512),
    ),
)
def test_sampling_arrives_as_it_was_sent(plain: Sampling, penalties: Penalties | None) -> None:
    constraint = Constraint('{"type": "object"}', 7, (1, 2)) if plain.min_p > 0.5 else None
    sampling = replace(plain, penalties=penalties, constraint=constraint)
    frame = pb.DeviceFrame.FromString(write_open(sampling, "00").SerializeToString())
    assert read_sampling(frame.open.sampling) == sampling


@pytest.mark.parametrize(
    "message",
    [
        pb.Sampling(temperature=math.nan, top_p=1),
        pb.Sampling(temperature=-1, top_p=1),
        pb.Sampling(temperature=math.inf, top_p=1),
        pb.Sampling(temperature=1, top_p=0),
        pb.Sampling(temperature=1, top_p=1.5),
        pb.Sampling(temperature=1, top_p=math.nan),
        pb.Sampling(top_p=1.0, min_p=math.nan),
        pb.Sampling(top_p=1.0, min_p=1.5),
        pb.Sampling(top_p=1.0, penalties=pb.Penalties()),  # divides by 0
        pb.Sampling(top_p=1.0, penalties=pb.Penalties(repeat=math.nan)),
        pb.Sampling(top_p=1.0, penalties=pb.Penalties(repeat=1.0, frequency=math.inf)),
        pb.Sampling(top_p=1.0, penalties=pb.Penalties(repeat=1.0, ids=[1, 2], bias=[1.0])),
        pb.Sampling(top_p=1.0, penalties=pb.Penalties(repeat=1.0, ids=[2, 2], bias=[1.0, 1.0])),
        pb.Sampling(top_p=1.0, penalties=pb.Penalties(repeat=1.0, ids=[2], bias=[math.nan])),
        pb.Sampling(top_p=1.0, penalties=pb.Penalties(repeat=1.0, ids=range(1025), bias=[0.0] * 1025)),
        pb.Sampling(top_p=1.0, constraint=pb.Constraint(schema="x" * 32_769)),
        pb.Sampling(top_p=1.0, constraint=pb.Constraint(schema="{}", after=range(65))),
        pb.Sampling(top_p=1.0, constraint=pb.Constraint(schema="{}", after=[2**31])),
    ],
    ids=lambda message: str(message)[:60],
)
def test_sampling_that_cannot_be_meant_is_refused(message: pb.Sampling) -> None:
    with pytest.raises(ProtocolError):
        read_sampling(message)


def test_a_verdict_may_have_a_token_in_place_of_each_that_does_not_stand() -> None:
    """For a verifier that writes on by itself."""
    ask = request(1, 0, array([1]), Chunk(ids=array([2, 3, 4])), 0)
    found = Verdict(1, array([9, 8, 7]))
    message = write_verdict(1, found).verdict
    assert read_verdict(message, ask, VOCABULARY).tokens.tolist() == [9, 8, 7]
    message.tokens.append(6)
    with pytest.raises(ProtocolError, match="has 4 tokens"):
        read_verdict(message, ask, VOCABULARY)


likely = st.floats(-1e3, 0.0, width=32)


@given(st.integers(0, 3), st.lists(tokens, min_size=1, max_size=3), st.integers(0, MAX_LOGPROBS), st.data())
def test_probabilities_arrive_as_they_were_sent(accepted: int, own: list[int], most: int, data: st.DataObject) -> None:
    asked = write_verify(request(7, 0, array([1]), Chunk(ids=array([0] * 3)), 2, most)).SerializeToString()
    ask = read_verify(pb.DeviceFrame.FromString(asked).verify, BOUNDS, 0, GREEDY)
    assert ask.logprobs == most
    places = st.builds(
        lambda one, ids, values: Logprobs(one, array(ids), np.array(values)),
        likely, st.lists(tokens, min_size=most, max_size=most), st.lists(likely, min_size=most, max_size=most),
    )  # fmt: skip
    count = accepted + len(own)
    said = tuple(data.draw(st.lists(places, min_size=count, max_size=count)))
    sent = write_verdict(7, Verdict(accepted, array(own), logprobs=said)).SerializeToString()
    got = read_verdict(pb.VerifierFrame.FromString(sent).verdict, ask, VOCABULARY).logprobs
    assert [(one.own, one.ids.tolist(), one.logprobs.tolist()) for one in got] == [
        (one.own, one.ids.tolist(), one.logprobs.tolist()) for one in said
    ]


@pytest.mark.parametrize(
    "said",
    [
        pb.Logprobs(),
        pb.Logprobs(own=[-1.0], ids=[1, 2], likeliest=[-1.0, -2.0]),
        pb.Logprobs(own=[-1.0, -1.0], ids=[1, 2], likeliest=[-1.0]),
        pb.Logprobs(own=[-1.0, -1.0], ids=[1], likeliest=[-1.0]),
        pb.Logprobs(own=[-1.0, -1.0], ids=[1, VOCABULARY], likeliest=[-1.0, -2.0]),
        pb.Logprobs(own=[-1.0, math.nan], ids=[1, 2], likeliest=[-1.0, -2.0]),
        pb.Logprobs(own=[-1.0, -1.0], ids=[1, 2], likeliest=[-1.0, -math.inf]),
        pb.Logprobs(own=[-1.0, 0.5], ids=[1, 2], likeliest=[-1.0, -2.0]),
    ],
    ids=str,
)
def test_probabilities_that_are_none_are_refused(said: pb.Logprobs) -> None:
    ask = request(1, 0, array([1]), Chunk(ids=array([5])), 1, 1)
    with pytest.raises(ProtocolError):
        read_verdict(pb.Verdict(accepted=1, tokens=[1], logprobs=said), ask, VOCABULARY)


def test_what_nobody_asked_for_is_not_read_and_costs_nothing() -> None:
    ask = request(1, 0, array([1]), Chunk(ids=array([5])), 1)
    said = pb.Verdict(accepted=1, tokens=[1], logprobs=pb.Logprobs(own=[math.nan]))
    assert read_verdict(said, ask, VOCABULARY).logprobs == ()
    assert not write_verify(ask).verify.HasField("logprobs")
    assert not write_verdict(1, Verdict(0, array([1]))).verdict.HasField("logprobs")


def test_too_many_probabilities_are_refused() -> None:
    with pytest.raises(ProtocolError, match="log-probabilities of 21"):
        read_verify(pb.Verify(round=1, prefix=[1], logprobs=21), BOUNDS, 0, GREEDY)
