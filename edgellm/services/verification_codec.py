"""Conversion between records and the messages of the protocol; all input is checked here. And the greeting of a device
and a verifier: both must have the same protocol and the same vocabulary.

A device with another vocabulary fetches the verifier's tokenizer, and finds out whether they differ in unused tokens
alone (`client/verifier_selection.py`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
import numpy as np

from edgellm.engine import Vocabulary
from edgellm.engine.grammar.json_schema import MAX_SCHEMA
from edgellm.errors import SAME_VERSION, ContextFull, InvalidOption, ProtocolError, VocabularyMismatch
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO, MAX_CHUNK, MAX_EXTRA
from edgellm.rpc.link import Endpoint
from edgellm.rpc.protos import MAX_GREETING, PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.trust.identity import DeviceID
from edgellm.spec.params import MAX_LOGPROBS, ReplyOptions
from edgellm.spec.protocols import HERE, Capabilities, Tenant, VerifyRequest
from edgellm.spec.sampling import Choice, ModelSampling
from edgellm.spec.types import NO_IDS, Chunk, Constraint, Ids, Logprobs, Penalties, Sampling, Verdict
from edgellm.state import read_cached, write_cached
from edgellm.system import cache_dir

_MAX_AFTER = 64  # tokens that end a thought
_ROUNDED = 1e-4  # rounding by which a log-probability may exceed 0
_ALL_SAID = ModelSampling(0.0)  # for a message that leaves nothing to the model


def write_open(sampling: Sampling, fingerprint: str, model: str = "") -> pb.DeviceFrame:
    """Return the first frame of a session with the verifier's `model`, "" being its only one; `fingerprint` is the
    vocabulary's, in hex."""
    wanted, vocabulary = write_sampling(sampling), bytes.fromhex(fingerprint)
    return pb.DeviceFrame(open=pb.Open(protocol=PROTOCOL, vocabulary=vocabulary, sampling=wanted, model=model))


def write_sampling(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed & (2**64 - 1),
        min_p=sampling.min_p,
        penalties=None if sampling.penalties is None else _write_penalties(sampling.penalties),
        constraint=None if sampling.constraint is None else pb.Constraint(
            schema=sampling.constraint.schema, start=sampling.constraint.start, after=sampling.constraint.after
        ),
    )  # fmt: skip


def read_sampling(message: pb.Sampling) -> Sampling:
    """Return the sampling parameters of an Open, checked as those of a reply here are. Raises ProtocolError: a number
    that cannot be meant."""
    said = message.penalties if message.HasField("penalties") else pb.Penalties(repeat=1.0)
    if len(said.ids) != len(said.bias) or any(one >= other for one, other in pairwise(said.ids)):
        refuse(f"{len(said.ids)} ids come with {len(said.bias)} biases, or are not ascending.")
    try:
        asked = ReplyOptions(
            temperature=message.temperature, top_k=message.top_k, top_p=message.top_p, min_p=message.min_p,
            seed=message.seed, repeat_penalty=said.repeat, frequency_penalty=said.frequency,
            presence_penalty=said.presence, logit_bias=dict(zip(said.ids, said.bias, strict=True)),
        )  # fmt: skip
    except InvalidOption as error:
        refuse(error.what)
    constraint = _read_constraint(message.constraint) if message.HasField("constraint") else None
    return replace(asked.sampling(_ALL_SAID, said.start), constraint=constraint)


def write_wanted(sampling: ModelSampling) -> pb.Sampling:
    """Convert the sampling that a model wants to its message; its origin is for the other side to name."""
    return write_sampling(ReplyOptions(seed=0).sampling(sampling))


def read_wanted(message: pb.Sampling, origin: str) -> ModelSampling:
    """Return the sampling that a model wants, checked, as said by `origin`."""
    said = read_sampling(message)
    repeat = 1.0 if said.penalties is None else said.penalties.repeat
    return ModelSampling(said.temperature, said.top_k, said.top_p, said.min_p, repeat, origin)


def _read_constraint(message: pb.Constraint) -> Constraint:
    if len(message.schema) > MAX_SCHEMA or len(message.after) > _MAX_AFTER:
        refuse(f"A schema has {len(message.schema)} characters, and {len(message.after)} tokens before it.")
    if any(token >= 2**31 for token in message.after):
        refuse("A token before a schema is outside every vocabulary.")
    return Constraint(message.schema, message.start, tuple(message.after))


def _write_penalties(penalties: Penalties) -> pb.Penalties:
    return pb.Penalties(
        repeat=penalties.repeat, frequency=penalties.frequency, presence=penalties.presence, start=penalties.start,
        ids=[token for token, _ in penalties.bias], bias=[amount for _, amount in penalties.bias],
    )  # fmt: skip


def write_verify(request: VerifyRequest) -> pb.DeviceFrame:
    verify = pb.Verify(
        round=request.round, position=request.position, prefix=request.prefix.tolist(),
        chunk=request.draft.ids.tolist(), extra=request.extra, copied=request.draft.retrieved,
        logprobs=request.logprobs,
    )  # fmt: skip
    return pb.DeviceFrame(verify=verify)


