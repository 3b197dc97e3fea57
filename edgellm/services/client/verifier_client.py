"""A verifier on another machine, as the decoding loop sees it, and the stream of one session to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TypeAlias

import grpc
import grpc.aio
import numpy as np

from edgellm.engine import Vocabulary, common_prefix
from edgellm.errors import SAME_VERSION, EdgeError, ProtocolError, VerifierBusy, VerifierLost, VerifierSlow
from edgellm.rpc.address import Address, ModelAddress
from edgellm.rpc.channel import MAX_BUSY_MS, SESSION
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import parse_message
from edgellm.services.client.connection import Connection, PeerWatch, Timing
from edgellm.services.handshake import VerifierInfo
from edgellm.services.verification_codec import read_verdict, write_open, write_verify
from edgellm.spec.lost_verifier import VerdictWork
from edgellm.spec.protocols import Capabilities, Verifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Ids, Verdict
from edgellm.spec.verifier import Session, VerifyRequest

_Call: TypeAlias = grpc.aio.StreamStreamCall[bytes, bytes]


@dataclass(slots=True, eq=False)
class SentRequest:
    """A request on its way, which has all tokens in its prefix. The other end is taken to hold the first `position`
    tokens. The request's bytes so far count for the verdict."""

    request: VerifyRequest
    position: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    verdict: Future[Verdict] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.verdict.set_running_or_notify_cancel()  # nobody may cancel the verdict

    def frame(self, position: int) -> bytes:
        """Return the request's frame for a verifier that already holds `position` tokens.

        Raises:
            InvalidOption: a draft was drawn from something that cannot be sent.
        """
        self.position = position
        rest = replace(self.request, position=position, prefix=self.request.prefix[position:])
        data = write_verify(rest).SerializeToString()
        self.count(up=len(data))
        return data

    def count(self, *, up: int = 0, down: int = 0) -> None:
        """Count bytes that went to the verifier and came from it."""
        self.bytes_up += up
        self.bytes_down += down

    def read(self, tokens: int) -> None:
        """Note that the verifier has `tokens` of the text in its cache."""
        self.request.computed = tokens

    @property
    def work(self) -> VerdictWork:
        """Return the amount of the verifier's work for this verdict."""
        request = self.request
        return VerdictWork(len(request.prefix) - self.position + len(request.draft), 1 + request.extra)

    def settle(self, verdict: Verdict) -> None:
        """Answer with a verdict."""
        self.verdict.set_result(replace(verdict, bytes_up=self.bytes_up, bytes_down=self.bytes_down))

    def fail(self, error: EdgeError) -> None:
        """Answer with an error, unless there is an answer."""
        if not self.verdict.done():
            self.verdict.set_exception(error)

    def held(self) -> Ids | None:
        """Return the tokens that the verifier's session holds after this request; None if unknown."""
        if not self.verdict.done():
            return None
        if (error := self.verdict.exception()) is not None:  # a busy verifier has changed nothing
            return self.request.prefix[: self.position] if isinstance(error, VerifierBusy) else None
        verdict = self.verdict.result()
        return np.concatenate((self.request.prefix, self.request.draft.ids[: verdict.accepted], verdict.tokens[:-1]))


