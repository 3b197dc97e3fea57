"""The handshake between a device and a verifier: both must have the same protocol and the same vocabulary.

A device with another vocabulary fetches the verifier's tokenizer, and finds out whether they differ in unused tokens
alone (`client/verifier_selection.py`).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio

from edgellm.engine import Vocabulary
from edgellm.errors import SAME_VERSION, ProtocolError, VocabularyMismatch
from edgellm.rpc.channel import HELLO
from edgellm.rpc.protos import MAX_GREETING, PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.trust.identity import DeviceID
from edgellm.services.verification_codec import read_wanted
from edgellm.spec.protocols import Capabilities
from edgellm.spec.sampling import Choice, ModelSampling
from edgellm.state import MALFORMED, write_state
from edgellm.system import cache_dir

PREPARING = grpc.StatusCode.ABORTED
"""The status of a verifier's notice before it can verify, such as "measuring a.gguf"."""
_NAME = 200  # characters of a model's name
_LEAST_CONTEXT = 32  # tokens, without which no question and its reply fit; the most is llama.cpp's
_SAID = 1000  # characters of a verifier's own words


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """A verifier's description: its `capabilities`, the sampling that its model wants, and the SHA-256 of the model's
    file in hex, empty if unknown. `vocabulary` is the fingerprint of its vocabulary in hex. `chat_template` is its
    model's, empty if it is not told. `behind` says in a few words what verifies in its place, and how; empty: it
    verifies itself. `greeting` are the bytes of its HelloReply."""

    capabilities: Capabilities
    vocabulary: str
    sampling: ModelSampling
    model_hash: str = ""
    chat_template: str = ""
    behind: str = ""
    greeting: bytes = b""

    @property
    def model(self) -> str:
        return self.capabilities.name


async def greet(
    channel: grpc.aio.Channel, ours: Vocabulary, seconds: float, where: str, model: str = ""
) -> VerifierInfo:
    """Return the description of the verifier at the address `where`, which has `seconds` for each of its answers: of
    its `model` of that name, "" being its only one. Raises VocabularyMismatch, ProtocolError: the two do not fit;
    ModelNotFound: it has no such model; grpc.aio.AioRpcError: there is no answer."""
    said = pb.HelloRequest(
        protocol=PROTOCOL, vocabulary=bytes.fromhex(ours.fingerprint), vocabulary_size=ours.size, model=model
    )
    data = await channel.unary_unary(HELLO, pb.HelloRequest.SerializeToString, bytes)(said, timeout=seconds)
    reply = parse_message(pb.HelloReply, data, MAX_GREETING)
    check_version(reply.protocol, "the verifier")
    info = _described(reply, ours)
    if info.vocabulary != ours.fingerprint:
        raise mismatch(ours, reply, where)
    return info


def _described(reply: pb.HelloReply, ours: Vocabulary) -> VerifierInfo:
    """Return the description in a verifier's greeting. Raise ProtocolError."""
    for name, digest in (("model", reply.model_hash), ("tokenizer", reply.tokenizer)):
        if len(digest) not in (0, 32):
            raise ProtocolError(f"The verifier's {name} has a hash of {len(digest)} bytes.", SAME_VERSION)
    if reply.vocabulary.hex() == ours.fingerprint and reply.vocabulary_size != ours.size:
        raise ProtocolError(
            f"The verifier tells of {reply.vocabulary_size} tokens, of which {ours.size} are known.", SAME_VERSION
        )
    if not _LEAST_CONTEXT <= reply.context_length < 2**31:
        raise ProtocolError(f"The verifier has a context of {reply.context_length} tokens.", SAME_VERSION)
    capabilities = Capabilities(
        reply.model[:_NAME], reply.context_length, reply.logprobs, reply.penalties, reply.grammars,
        Choice(reply.likely_tokens if reply.HasField("likely_tokens") else None, reply.draws_itself),
    )  # fmt: skip
    return VerifierInfo(
        capabilities, reply.vocabulary.hex(), read_wanted(reply.sampling, "the verifier's device"),
        reply.model_hash.hex(), reply.chat_template, reply.behind[:_NAME], reply.SerializeToString(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeptGreeting:
    """The last greeting of a device's verifier, in hex, for when the device sleeps; `asked` is the model that was asked
    for."""

    asked: str
    greeting: str

    @classmethod
    def of(cls, device: DeviceID) -> KeptGreeting | None:
        """Return the kept greeting of a device's verifier, if any."""
        try:
            return cls(**json.loads(_kept(device).read_bytes()))
        except (OSError, *MALFORMED):
            return None

    @property
    def reply(self) -> pb.HelloReply:
        return pb.HelloReply.FromString(bytes.fromhex(self.greeting))

    def keep(self, device: DeviceID) -> None:
        with suppress(OSError):
            if KeptGreeting.of(device) != self:
                write_state(_kept(device), json.dumps(asdict(self)))

    def info(self, ours: Vocabulary, where: str) -> VerifierInfo:
        """Return the description of the verifier. Raise VocabularyMismatch where it fits another vocabulary."""
        reply = self.reply
        if ours.fingerprint != reply.vocabulary.hex():
            raise mismatch(ours, reply, where)
        return _described(reply, ours)


def _kept(device: DeviceID) -> Path:
    return cache_dir() / "verifiers" / f"{device}.json"


def printable(said: str) -> str:
    """Return a verifier's own words, cut to what a line can show: without what it would have its user do."""
    return "".join(filter(str.isprintable, said.partition("\n")[0]))[:_SAID]


def mismatch(ours: Vocabulary, reply: pb.HelloReply, where: str) -> VocabularyMismatch:
    """Return the error for a verifier at `where` whose vocabulary is not the device's."""
    return VocabularyMismatch(
        f"The draft model and the verifier at {where} differ in their vocabularies, of {ours.size} and"
        f" {reply.vocabulary_size} tokens.",
        "Choose another draft model with -m: the verifier does not send its tokenizer, by which drafts are translated.",
        reply.tokenizer.hex(),
    )