def read_verify(
    message: pb.Verify, vocabulary: int, context: int, session: int, sampling: Sampling, tenant: Tenant = HERE
) -> VerifyRequest:
    """Return a request of a session, which holds `context` tokens below `vocabulary`, checked as far as is possible
    without the session's tokens. Raises ProtocolError: it violates the protocol; ContextFull: it asks for more tokens
    than a session holds."""
    if len(message.chunk) > MAX_CHUNK or message.extra > MAX_EXTRA:
        refuse(f"A round has {len(message.chunk)} drafted and {message.extra} extra tokens.")
    if message.logprobs > MAX_LOGPROBS:
        refuse(f"A round asks for the log-probabilities of {message.logprobs} tokens in each place.")
    before = message.position + len(message.prefix)
    if before == 0:
        refuse("A round has no token before the chunk.")
    # the verifier's last token is never decoded, so it needs no room
    if before + max(len(message.chunk), message.extra) > context:
        raise ContextFull(
            f"{before} tokens, {len(message.chunk)} drafted and {message.extra} extra ones do not fit the verifier's"
            f" context of {context}.",
            "Shorten the prompt, or serve the verifier with a longer context.",
        )
    prefix = read_ids(message.prefix, vocabulary)
    chunk_ids = read_ids(message.chunk, vocabulary)
    chunk = Chunk(ids=chunk_ids, retrieved=message.copied)
    logprobs = message.logprobs if message.HasField("logprobs") else None
    return VerifyRequest(
        session, sampling, message.position, prefix, chunk, message.extra, logprobs, message.round, tenant
    )


def text_after(request: VerifyRequest, verdict: Verdict) -> Ids:
    """Return the tokens that a session holds after the verdict on `request`, which has the whole text."""
    return np.concatenate((request.prefix, request.draft.ids[: verdict.accepted], verdict.tokens[:-1]))


def write_verdict(round: int, verdict: Verdict) -> pb.VerifierFrame:  # noqa: A002 - the contract's own word
    plausible = np.packbits(np.array(verdict.plausible or (), bool), bitorder="little").tobytes()
    message = pb.Verdict(
        round=round, accepted=verdict.accepted, tokens=verdict.tokens.tolist(), seconds=verdict.seconds,
        passes=verdict.passes, plausible=plausible, cached=verdict.cached,
        logprobs=_write_logprobs(verdict.logprobs) if verdict.logprobs else None,
    )  # fmt: skip
    return pb.VerifierFrame(verdict=message)


def read_verdict(message: pb.Verdict, request: VerifyRequest, vocabulary: int) -> Verdict:
    """Return the verdict on `request`, without the bytes that it cost. Raises ProtocolError: it does not answer
    `request`."""
    drafted = len(request.draft)
    if message.accepted > drafted or not 0 < len(message.tokens) <= max(drafted, request.extra) + 1 - message.accepted:
        refuse(
            f"A verdict accepts {message.accepted} of {drafted} drafted tokens and has {len(message.tokens)} tokens."
        )
    if not (math.isfinite(message.seconds) and message.seconds >= 0.0):
        refuse(f"A verdict reports an invalid time of {message.seconds} seconds.")
    if message.passes > drafted + request.extra + 1:  # each judges a token at least
        refuse(f"A verdict reports {message.passes} passes for {drafted} drafted tokens and {request.extra} more.")
    tokens = read_ids(message.tokens, vocabulary)
    likely = _plausible(message.plausible, drafted) if request.draft.retrieved and message.plausible else None
    told: tuple[Logprobs, ...] = ()
    if request.logprobs is not None:
        told = _logprobs(message.logprobs, message.accepted + len(message.tokens), request.logprobs, vocabulary)
    return Verdict(
        message.accepted, tokens, seconds=message.seconds, passes=message.passes, plausible=likely, logprobs=told,
        cached=min(message.cached, request.position + len(request.prefix)),
    )  # fmt: skip


def _write_logprobs(told: Sequence[Logprobs]) -> pb.Logprobs:
    message = pb.Logprobs(own=[one.own for one in told])
    for one in told:
        message.ids.extend(one.ids.tolist())
        message.likeliest.extend(one.logprobs.tolist())
    return message


def _logprobs(message: pb.Logprobs, places: int, most: int, vocabulary: int) -> tuple[Logprobs, ...]:
    most = min(most, vocabulary)
    if len(message.own) != places or not len(message.ids) == len(message.likeliest) == places * most:
        refuse(
            f"A verdict of {places} tokens has {len(message.own)} log-probabilities and {len(message.ids)} likely ids."
        )
    own, values = np.fromiter(message.own, np.float64), np.fromiter(message.likeliest, np.float64)
    if not all(((-np.inf < some) & (some < _ROUNDED)).all() for some in (own, values)):  # NaN fails, too
        refuse("A verdict has an invalid log-probability.")
    ids = read_ids(message.ids, vocabulary).reshape(places, most)
    return tuple(map(Logprobs, own.tolist(), ids, values.reshape(places, most)))