class Stream:
    """A gRPC stream. Any thread may make it; its methods are called in the connection's thread."""

    def __init__(self, connection: Connection, opening: bytes, vocabulary: int) -> None:
        """`opening` is the first frame; verdicts bring ids below `vocabulary`. Connects with the first request."""
        self._connection = connection
        self._opening = opening
        self._vocabulary = vocabulary
        self._channel: grpc.aio.Channel | None = None
        self._call: _Call | None = None
        self._writing = asyncio.Lock()
        self._asked: SentRequest | None = None
        timing = connection.timing
        self._watch = PeerWatch(timing.beat, timing.silent_beats, timing.stall)
        self._waited = 0  # heartbeats since the request
        self._sent = 0.0  # time of the request
        self._beating = False
        self.over = False  # either side ended the stream; the session's thread reads this, too

    def send(self, asked: SentRequest, data: bytes) -> None:
        """Ask for a verdict."""
        frames = [data]
        if self._call is None:
            self._channel = self._connection.loop_channel()
            if self._channel is None:
                asked.fail(lost("The verifier is not reachable."))
                return
            self._call = self._channel.stream_stream(SESSION, bytes, bytes)()  # type: ignore[call-arg]  # written to
            self._connection.loop_task(self._read(self._call))
            frames.insert(0, self._opening)
            asked.count(up=len(self._opening))
        elif self.over:
            asked.fail(lost("The verifier has ended the session."))
            return
        self._asked = asked
        self._waited, self._sent = 0, monotonic()
        self._watch.begin()
        self._next_beat()
        self._connection.loop_task(self._write(self._call, frames))

    def end(self) -> None:
        """Cancel the stream: the reply has ended or has given it up."""
        if self._call is not None:
            self._call.cancel()
        self._fail(lost("The reply has ended."))

    async def _write(self, call: _Call, frames: list[bytes]) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader finds the stream ended, and why
            async with self._writing:
                for frame in frames:
                    await call.write(frame)

    async def _read(self, call: _Call) -> None:
        try:
            while isinstance(data := await call.read(), bytes):
                self._take(call, data)
            self._fail(lost("The verifier has ended the session."))
        except grpc.aio.AioRpcError as error:
            self.over = True
            self._ended(error.code(), error.details() or error.code().name)
        except ProtocolError as error:
            call.cancel()
            self._connection.loop_pause()
            self._fail(lost(f"The verifier violates the protocol: {error}"))
        finally:
            self.over = True
            self._fail(lost("The connection to the verifier is closed."))

    def _take(self, call: _Call, data: bytes) -> None:
        """Handle one frame."""
        frame = parse_message(pb.VerifierFrame, data)
        kind = frame.WhichOneof("frame")
        if kind == "draining":
            self._lost("is shutting down")
            return
        asked = self._asked
        if kind is None or asked is None or getattr(frame, kind).round != asked.request.round:
            raise ProtocolError("The verifier sent an answer without a request.", SAME_VERSION)
        self._watch.heard()
        asked.count(down=len(data))
        if kind == "verdict":
            verdict = read_verdict(frame.verdict, asked.request, self._vocabulary)
            self._asked = None
            self._connection.loop_answered()
            work, passed = VerdictWork(asked.work.unseen, len(verdict.tokens)), monotonic() - self._sent
            self._connection.patience.record(work, passed)
            asked.settle(replace(verdict, seconds=min(verdict.seconds, passed)))
        elif kind == "need_prefix":
            if frame.need_prefix.position >= asked.position:
                raise ProtocolError("The verifier asks for tokens that it already has.", SAME_VERSION)
            self._connection.loop_task(self._write(call, [asked.frame(frame.need_prefix.position)]))
        elif kind == "busy":
            wait = min(frame.busy.retry_ms, MAX_BUSY_MS) / 1e3
            self._connection.loop_pause(wait)
            again = f"This device continues alone and tries again in about {wait:g} seconds."
            self._fail(VerifierBusy("The verifier is busy.", again, wait))
        else:
            asked.read(frame.working.computed)
            self._watch.progress(frame.working.step)

    def _ended(self, code: grpc.StatusCode, why: str) -> None:
        """Handle the end of the stream: a refusal by the verifier, or a lost connection."""
        if code in _REFUSALS:
            self._connection.loop_pause()
            self._fail(lost(f"The verifier refuses: {why}"))
        else:
            self._lost(f"was lost ({why})")

    def _lost(self, reason: str) -> None:
        if self._channel is not None:
            self._connection.loop_lost(self._channel)
        self._fail(lost(f"The verifier {reason}."))

    def _fail(self, error: EdgeError) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.fail(error)

    def _next_beat(self) -> None:
        if not self._beating:
            self._beating = True
            loop = asyncio.get_running_loop()
            loop.call_later(self._watch.beat, self._beat, loop.time())

    def _beat(self, since: float) -> None:
        """Check that the verifier that owes an answer is alive and within its limit."""
        self._beating = False
        if (asked := self._asked) is None:
            return
        self._waited += 1
        limit = self._connection.patience.limit(asked.work)
        if trouble := self._watch.trouble(asyncio.get_running_loop().time() - since):
            self._hangs(trouble)
        elif self._waited * self._watch.beat > limit:
            self._gives_up(limit)
        else:
            self._next_beat()

    def _gives_up(self, limit: float) -> None:
        """Give up a verdict that is too slow; the verifier is asked again later, over the same connection."""
        self._connection.loop_pause()
        self._connection.patience.record_miss()
        self._fail(
            VerifierSlow(
                f"The verifier has not answered within {limit:.1f} seconds, many times the expected time.",
                "This device continues alone and tries again by itself; check whether the verifier is overloaded.",
            )
        )
        if self._call is not None:
            self._call.cancel()

    def _hangs(self, how: str) -> None:
        self._lost(how)
        if self._call is not None:
            self._call.cancel()


