"""What crosses between the stages of a mesh arrives as it was, and nothing else is taken."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Ids
from edgellm.errors import EngineFailed, InvalidOption, ProtocolError
from edgellm.layer_range import LayerRange
from edgellm.mesh.messages import Failed, MicroBatch, StageAnswer, StageLost, StageSpec, Took
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.rpc.protos.mesh_pb2 import StageLoaded
from edgellm.services import mesh_codec
from edgellm.services.mesh_codec import read_event, read_micro_batch, read_work, write_event, write_micro_batch
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import Chunk, Sampling, Verdict
from tests.verifier.asking import judged

WORK = StageSpec("ab" * 32, "a model", LayerRange(2, 6), 8, 6, 500, 64, 3, reproducible=True)
token = st.integers(0, WORK.n_vocab - 1)
ids = st.lists(token, min_size=1, max_size=20).map(lambda found: np.array(found, np.int32))
sampling = st.builds(Sampling, st.floats(0.0, 2.0), st.integers(0, 100), st.floats(0.1, 1.0), st.integers(0, 2**63))
session, number = st.integers(0, 2), st.integers(0, 2**40)


def asked(n: int, start: int, chosen: Sampling, logits: bool) -> VerifyRequest:
    """A question about the last `n` of the positions from `start` on, of which there are n + 1."""
    return judged(Chunk(np.arange(n, dtype=np.int32), retrieved=bool(n % 2)), chosen, start + 1, logits)


@given(session, number, st.integers(0, 30), ids, sampling, st.booleans())
def test_questions_arrive(session: int, number: int, start: int, data: Ids, chosen: Sampling, logits: bool) -> None:
    sent = MicroBatch(session, number, start, data, asked(len(data) - 1, start, chosen, logits))
    got = read_micro_batch(pb.MeshParcel.FromString(write_micro_batch(sent, False).SerializeToString()), WORK)
    assert (got.session, got.number, got.start) == (session, number, start)
    np.testing.assert_array_equal(got.data, data)
    assert got.request is not None
    assert sent.request is not None
    assert (got.request.sampling, got.request.position, got.request.logits) == (chosen, start + 1, logits)
    np.testing.assert_array_equal(got.request.draft.ids, sent.request.draft.ids)
    assert got.request.draft.retrieved == sent.request.draft.retrieved


@given(st.lists(st.lists(st.floats(-60_000, 60_000, width=32), min_size=6, max_size=6), min_size=1, max_size=8))
def test_rows_arrive_to_the_bit_where_they_are_wide_and_nearly_else(rows: list[list[float]]) -> None:
    data = np.array(rows, np.float32)
    for half in (False, True):
        got = read_micro_batch(write_micro_batch(MicroBatch(0, 1, 0, data), half), WORK).data
        np.testing.assert_allclose(got, data, rtol=1e-3 if half else 0.0, atol=1e-7 if half else 0.0)


def test_events_arrive() -> None:
    ask = asked(2, 0, Sampling(), True)
    logits = np.arange(1500, dtype=np.float32).reshape(3, 500)
    verdict = Verdict(1, np.array([7], np.int32), 0.5)
    took = Took(2.5, 1.5)
    rows = MicroBatch(1, 4, 3, np.ones((2, 6), np.float32), took=took)
    for event in (StageLoaded(layers=3), rows, StageAnswer(8, verdict, logits, took)):
        written = write_event(event, True)
        assert written is not None
        got = read_event(written, WORK, {8: ask}.get)
        assert type(got) is type(event)
        if isinstance(got, StageAnswer):
            assert (got.number, got.verdict.accepted, got.verdict.tokens.tolist()) == (8, 1, [7])
            np.testing.assert_array_equal(got.logits, logits)
            assert got.took == took
        elif isinstance(got, MicroBatch):
            np.testing.assert_array_equal(got.data, rows.data)
            assert got.took == took
        else:
            assert got == event
    failed = write_event(Failed(5, InvalidOption("It is bad.", "Mend it.")), True)
    told = read_event(failed, WORK, lambda _number: None)
    assert isinstance(told, Failed)
    assert (told.number, told.error.what, told.error.next_step) == (5, "It is bad.", "Mend it.")
    with pytest.raises(EngineFailed, match="x"):
        write_event(StageLost(EngineFailed("x", "y")), True)
    assert read_work(mesh_codec.write_work(WORK)) == WORK


def batch(**changes: object) -> pb.MeshParcel:
    made = write_micro_batch(MicroBatch(0, 1, 0, np.array([1, 2, 3], np.int32), asked(2, 0, Sampling(), False)), True)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (batch(rows=b"1234"), "3 ids and 4 bytes of rows"),
        (pb.MeshParcel(rows=b"123"), "3 bytes of rows"),
        (pb.MeshParcel(ids=[500]), "Token 500 is outside"),
        (batch(start=1), "do not match the micro-batch"),
    ],
)
def test_parcels_that_cannot_be_meant(message: pb.MeshParcel, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read_micro_batch(message, WORK)


def test_times_are_numbers() -> None:
    for took in (Took(float("nan")), Took(0.0, float("inf")), Took(-1.0)):
        report = write_event(MicroBatch(1, 4, 3, np.ones((2, 6), np.float32), took=took), True)
        with pytest.raises(ProtocolError, match="seconds, which is invalid"):
            read_event(report, WORK, lambda _number: None)


def test_answers_that_nobody_has_asked_for() -> None:
    answer = write_event(StageAnswer(8, Verdict(0, np.array([1], np.int32))), True)
    assert answer is not None
    assert read_event(answer, WORK, lambda _number: None) is None
    answer.answer.verdict.accepted = 5
    with pytest.raises(ProtocolError, match="accepts 5 of 0"):
        read_event(answer, WORK, {8: asked(0, 0, Sampling(), False)}.get)
    answer.answer.verdict.accepted = 0
    answer.answer.logits = b"1234" * 3
    with pytest.raises(ProtocolError, match="are not 2 rows"):
        read_event(answer, WORK, {8: asked(1, 0, Sampling(), True)}.get)
    answer.answer.logits = np.full(2 * WORK.n_vocab, np.nan, "<f4").tobytes()
    with pytest.raises(ProtocolError, match="NaN"):
        read_event(answer, WORK, {8: asked(1, 0, Sampling(), True)}.get)
    for report, says in ((pb.Report(), "empty"), (pb.Report(loaded=StageLoaded(layers=99)), "99 are loaded")):
        with pytest.raises(ProtocolError, match=says):
            read_event(report, WORK, lambda _number: None)


def test_a_parcel_always_fits_a_message() -> None:
    for n_embd in (64, 8_192, 65_536):
        rows = np.ones((replace(WORK, n_embd=n_embd).rows, n_embd), np.float32)
        assert len(write_micro_batch(MicroBatch(0, 1, 0, rows), True).SerializeToString()) < 16 * 2**20


def test_rows_beyond_sixteen_bits_travel_wide() -> None:
    rows = np.zeros((2, 6), np.float32)
    for largest, wide in ((1e4, False), (1e5, True)):
        rows[1, 3] = largest
        message = write_micro_batch(MicroBatch(0, 1, 0, rows), half=True)
        assert message.wide is wide
        np.testing.assert_array_equal(read_micro_batch(message, WORK).data, rows)