def _plausible(bits: bytes, drafted: int) -> tuple[bool, ...]:
    if len(bits) != (drafted + 7) // 8:
        refuse(f"A verdict on {drafted} copied tokens has plausibility bits for {8 * len(bits)}.")
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=drafted, bitorder="little")
    return tuple(flags.astype(bool).tolist())


def read_ids(tokens: Iterable[int], vocabulary: int) -> Ids:
    """Return ids, checked to be below `vocabulary`. Raises ProtocolError otherwise."""
    wide = np.fromiter(tokens, dtype=np.int64)
    if not len(wide):
        return NO_IDS
    if int(wide.max()) >= vocabulary:
        refuse(f"Token {int(wide.max())} is outside the vocabulary of {vocabulary} tokens.")
    return wide.astype(np.int32)


def refuse(what: str) -> NoReturn:
    raise ProtocolError(what, SAME_VERSION)


PREPARING = grpc.StatusCode.ABORTED
"""The status of a verifier's notice before it can verify, such as "measuring a.gguf"."""
SAID = 500  # characters of another device's own words


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """A verifier's description: its `capabilities`, the sampling that its model wants, and the SHA-256 of the model's
    file in hex, empty if unknown. `chat_template` is its model's, empty if it is not told. `behind` says in a few words
    what verifies in its place, and how; empty: it verifies itself. `greeting` is what says so."""

    capabilities: Capabilities
    sampling: ModelSampling
    model_hash: str
    chat_template: str
    behind: str
    greeting: pb.HelloReply

    @property
    def model(self) -> str:
        return self.capabilities.name


async def greet(channel: grpc.aio.Channel, ours: Vocabulary, where: Endpoint, seconds: float) -> VerifierInfo:
    """Return the description of the verifier at `where`, which has `seconds` for its answer. Raises VocabularyMismatch,
    ProtocolError: the two do not fit; ModelNotFound: it has no such model; grpc.aio.AioRpcError: there is no answer."""
    said = pb.HelloRequest(protocol=PROTOCOL, model=where.model)
    data = await channel.unary_unary(HELLO, pb.HelloRequest.SerializeToString, bytes)(said, timeout=seconds)
    reply = parse_message(pb.HelloReply, data, MAX_GREETING)
    check_version(reply.protocol, "the verifier")
    return described(reply, ours, where.address)


def described(reply: pb.HelloReply, ours: Vocabulary, where: Address) -> VerifierInfo:
    """Return the description in the greeting of the verifier at `where`. Raise VocabularyMismatch and ProtocolError."""
    for name, digest in (("model", reply.model_hash), ("tokenizer", reply.tokenizer)):
        if len(digest) not in (0, 32):
            raise ProtocolError(f"The verifier's {name} has a hash of {len(digest)} bytes.", SAME_VERSION)
    if reply.vocabulary.hex() != ours.fingerprint:
        raise VocabularyMismatch(
            f"The draft model and the verifier at {where} differ in their vocabularies, of {ours.size} and"
            f" {reply.vocabulary_size} tokens.",
            "Choose another draft model with -m: the verifier does not send its tokenizer, by which drafts are"
            " translated.",
            reply.tokenizer.hex(),
        )
    if reply.vocabulary_size != ours.size:
        raise ProtocolError(
            f"The verifier tells of {reply.vocabulary_size} tokens, of which {ours.size} are known.", SAME_VERSION
        )
    if not 0 < reply.context_length < 2**31:
        raise ProtocolError(f"The verifier has a context of {reply.context_length} tokens.", SAME_VERSION)
    capabilities = Capabilities(
        reply.model[:SAID], reply.context_length, reply.logprobs, reply.penalties, reply.grammars,
        Choice(reply.likely_tokens if reply.HasField("likely_tokens") else None, reply.draws_itself),
    )  # fmt: skip
    return VerifierInfo(
        capabilities, read_wanted(reply.sampling, "the verifier's device"), reply.model_hash.hex(),
        reply.chat_template, reply.behind[:SAID], reply,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeptGreeting:
    """The last greeting of a device's verifier, for when the device sleeps; `asked` is the model that was asked for."""

    asked: str
    reply: pb.HelloReply

    @classmethod
    def of(cls, device: DeviceID) -> "KeptGreeting | None":
        """Return the kept greeting of a device's verifier, if any."""

        def read(found: Any) -> KeptGreeting:
            data = bytes.fromhex(found["greeting"])
            return cls(str(found["asked"]), parse_message(pb.HelloReply, data, MAX_GREETING))

        return read_cached(_kept(device), read)

    def keep(self, device: DeviceID) -> None:
        if KeptGreeting.of(device) != self:
            write_cached(_kept(device), {"asked": self.asked, "greeting": self.reply.SerializeToString().hex()})


def _kept(device: DeviceID) -> Path:
    return cache_dir() / "verifiers" / f"{device}.json"


def printable(said: str) -> str:
    """Return a verifier's own words, cut to what a line can show: without what it would have its user do."""
    return "".join(filter(str.isprintable, said.partition("\n")[0]))[:SAID]