def lost(what: str) -> VerifierLost:
    """Return the error for a verdict that will not come."""
    return VerifierLost(
        what, "This device continues alone and tries again by itself; check that the verifier is running."
    )


_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


class RemoteVerifier(Verifier):
    """A verifier asked over the network. It is reconnected in the background when lost, and sessions are rebuilt."""

    def __init__(
        self,
        address: str | Address | ModelAddress,
        vocabulary: Vocabulary,
        *,
        timing: Timing | None = None,
        trust: Trust | None = None,
        device: DeviceID | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """Connect to `HOST:PORT[#MODEL]`, for a draft model with this `vocabulary`; with `trust` by mutual TLS to a
        paired device, or to the given `device` only. Without a model, the verifier must have a single one. `on_wait` as
        for `Connection`.

        Raises:
            InvalidOption: not an address.
            PairingRequired: the address leaves this machine, and there is no `trust`, or no device is paired.
            NotPaired, NotPermitted, IdentityClash: it is not a device that trusts this one, and is trusted.
            VerifierUnreachable: there is no answer within two seconds.
            VocabularyMismatch: the two are of different tokenizers; names the first differing token.
            ProtocolError: the other side has another version.
            ModelNotFound: it has no such model, or several and none is named; names the verifier's models.
        """
        where = address if isinstance(address, ModelAddress) else ModelAddress.parse(str(address))
        self._connection = Connection(
            where.address, vocabulary, timing or Timing(), trust, device, where.model, on_wait
        )  # fmt: skip
        self._vocabulary = vocabulary

    @property
    def capabilities(self) -> Capabilities:
        """Return the verifier's capabilities; a gateway to some stock servers has fewer."""
        return self._connection.peer.capabilities

    @property
    def info(self) -> VerifierInfo:
        """Return the verifier's description."""
        return self._connection.peer

    def up(self) -> bool:
        """Return whether the verifier is connected and takes requests."""
        return self._connection.ready()

    def open(self, state: GenerationState) -> Session:
        """Open a session, which becomes ready as soon as the verifier is reachable."""
        line = _Line(self._connection, self._vocabulary.size)
        return Session(
            state, line.send, ready=self._connection.ready, close=line.close, reads=self._connection.peer.model
        )

    def close(self) -> None:
        self._connection.close()


class _Line:
    """The requests of one reply: over a stream, which is replaced where it has ended or cannot be trusted."""

    def __init__(self, connection: Connection, vocabulary: int) -> None:
        self._connection, self._vocabulary = connection, vocabulary
        self._stream: Stream | None = None
        self._last: SentRequest | None = None

    def send(self, request: VerifyRequest) -> Future[Verdict]:
        """Send the part of a request that the verifier lacks; return its verdict."""
        connection, peer = self._connection, self._connection.peer
        if why := peer.capabilities.refusal(request.sampling):  # the verifier may have changed since the reply began
            raise lost(f"The verifier is a gateway to another server now, and {why}.")
        stream, held = self._stream, self._last.held() if self._last is not None else None
        if stream is None or stream.over or held is None:  # the other end's tokens are unknown: begin again
            self.close()
            # the verifier's own fingerprint: `greet` has compared the vocabularies
            opening = write_open(request.sampling, peer.vocabulary, connection.model)
            stream, held = Stream(connection, opening.SerializeToString(), self._vocabulary), NO_IDS
        asked = SentRequest(request)
        data = asked.frame(common_prefix(held, request.prefix))
        self._stream, self._last = stream, asked
        if not connection.post(stream.send, asked, data):
            asked.fail(lost("The connection to the verifier is closed."))
        return asked.verdict

    def close(self) -> None:
        """End the stream."""
        if self._stream is not None:
            self._connection.post(self._stream.end)
            self._stream = None
