"""Records to messages and back; whatever else comes in is refused by name."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import ContextFull, ProtocolError
from edgellm.rpc.channel import MAX_CHUNK
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services import verification_codec
from edgellm.services.verification_codec import read_sampling, read_verdict, read_verify, write_verdict, write_verify
from edgellm.spec.params import MAX_LOGPROBS
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import GREEDY, Chunk, Constraint, Logprobs, Penalties, Sampling, Verdict
from tests.verifier.asking import request

VOCABULARY = 300
BOUNDS = (VOCABULARY, 512)

tokens = st.integers(0, VOCABULARY - 1)
ids = st.lists(tokens, max_size=20)
likely = st.floats(-1e3, 0.0, width=32)


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def sent(ask: VerifyRequest) -> VerifyRequest:
    """A request as it arrives."""
    return read_verify(pb.DeviceFrame.FromString(write_verify(ask).SerializeToString()).verify, *BOUNDS, 0, GREEDY)


@given(st.integers(1, 2**64 - 1), st.integers(1, 100), ids, ids, st.integers(0, 20))
def test_a_request_arrives_as_sent(number: int, position: int, prefix: list[int], draft: list[int], extra: int) -> None:
    got = sent(request(number, position, array(prefix), Chunk(array(draft)), extra))
    assert (got.round, got.position, got.extra) == (number, position, extra)
    assert (got.prefix.tolist(), got.draft.ids.tolist()) == (prefix, draft)


@given(st.data(), st.lists(st.booleans(), min_size=1, max_size=MAX_CHUNK), st.integers(0, MAX_LOGPROBS))
def test_a_verdict_arrives_as_it_was_sent(data: st.DataObject, marks: list[bool], most: int) -> None:
    draft = Chunk(ids=array([0] * len(marks)), retrieved=True)
    ask = sent(request(7, 0, array([1]), draft, 3, most))
    assert (ask.draft.retrieved, ask.logprobs) == (True, most)
    accepted = data.draw(st.integers(0, min(3, len(marks))))
    own = data.draw(st.lists(tokens, min_size=1, max_size=max(3, len(marks)) + 1 - accepted))
    places = st.builds(
        lambda one, ids, values: Logprobs(one, array(ids), np.array(values)),
        likely, st.lists(tokens, min_size=most, max_size=most), st.lists(likely, min_size=most, max_size=most),
    )  # fmt: skip
    said = tuple(data.draw(st.lists(places, min_size=accepted + len(own), max_size=accepted + len(own))))
    verdict = Verdict(accepted, array(own), 1.5, passes=2, cached=1, plausible=tuple(marks), logprobs=said)
    frame = pb.VerifierFrame.FromString(write_verdict(7, verdict).SerializeToString())
    got = read_verdict(frame.verdict, ask, VOCABULARY)
    assert frame.verdict.round == 7
    assert (got.accepted, got.tokens.tolist(), got.seconds, got.passes, got.cached) == (accepted, own, 1.5, 2, 1)
    assert got.plausible == tuple(marks)
    assert [(one.own, one.ids.tolist(), one.logprobs.tolist()) for one in got.logprobs] == [
        (one.own, one.ids.tolist(), one.logprobs.tolist()) for one in said
    ]


def test_a_verifier_need_not_say_what_is_plausible() -> None:
    ask = request(7, 0, array([1]), Chunk(ids=array([0] * 9), retrieved=True), 0)
    assert read_verdict(pb.Verdict(round=7, tokens=[1]), ask, VOCABULARY).plausible is None
    with pytest.raises(ProtocolError, match="plausibility bits for 8"):
        read_verdict(pb.Verdict(round=7, tokens=[1], plausible=b"a"), ask, VOCABULARY)


def changed(**fields: object) -> pb.Verify:
    """A good request, with fields of it replaced."""
    return pb.Verify(**({"round": 1, "prefix": [1, 2], "chunk": [5]} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        changed(prefix=[1, VOCABULARY]),
        changed(prefix=[2**32 - 1]),
        changed(chunk=[VOCABULARY]),
        changed(prefix=[]),  # nothing before the chunk
        changed(chunk=[5] * 257),
        changed(extra=4097),
        changed(logprobs=21),
    ],
    ids=str,
)
def test_a_request_that_breaks_the_contract_is_refused(message: pb.Verify) -> None:
    with pytest.raises(ProtocolError):
        read_verify(message, *BOUNDS, 0, GREEDY)


def test_more_than_the_context_holds_is_said_with_the_numbers() -> None:
    with pytest.raises(ContextFull, match="context of 512"):
        read_verify(changed(position=510), *BOUNDS, 0, GREEDY)
    with pytest.raises(ContextFull):
        read_verify(changed(extra=511), *BOUNDS, 0, GREEDY)
    assert read_verify(changed(extra=510), *BOUNDS, 0, GREEDY).extra == 510
    assert read_verify(changed(position=509), *BOUNDS, 0, GREEDY).draft.ids.tolist() == [5]


def probable(own: list[float], ids: list[int], likeliest: list[float]) -> pb.Verdict:
    said = pb.Logprobs(own=own, ids=ids, likeliest=likeliest)
    return pb.Verdict(accepted=1, tokens=[1], logprobs=said)


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
        probable([], [], []),
        probable([-1.0], [1, 2], [-1.0, -2.0]),
        probable([-1.0, -1.0], [1, 2], [-1.0]),
        probable([-1.0, -1.0], [1], [-1.0]),
        probable([-1.0, -1.0], [1, VOCABULARY], [-1.0, -2.0]),
        probable([-1.0, math.nan], [1, 2], [-1.0, -2.0]),
        probable([-1.0, -1.0], [1, 2], [-1.0, -math.inf]),
        probable([-1.0, 0.5], [1, 2], [-1.0, -2.0]),
    ],
    ids=str,
)
def test_a_verdict_that_does_not_answer_is_refused(verdict: pb.Verdict) -> None:
    most = 1 if verdict.HasField("logprobs") else None
    with pytest.raises(ProtocolError):
        read_verdict(verdict, request(1, 0, array([1]), Chunk(ids=array([5])), 1, most), VOCABULARY)


@given(
    st.builds(
        Sampling, st.floats(0, 5), st.integers(0, 1000), st.floats(0.01, 1), st.integers(0, 2**64 - 1),
        st.floats(0.0, 1.0),
    ),
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
    ).filter(lambda some: some != Penalties(start=some.start)),
)  # fmt: skip
def test_sampling_arrives_as_it_was_sent(plain: Sampling, penalties: Penalties | None) -> None:
    constraint = Constraint('{"type": "object"}', 7, (1, 2)) if plain.min_p > 0.5 else None
    sampling = replace(plain, penalties=penalties, constraint=constraint)
    frame = pb.DeviceFrame.FromString(verification_codec.write_open(sampling, "00").SerializeToString())
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
    message = write_verdict(1, Verdict(1, array([9, 8, 7]))).verdict
    assert read_verdict(message, ask, VOCABULARY).tokens.tolist() == [9, 8, 7]
    message.tokens.append(6)
    with pytest.raises(ProtocolError, match="has 4 tokens"):
        read_verdict(message, ask, VOCABULARY)


def test_what_nobody_asked_for_is_not_read_and_costs_nothing() -> None:
    ask = request(1, 0, array([1]), Chunk(ids=array([5])), 1)
    assert read_verdict(probable([math.nan], [], []), ask, VOCABULARY).logprobs == ()
    assert not write_verify(ask).verify.HasField("logprobs")
    assert not write_verdict(1, Verdict(0, array([1]))).verdict.HasField("logprobs")
