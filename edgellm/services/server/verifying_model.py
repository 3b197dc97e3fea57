"""The models that a server verifies with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from edgellm.engine import ModelFile, Vocabulary
from edgellm.engine.gguf.tokenizer import tokenizer_file
from edgellm.errors import ModelNotFound, ModelUnsupported
from edgellm.rpc.channel import PROTOCOL
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.versions import MAX_GREETING
from edgellm.services.handshake import VerifierInfo
from edgellm.services.verification_codec import RequestLimits, write_wanted
from edgellm.spec.constraint import GrammarState
from edgellm.verifier.fairness import Queue
from edgellm.verifier.in_process import ColocatedVerifier, VerifierBackend

_MAX_TEMPLATE = MAX_GREETING - 4096  # bytes, so that devices can read the greeting


@dataclass(slots=True, eq=False)
class VerifyingModel:
    """A model that a server verifies with: its description for devices, and its backend.

    Beyond `max_waiting` requests at once, further ones are answered *busy*, first those of the devices with the most
    requests. `grammar` returns the grammar of a JSON schema; without it, replies cannot follow one. `size_bytes` is the
    size of the model's file, 0 if it is unknown: devices choose the largest one. `tokenizer` is the result of
    `tokenizer_file`, for devices with another tokenizer; b"" if there is none to send.
    """

    info: VerifierInfo
    vocabulary: Vocabulary
    backend: VerifierBackend
    max_waiting: int
    grammar: Callable[[str], GrammarState] | None = None
    size_bytes: int = 0
    tokenizer: bytes = b""
    queue: Queue = field(init=False)
    fingerprint: bytes = field(init=False)
    bounds: RequestLimits = field(init=False)

    def __post_init__(self) -> None:
        self.queue = Queue(self.max_waiting)
        self.fingerprint = bytes.fromhex(self.vocabulary.fingerprint)
        self.bounds = RequestLimits(self.vocabulary.size, self.info.capabilities.context_length)

    @property
    def name(self) -> str:
        return self.info.model

    def inside(self) -> ColocatedVerifier:
        """Return this verifier for use in this process; its requests are answered together with devices' requests."""
        return ColocatedVerifier(self.backend, self.info.capabilities, self.grammar)

    def described(self) -> pb.HelloReply:
        """Return the description for devices."""
        info, can = self.info, self.info.capabilities
        return pb.HelloReply(
            protocol=PROTOCOL,
            vocabulary=self.fingerprint,
            vocabulary_size=self.vocabulary.size,
            model=info.model,
            context_length=can.context_length,
            model_hash=bytes.fromhex(info.model_hash),
            chat_template=info.chat_template if len(info.chat_template.encode()) <= _MAX_TEMPLATE else "",
            logprobs=can.logprobs,
            penalties=can.penalties,
            grammars=can.grammars,
            drafts_extra=can.drafts_extra,
            behind=info.behind,
            likely_tokens=can.choice.likely,
            draws_itself=can.choice.draws_itself,
            tokenizer=hashlib.sha256(self.tokenizer).digest() if self.tokenizer else b"",
            sampling=write_wanted(info.sampling),
        )


def tokenizer_to_send(file: ModelFile, name: str) -> bytes:
    """Return the tokenizer of `file`, the model of this `name`, as devices are sent it; b"" where it cannot be sent."""
    with suppress(ModelUnsupported, OSError):  # the tokenizer is too long, or the file has been removed
        return tokenizer_file(file, name)
    return b""


def find_model(models: Sequence[VerifyingModel], wanted: str) -> VerifyingModel:
    """Return the model that a device wants; "" is the only one.

    Raises:
        ModelNotFound: there is no such model, or none is named and there are several; names the models that there are.
    """
    if not models:
        raise ModelNotFound("None of its servers has answered yet.", "Start one of them.")
    if not wanted and len(models) == 1:
        return models[0]
    for model in models:
        if model.name == wanted:
            return model
    named = ", ".join(model.name for model in models)
    what = f"It does not serve {wanted[:200]!r}, but {named}." if wanted else f"It serves several models: {named}."
    raise ModelNotFound(what, "Name one of them.")
