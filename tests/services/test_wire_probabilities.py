"""Probabilities that come with a verdict: as they were sent, or refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import ProtocolError
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services.verification_codec import read_verdict, read_verify, write_verdict, write_verify
from edgellm.spec.params import MAX_LOGPROBS
from edgellm.spec.types import GREEDY, Chunk, Logprobs, Verdict
from tests.services.test_verification_codec import BOUNDS, VOCABULARY, array, tokens
from tests.verifier.asking import request

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
