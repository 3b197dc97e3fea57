"""A verifier that misbehaves on purpose, for the device's side of every fault."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from edgellm.engine import Vocabulary
from edgellm.rpc.address import Address
from edgellm.rpc.channel import SERVICE
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.services.verification_codec import write_wanted
from edgellm.spec.sampling import ModelSampling

# Given the rounds as they come in, and the call: yields frames, or raw bytes.
Script: TypeAlias = Callable[[Iterator[pb.Verify], grpc.ServicerContext], Iterable[pb.VerifierFrame | bytes]]


@contextmanager
def scripted(
    vocabulary: Vocabulary, script: Script = lambda _rounds, _context: (), hello: Mapping[str, Any] | None = None,
    tokenizer: Callable[[int], pb.TokenizerPart] | None = None,
) -> Iterator[Address]:  # fmt: skip
    """Serves `script` in every session; `hello` overrides fields of the handshake, at any time. `tokenizer` returns the
    part of the tokenizer from an offset on; without it there is no such call. Yields the address."""

    def greet(_request: pb.HelloRequest, _context: grpc.ServicerContext) -> pb.HelloReply:
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "vocabulary": bytes.fromhex(vocabulary.fingerprint),
            "vocabulary_size": vocabulary.size,
            "model": "scripted",
            "context_length": 512,
            "sampling": write_wanted(ModelSampling(0.7)),
        }
        return pb.HelloReply(**(fields | dict(hello or {})))

    def session(frames: Iterator[pb.DeviceFrame], context: grpc.ServicerContext) -> Iterator[bytes]:
        first = next(frames)
        assert first.WhichOneof("frame") == "open"
        for frame in script((frame.verify for frame in frames), context):
            yield frame if isinstance(frame, bytes) else frame.SerializeToString()

    def send(request: pb.TokenizerRequest, _context: grpc.ServicerContext) -> pb.TokenizerPart:
        assert tokenizer is not None
        return tokenizer(request.offset)

    calls = {
        "Hello": grpc.unary_unary_rpc_method_handler(
            greet, pb.HelloRequest.FromString, pb.HelloReply.SerializeToString
        ),
        "Session": grpc.stream_stream_rpc_method_handler(session, pb.DeviceFrame.FromString, bytes),
    }
    if tokenizer is not None:
        calls["Tokenizer"] = grpc.unary_unary_rpc_method_handler(
            send, pb.TokenizerRequest.FromString, pb.TokenizerPart.SerializeToString
        )
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield Address("127.0.0.1", port)
        finally:
            server.stop(None).wait()


def verdict(round: int, *tokens: int, accepted: int = 0) -> pb.VerifierFrame:  # noqa: A002
    return pb.VerifierFrame(verdict=pb.Verdict(round=round, accepted=accepted, tokens=tokens, passes=1))


def working(round: int, step: int = 0) -> pb.VerifierFrame:  # noqa: A002
    return pb.VerifierFrame(working=pb.Working(round=round, step=step))


def until_cancelled(context: grpc.ServicerContext) -> None:
    """Says nothing until the device gives up."""
    over = threading.Event()
    if context.add_callback(over.set):
        over.wait(120)


def gone(_rounds: Iterator[pb.Verify], context: grpc.ServicerContext) -> Iterable[pb.VerifierFrame]:
    """Ends each session at once, as a verifier that is lost."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
    return ()
