"""Schemas over the link: how many a device may have, what a hostile one costs, and where masks are made."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import numpy as np
import pytest

from edgellm.engine import Model
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services.server.servers import VerifierServer
from edgellm.services.server.session_grammar import MAX_GRAMMARS, GrammarOwner, SessionGrammar
from edgellm.services.verification_codec import write_open
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.sampling import ReplyGrammar
from edgellm.spec.types import GREEDY, Chunk, Constraint, Sampling, Verdict
from tests.services.test_verification_service import Device, verify

START = Constraint('{"type": "object"}', 3)


def opening(server: VerifierServer, schema: Any) -> pb.DeviceFrame:
    constraint = Constraint(json.dumps(schema), 3)
    return write_open(Sampling(constraint=constraint), server.model.vocabulary.fingerprint)


def busy(device: Device) -> bool:
    return device.hear().WhichOneof("frame") == "busy"


def test_a_device_has_so_many_grammars_and_another_one_its_own(server: VerifierServer) -> None:
    with grpc.insecure_channel(str(server.address), [("x", 1)]) as one:
        devices = [Device(one) for _ in range(MAX_GRAMMARS + 1)]
        for number, device in enumerate(devices):
            device.say(opening(server, {"type": "object", "title": str(number)}), verify())
            assert busy(device) == (number == MAX_GRAMMARS)
        with grpc.insecure_channel(str(server.address), [("x", 2)]) as two:
            other = Device(two)
            other.say(opening(server, {"type": "object"}), verify())
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


@pytest.mark.parametrize(
    ("schema", "named"),
    [({"not": {}}, '"not"'), ({"$ref": "#"}, "no value"), ({"$ref": "file:///etc/passwd"}, "file:///etc/passwd"),
     ({"type": "integer", "multipleOf": 99_999_989}, "multipleOf")],
)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_named(server: VerifierServer, schema: Any, named: str) -> None:
    with grpc.insecure_channel(str(server.address)) as channel:
        device = Device(channel)
        device.say(opening(server, schema), verify())
        code, why = device.refused()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert named in why


class Counting:
    """A grammar that allows everything, and counts the masks that it makes of a text."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def mask(self, text: Any) -> Any:
        self.asked.append(len(text))
        return np.ones(99, dtype=np.bool_)


def request(position: int, prefix: list[int], draft: list[int]) -> VerifyRequest:
    chunk = Chunk(np.array(draft, np.int32))
    return VerifyRequest(1, GREEDY, position, np.array(prefix, np.int32), chunk, extra=8)


def test_the_masks_of_a_draft_are_made_before_it_is_judged() -> None:
    grammar = Counting()
    session = SessionGrammar(GrammarOwner(), START, lambda _: grammar)
    first, second = request(0, [7, 8, 9], [1, 2]), request(5, [4], [5])
    assert asyncio.run(session.prepare(first))
    assert grammar.asked == [0, 1, 2]
    session.observe(first, Verdict(2, np.array([3, 4], np.int32), 0.1))
    assert asyncio.run(session.prepare(second))  # behind the two accepted tokens, 3 and 4
    assert grammar.asked[3:] == [3, 4]
    assert isinstance(second.grammar, ReplyGrammar)
    assert (first.extra, second.extra) == (8, 8)


def test_a_slow_grammar_gets_no_extra_tokens() -> None:
    class Slow(Counting):
        def mask(self, text: Any) -> Any:
            sum(range(500_000))
            return super().mask(text)

    asked = request(0, [7, 8, 9], [])
    assert asyncio.run(SessionGrammar(GrammarOwner(), START, lambda _: Slow()).prepare(asked))
    assert asked.extra == 0


def test_masks_of_a_draft_are_right_at_each_of_its_places(exact: Model) -> None:
    """The decoding thread asks for the text behind each drafted token, and goes back for it."""
    schema, start = '{"type": "string"}', Constraint("", 0)
    grammar, ids = exact.grammar(schema), exact.tokenize('"a day in the garden"')
    ReplyGrammar(grammar, start).prepare(ids[:0], ids)
    for n in [0, 3, 1, len(ids), 2]:
        assert np.array_equal(grammar.mask(ids[:n]), exact.grammar(schema).mask(ids[:n]))
