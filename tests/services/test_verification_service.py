"""Whoever breaks the contract has the stream closed with a reason, and nobody else notices."""

import asyncio
import json
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest

from edgellm.rpc.channel import HELLO, MAX_MESSAGE, SESSION
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.services.server.verification_service import MAX_GRAMMARS, GrammarOwner, SessionGrammar
from edgellm.services.verification_codec import write_open
from edgellm.spec.protocols import GenerationState, VerifyRequest
from edgellm.spec.sampling import ReplyGrammar
from edgellm.spec.types import GREEDY, Chunk, Constraint, Ids, Sampling
from tests.services.conftest import Alone


class Device:
    """A device that says whatever it likes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self.beats: list[pb.Working] = []
        self._call = channel.stream_stream(SESSION, bytes, bytes)(iter(self._frames.get, None))

    def say(self, *frames: pb.DeviceFrame | bytes) -> None:
        for frame in frames:
            self._frames.put(frame if isinstance(frame, bytes) else frame.SerializeToString())

    def hear(self) -> pb.VerifierFrame:
        """The next frame that is no heartbeat; those are kept."""
        while (frame := pb.VerifierFrame.FromString(next(iter(self._call)))).WhichOneof("frame") == "working":
            self.beats.append(frame.working)
        return frame

    def refused(self) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            self.hear()
        self._frames.put(None)
        return caught.value.code(), caught.value.details() or ""

    def finish(self) -> None:
        self._frames.put(None)
        with pytest.raises(StopIteration):
            self.hear()


@pytest.fixture
def channel(server: VerifierServer) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(str(server.address), options=options) as opened:
        yield opened


@pytest.fixture
def device(channel: grpc.Channel) -> Device:
    return Device(channel)


@pytest.fixture
def opening(server: VerifierServer) -> pb.DeviceFrame:
    return write_open(GREEDY, server.model.vocabulary.fingerprint)


def verify(round: int = 1, position: int = 0, prefix: tuple[int, ...] = (5, 6, 7), **more: object) -> pb.DeviceFrame:  # noqa: A002
    return pb.DeviceFrame(verify=pb.Verify(round=round, position=position, prefix=prefix, **more))  # type: ignore[arg-type]


def changed(opening: pb.DeviceFrame, **fields: object) -> pb.DeviceFrame:
    frame = pb.DeviceFrame.FromString(opening.SerializeToString())
    for name, value in fields.items():
        target = frame.open.sampling if name == "top_p" else frame.open
        setattr(target, name, value)
    return frame


def test_a_greeting_that_is_none_is_answered_in_words(channel: grpc.Channel) -> None:
    greet = channel.unary_unary(HELLO, bytes, pb.HelloReply.FromString)
    assert greet(b"\xff\xff").protocol == PROTOCOL  # what the device says of itself is not even read


def test_a_long_computation_gives_signs_of_life_and_of_progress(
    device: Device, opening: pb.DeviceFrame, prompt: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.services.server.verification_service.HEARTBEAT_SECONDS", 0.01)
    device.say(opening, verify(round=3, prefix=tuple(prompt.tolist()), extra=200))
    device.hear()
    assert len(device.beats) > 2
    assert {beat.round for beat in device.beats} == {3}
    assert device.beats[-1].step > device.beats[0].step


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([verify()], grpc.StatusCode.INVALID_ARGUMENT),
        ([b"\xff\xff\xff"], grpc.StatusCode.INVALID_ARGUMENT),
        ([b""], grpc.StatusCode.INVALID_ARGUMENT),
        (["open", "open"], grpc.StatusCode.INVALID_ARGUMENT),
        (["open", b""], grpc.StatusCode.INVALID_ARGUMENT),
        (["open", b"\x12\x05"], grpc.StatusCode.INVALID_ARGUMENT),
        (["open", verify(chunk=[2**20])], grpc.StatusCode.INVALID_ARGUMENT),
        (["open", verify(round=2), "hear", verify(round=2)], grpc.StatusCode.INVALID_ARGUMENT),
        (["open", verify(round=2), "hear", verify(round=1)], grpc.StatusCode.INVALID_ARGUMENT),
        (["open", verify(), "hear", verify(round=2, position=4)], grpc.StatusCode.INVALID_ARGUMENT),  # it holds three
        (["open", verify(extra=600)], grpc.StatusCode.OUT_OF_RANGE),
        ([{"protocol": PROTOCOL + 1}], grpc.StatusCode.FAILED_PRECONDITION),
        ([{"vocabulary": b"other"}], grpc.StatusCode.FAILED_PRECONDITION),
        ([{"top_p": 0.0}], grpc.StatusCode.INVALID_ARGUMENT),
        (["too long"], grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_broken_rule_closes_the_stream_and_nothing_else(
    channel: grpc.Channel, opening: pb.DeviceFrame, remote: RemoteVerifier, prompt: Ids, alone: Alone,
    frames: list[object], code: grpc.StatusCode,
) -> None:  # fmt: skip
    neighbour = remote.open(GenerationState())
    first = neighbour.submit(prompt, Chunk()).result().tokens
    rude = Device(channel)
    for frame in frames:
        if frame == "hear":
            rude.hear()
        elif frame == "open":
            rude.say(opening)
        elif frame == "too long":
            rude.say(verify(prefix=(1,) * MAX_MESSAGE))
        else:
            rude.say(changed(opening, **frame) if isinstance(frame, dict) else frame)  # type: ignore[arg-type]
    found, why = rude.refused()
    assert found is code, why
    assert why
    assert "protocol" not in str(frames[0]) or f"version {PROTOCOL + 1}" in why  # who is to update
    second = neighbour.submit(np.concatenate((prompt, first)), Chunk()).result().tokens
    assert [*first, *second] == alone(prompt, 2)
    neighbour.close()


# --- schemas ----------------------------------------------------------------------------------------------------------


START = Constraint('{"type": "object"}', 3)


def opening_by(server: VerifierServer, schema: Any) -> pb.DeviceFrame:
    constraint = Constraint(json.dumps(schema), 3)
    return write_open(Sampling(constraint=constraint), server.model.vocabulary.fingerprint)


def busy(device: Device) -> bool:
    return device.hear().WhichOneof("frame") == "busy"


def test_a_device_has_so_many_grammars_and_another_one_its_own(server: VerifierServer) -> None:
    with grpc.insecure_channel(str(server.address), [("x", 1)]) as one:
        devices = [Device(one) for _ in range(MAX_GRAMMARS + 1)]
        for number, device in enumerate(devices):
            device.say(opening_by(server, {"type": "object", "title": str(number)}), verify())
            assert busy(device) == (number == MAX_GRAMMARS)
        with grpc.insecure_channel(str(server.address), [("x", 2)]) as two:
            other = Device(two)
            other.say(opening_by(server, {"type": "object"}), verify())
            assert not busy(other)
            other.finish()
        devices[0].finish()  # its place is free then
        for number in range(2, 50):
            devices[-1].say(verify(round=number))
            if not busy(devices[-1]):
                break
        else:
            pytest.fail("no place became free")
        for device in devices[1:]:
            device.finish()


def test_a_schema_that_cannot_be_followed_is_named(device: Device, server: VerifierServer) -> None:
    device.say(opening_by(server, {"not": {}}), verify())
    code, why = device.refused()
    assert (code, '"not"' in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)


class Counting:
    """A grammar that allows everything, and counts the masks that it makes of a text."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def mask(self, text: Any) -> Any:
        self.asked.append(len(text))
        return np.ones(99, dtype=np.bool_)

    def forced(self, text: Any) -> bytes:
        raise NotImplementedError


def asked_for(prefix: list[int], draft: list[int]) -> VerifyRequest:
    return VerifyRequest(1, GREEDY, 0, np.array(prefix, np.int32), Chunk(np.array(draft, np.int32)), extra=8)


def test_the_masks_of_a_draft_are_made_before_it_is_judged() -> None:
    grammar = Counting()
    session = SessionGrammar(GrammarOwner(), START, lambda _: grammar)
    first, second = asked_for([7, 8, 9], [1, 2]), asked_for([7, 8, 9, 1, 2, 3], [5])
    assert asyncio.run(session.prepare(first))
    assert grammar.asked == [0, 1, 2]
    assert asyncio.run(session.prepare(second))
    assert grammar.asked[3:] == [3, 4]
    assert isinstance(second.grammar, ReplyGrammar)
    assert (first.extra, second.extra) == (8, 8)


def test_a_slow_grammar_gets_no_extra_tokens() -> None:
    class Slow(Counting):
        def mask(self, text: Any) -> Any:
            sum(range(500_000))
            return super().mask(text)

    asked = asked_for([7, 8, 9], [])
    assert asyncio.run(SessionGrammar(GrammarOwner(), START, lambda _: Slow()).prepare(asked))
    assert asked.extra == 0
