"""The decoders of messages that arrive over a link, without the network."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgellm.engine import Vocabulary
from edgellm.errors import ProtocolError
from edgellm.rpc.address import Address
from edgellm.rpc.link import Endpoint
from edgellm.rpc.protos import PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.protos import trust_pb2 as trust_pb
from edgellm.rpc.trust.handshake import LABEL, read_welcome
from edgellm.rpc.trust.identity import Certificate, Identity
from edgellm.rpc.trust.pairing import Code, Exchange, read_introduction
from edgellm.rpc.trust.trust import Peers, Right, Trust
from edgellm.services import verification_codec
from edgellm.services.verification_codec import greet, read_verify, write_open, write_verdict, write_wanted
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.sampling import ModelSampling
from edgellm.spec.types import GREEDY, Chunk, Ids, Logprobs, Sampling, Verdict
from tests.engine.logits import ids
from tests.fuzz.reading import Reader

WORDS, CONTEXT, ROUND = 300, 512, 7
VOCABULARY = Vocabulary.of([b"%d" % i for i in range(WORDS)], bytes(WORDS))
WANTED = ModelSampling(0.7)


def verify_request(position: int, prefix: Ids, drafted: int, logprobs: int | None = None) -> VerifyRequest:
    """Return a request of the round that all inputs belong to."""
    draft = Chunk(ids=ids(*range(9, 9 + drafted)), retrieved=True)
    return VerifyRequest(0, GREEDY, position, prefix, draft, 4, logprobs, ROUND)


def _session(data: bytes) -> None:
    """Decode a device's frame as a verifier does."""
    frame = parse_message(pb.DeviceFrame, data)
    kind = frame.WhichOneof("frame")
    if kind == "open":
        verification_codec.read_sampling(frame.open.sampling)
    elif kind == "verify":
        read_verify(frame.verify, WORDS, CONTEXT, 1, GREEDY)
    else:
        raise ProtocolError("A frame is empty.", "Send another.")


def _verdict(logprobs: int | None) -> Callable[[bytes], None]:
    """Return a reader of a verifier's frame, as a device decodes it that waits for a verdict."""
    request = verify_request(4, ids(1, 2, 3, 4), 4, logprobs)

    def read(data: bytes) -> None:
        frame = parse_message(pb.VerifierFrame, data)
        if frame.WhichOneof("frame") != "verdict":
            return
        verdict = verification_codec.read_verdict(frame.verdict, request, WORDS)
        expected = verdict.accepted + len(verdict.tokens) if logprobs is not None else 0
        if len(verdict.logprobs) != expected or any(len(one.ids) != logprobs for one in verdict.logprobs):
            raise AssertionError(f"invalid probabilities got through: {verdict}")
        if not (1 <= len(verdict.tokens) <= 9 - verdict.accepted >= 5 and int(verdict.tokens.max()) < WORDS):
            raise AssertionError(f"a verdict that does not fit the request got through: {verdict}")

    return read


@dataclass
class _Greeting:
    """A verifier whose HelloReply is `data`."""

    data: bytes

    def unary_unary(self, _method: str, _write: Any, _read: Any) -> Any:
        async def answer(_request: Any, timeout: float) -> bytes:
            return self.data

        return answer


def _greeted(data: bytes) -> object:
    where = Endpoint("there", Address("10.0.0.2", 1))
    return asyncio.run(greet(cast(Any, _Greeting(data)), VOCABULARY, where, 1.0))


def paired(folder: Path) -> tuple[Trust, Identity]:
    """Return this device, and one that it is paired with."""
    own, other = Trust(Identity.new(), Peers(folder)), Identity.new()
    words = trust_pb.Introduction(name="desk", rights=["verify"], addresses=["10.0.0.2:1"])
    own.peers.add(read_introduction(other.certificate, words.SerializeToString(), frozenset(Right), "10.0.0.2"))
    return own, other


def readers(folder: Path) -> list[Reader]:
    """Return all readers of messages over a link; `folder` is for a list of paired devices."""
    openings = [
        write_open(sampling, VOCABULARY.fingerprint)
        for sampling in (GREEDY, Sampling(0.8, 40, 0.9, 5), Sampling(1e300, 0, 1.0, 5))
    ]
    likely = [Logprobs(-0.5, ids(5, 6), np.array([-0.5, -2.0])) for _ in range(4)]
    telling = write_verdict(ROUND, Verdict(2, ids(5, 6), 0.1, logprobs=tuple(likely)))
    asks = [
        verification_codec.write_verify(verify_request(at, ids(*range(1, 9)), drafted, logprobs))
        for at, drafted, logprobs in ((0, 0, None), (0, 4, None), (400, 1, None), (0, 2, 20))
    ]
    verdict = write_verdict(ROUND, Verdict(2, ids(5, 6), 0.1, passes=2, plausible=(True, True, False, True)))
    frames = [verdict, pb.VerifierFrame(busy=pb.Busy(round=ROUND, retry_ms=1))]
    hello = pb.HelloReply(protocol=PROTOCOL, vocabulary=bytes.fromhex(VOCABULARY.fingerprint), vocabulary_size=WORDS,
                          model="big", context_length=512, model_hash=bytes(32),
                          sampling=write_wanted(WANTED))  # fmt: skip
    own, other = paired(folder)
    nonce, host = bytes(32), Address("10.0.0.2", 1)
    offer = trust_pb.Offer(model="big", size=5, vocabulary=bytes(32))
    welcome = trust_pb.WelcomeReply(
        protocol=PROTOCOL, device=other.id.digest, version="1", rights=["verify", "files"], models=[offer],
        signature=other.sign(LABEL + nonce + other.id.digest + own.identity.id.digest),
    )  # fmt: skip
    code = Code(7, ("lamp", "otter"))
    spake = Exchange("A", code, other).spake
    greeting = trust_pb.PairHello(protocol=PROTOCOL, certificate=other.certificate.der, spake=spake)
    words = trust_pb.Introduction(name="desk", rights=["verify"], addresses=["10.0.0.2:50151", "[fe80::1]:5"])

    def window(data: bytes) -> None:
        message = parse_message(trust_pb.PairFrame, data)
        if message.WhichOneof("frame") == "hello":
            check_version(message.hello.protocol, "the other device")
            Certificate.of(message.hello.certificate)

    def introduced(data: bytes) -> None:
        read_introduction(other.certificate, data, frozenset(Right), "10.0.0.2")

    return [
        Reader("session", [*openings, *asks], _session),
        Reader("verdict", frames, _verdict(None)),
        Reader("probabilities", [telling], _verdict(2)),
        Reader("hello", [hello], _greeted),
        Reader("welcome", [welcome], lambda data: read_welcome(data, nonce, own, None, host, 0.1)),
        Reader("pairing", [trust_pb.PairFrame(hello=greeting)], window),
        Reader("introduction", [words], introduced),
        Reader("certificate", [other.certificate.der, own.identity.certificate.der], Certificate.of),
        Reader("spake", [spake], lambda data: Exchange("B", code, own.identity).agree(other.certificate, data)),
    ]
