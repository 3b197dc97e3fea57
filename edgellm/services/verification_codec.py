"""Conversion between records and the messages of the protocol; all input is checked here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import numpy as np

from edgellm.engine.grammar import MAX_SCHEMA
from edgellm.errors import SAME_VERSION, ContextFull, ProtocolError
from edgellm.rpc.channel import MAX_CHUNK, MAX_EXTRA
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.spec.params import MAX_BIAS, MAX_BIASES, MAX_LOGPROBS, MAX_PENALTY, MIN_REPEAT, ReplyOptions
from edgellm.spec.protocols import HERE, Tenant, VerifyRequest
from edgellm.spec.sampling import ModelSampling
from edgellm.spec.types import NO_IDS, Chunk, Constraint, Ids, Logprobs, Penalties, Sampling, Verdict

_MAX_AFTER = 64  # tokens that end a thought
_ROUNDED = 1e-4  # rounding by which a log-probability may exceed 0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of a session's requests: ids below `vocabulary`, and no more than `context` tokens."""

    vocabulary: int
    context: int


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
    """Return the sampling parameters of an Open, checked. Raises ProtocolError: a number that cannot be meant."""
    if not (math.isfinite(message.temperature) and message.temperature >= 0.0):
        refuse(f"The temperature {message.temperature} is invalid.")
    if not 0.0 < message.top_p <= 1.0:
        refuse(f"The top_p {message.top_p} is invalid.")
    if not 0.0 <= message.min_p <= 1.0:
        refuse(f"The min_p {message.min_p} is invalid.")
    penalties = _read_penalties(message.penalties) if message.HasField("penalties") else None
    constraint = _read_constraint(message.constraint) if message.HasField("constraint") else None
    return Sampling(
        message.temperature, message.top_k, message.top_p, message.seed, message.min_p, penalties, constraint
    )


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


def _read_penalties(message: pb.Penalties) -> Penalties:
    amounts = {"repeat": message.repeat, "frequency": message.frequency, "presence": message.presence}
    for name, amount in amounts.items():
        if not -MAX_PENALTY <= amount <= MAX_PENALTY or (name == "repeat" and amount < MIN_REPEAT):  # NaN fails, too
            refuse(f"The {name} penalty {amount} is invalid.")
    ids, bias = list(message.ids), list(message.bias)
    if len(ids) != len(bias) or len(ids) > MAX_BIASES or any(one >= other for one, other in pairwise(ids)):
        refuse(f"{len(ids)} ids come with {len(bias)} biases, or are not ascending.")
    if not all(-MAX_BIAS <= amount <= MAX_BIAS for amount in bias):
        refuse("A bias is invalid.")
    return Penalties(
        message.repeat, message.frequency, message.presence, tuple(zip(ids, bias, strict=True)), message.start
    )


def write_verify(request: VerifyRequest) -> pb.DeviceFrame:
    verify = pb.Verify(
        round=request.round, position=request.position, prefix=request.prefix.tolist(),
        chunk=request.draft.ids.tolist(), extra=request.extra, copied=request.draft.retrieved,
        logprobs=request.logprobs,
    )  # fmt: skip
    return pb.DeviceFrame(verify=verify)


def read_verify(
    message: pb.Verify, bounds: RequestLimits, session: int, sampling: Sampling, tenant: Tenant = HERE
) -> VerifyRequest:
    """Return a request of a session, checked as far as possible without the session's tokens. Raises ProtocolError: it
    violates the protocol; ContextFull: it asks for more tokens than a session holds."""
    if len(message.chunk) > MAX_CHUNK or message.extra > MAX_EXTRA:
        refuse(f"A round has {len(message.chunk)} drafted and {message.extra} extra tokens.")
    if message.logprobs > MAX_LOGPROBS:
        refuse(f"A round asks for the log-probabilities of {message.logprobs} tokens in each place.")
    before = message.position + len(message.prefix)
    if before == 0:
        refuse("A round has no token before the chunk.")
    # the verifier's last token is never decoded, so it needs no room
    if before + len(message.chunk) + message.extra > bounds.context:
        raise ContextFull(
            f"{before} tokens, {len(message.chunk)} drafted and {message.extra} extra ones do not fit the verifier's"
            f" context of {bounds.context}.",
            "Shorten the prompt, or serve the verifier with a longer context.",
        )
    prefix = read_ids(message.prefix, bounds.vocabulary)
    chunk_ids = read_ids(message.chunk, bounds.vocabulary)
    chunk = Chunk(ids=chunk_ids, retrieved=message.copied)
    logprobs = message.logprobs if message.HasField("logprobs") else None
    return VerifyRequest(
        session, sampling, message.position, prefix, chunk, message.extra, logprobs, message.round, tenant
    )


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
    if message.accepted > drafted or not 1 <= len(message.tokens) <= drafted - message.accepted + request.extra + 1:
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
            f"A verdict of {places} tokens has {len(message.own)} log-probabilities, and {len(message.ids)} of the"
            " likeliest tokens."
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
