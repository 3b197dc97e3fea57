"""The handshake between a device and a verifier: both must have the same protocol and the same tokenizer.

Equal fingerprints settle it. Otherwise the device asks for the verifier's blocks of tokens that differ from its own,
one after another: vocabularies of one tokenizer differ in a few blocks of unused tokens.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import grpc.aio

from edgellm.engine import Vocabulary
from edgellm.engine.vocabulary import BLOCK, block_hash
from edgellm.errors import SAME_VERSION, ModelNotFound, ProtocolError, VocabularyMismatch
from edgellm.rpc.channel import COMPARE_VOCABULARY, HELLO, PROTOCOL
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.trust.identity import DeviceID
from edgellm.rpc.versions import MAX_GREETING, MAX_VOCABULARY, check_version, parse_message
from edgellm.services.verification_codec import read_wanted
from edgellm.spec.protocols import Capabilities
from edgellm.spec.sampling import Choice, ModelSampling
from edgellm.state import MALFORMED, write_state
from edgellm.system import cache_dir

PREPARING = grpc.StatusCode.ABORTED
"""The status of a verifier's notice before it can verify, such as "measuring a.gguf"."""
_ROUNDS = 100  # most blocks that are asked for: Gemma's 6,242 unused tokens are in 25
_SHOWN = 40  # bytes of a token that a message shows
_NAME = 200  # characters of a model's name
_LEAST_CONTEXT = 32  # tokens, without which no question and its reply fit; the most is llama.cpp's
_SAID = 1000  # characters of a verifier's own words


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """A verifier's description: its `capabilities`, the sampling that its model wants, and the SHA-256 of the model's
    file in hex, empty if unknown. `vocabulary` is the fingerprint of its vocabulary in hex, and `shared_tokens` is
    `VocabularyMatch.shared`. `chat_template` is its model's, empty if it is not told. `behind` says in a few words what
    verifies in its place, and how; empty: it verifies itself. `greeting` are the bytes of its HelloReply."""

    capabilities: Capabilities
    vocabulary: str
    shared_tokens: int
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
    check_version(reply.protocol, PROTOCOL, "the verifier")
    info = _described(reply, ours)
    if info.vocabulary != ours.fingerprint:
        await _compare(channel, ours, reply, seconds, where, model)
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
        capabilities, reply.vocabulary.hex(), min(ours.size, reply.vocabulary_size),
        read_wanted(reply.sampling, "the verifier's device"), reply.model_hash.hex(), reply.chat_template,
        reply.behind[:_NAME], reply.SerializeToString(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeptGreeting:
    """The last greeting of a device's verifier, in hex, and the vocabulary that it fits, for when the device sleeps;
    `asked` is the model that was asked for."""

    vocabulary: str
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
        if ours.fingerprint not in (self.vocabulary, reply.vocabulary.hex()):
            raise mismatch(ours, reply.vocabulary_size, pb.VocabularyBlock(), where, reply.tokenizer.hex())
        return _described(reply, ours)


def _kept(device: DeviceID) -> Path:
    return cache_dir() / "verifiers" / f"{device}.json"


async def _compare(
    channel: grpc.aio.Channel, ours: Vocabulary, reply: pb.HelloReply, seconds: float, where: str, model: str
) -> None:
    """Check that the verifier's vocabulary differs from ours in nothing but unused tokens."""
    compare = channel.unary_unary(COMPARE_VOCABULARY, pb.VocabularyHashes.SerializeToString, bytes)
    theirs = list(ours.block_hashes)
    for _ in range(_ROUNDS):
        data = await compare(pb.VocabularyHashes(blocks=theirs, model=model), timeout=seconds)
        block = parse_message(pb.VocabularyBlock, data, MAX_VOCABULARY)
        at, n = block.first_token // BLOCK, len(block.tokens)
        if not n and block.first_token == reply.vocabulary_size and len(theirs) == -(-block.first_token // BLOCK):
            missing = range(reply.vocabulary_size, ours.size)
            # fingerprints that differ where no block does are a contradiction
            if theirs == list(ours.block_hashes) or any(ours.conflicts(token, None) for token in missing):
                break
            return
        if n > BLOCK or n != len(block.kinds) or block.first_token % BLOCK or at > len(theirs):
            break
        entries = zip(block.tokens, block.kinds, strict=True)
        if any(ours.conflicts(token, entry) for token, entry in enumerate(entries, start=block.first_token)):
            break
        # take the verifier's hash, so that its next answer is about another block
        theirs[at:] = [block_hash(block.tokens, block.kinds), *theirs[at + 1 :]] if n else []
    else:
        raise ProtocolError(f"The verifier at {where} describes no vocabulary.", SAME_VERSION)
    raise mismatch(ours, reply.vocabulary_size, block, where, reply.tokenizer.hex())


def printable(said: str) -> str:
    """Return a verifier's own words, cut to what a line can show: without what it would have its user do."""
    return "".join(filter(str.isprintable, said.partition("\n")[0]))[:_SAID]


def model_missing(where: str, said: str) -> ModelNotFound:
    """Return the error for a verifier without the model, as it has `said`."""
    return ModelNotFound(
        f"The verifier at {where}: {printable(said)}", f"Name a model behind the address: {where}#MODEL"
    )


def first_different_block(ours: Vocabulary, theirs: pb.VocabularyHashes) -> pb.VocabularyBlock:
    """Return the verifier's tokens of the first block that differs from the device's hashes; none if all agree."""
    block = ours.first_different_block(theirs.blocks)
    if block is None:
        return pb.VocabularyBlock(first_token=ours.size)
    start, end = block * BLOCK, min((block + 1) * BLOCK, ours.size)
    return pb.VocabularyBlock(first_token=start, tokens=ours.pieces[start:end], kinds=ours.kinds[start:end])


def mismatch(
    ours: Vocabulary, size: int, block: pb.VocabularyBlock, where: str, tokenizer: str = ""
) -> VocabularyMismatch:
    """Return an error that names the first token on which device and verifier (`size` tokens, at `where`) differ;
    `tokenizer` as in `VocabularyMismatch`."""
    sent = islice(zip(block.tokens, block.kinds, strict=False), BLOCK)
    theirs = dict(enumerate(sent, start=block.first_token))
    mine = range(block.first_token, min(block.first_token + BLOCK, ours.size))
    for token in range(block.first_token, block.first_token + BLOCK):
        here, there = ours.entry(token), theirs.get(token)
        if (token in theirs or token in mine) and ours.conflicts(token, there):
            found = (
                f"token {token} is {_shown(here, there)} for the draft model and {_shown(there, here)} for the verifier"
            )
            break
    else:
        found = "their fingerprints differ"
    return VocabularyMismatch(
        f"The draft model and the verifier at {where} differ in their vocabularies, of {ours.size} and {size} tokens:"
        f" {found}.",
        "Choose another draft model with -m: the verifier does not send its tokenizer, by which drafts are translated.",
        tokenizer,
    )


def _shown(token: tuple[bytes, int] | None, other: tuple[bytes, int] | None) -> str:
    if token is None:
        return "missing"
    piece, kind = token
    text = repr(piece[:_SHOWN])[1:] + ("…" if len(piece) > _SHOWN else "")
    return f"{text} (kind {kind})" if other is not None and other[0] == piece else text
