"""A verifier on another machine, as the decoding loop sees it, and the stream of one session to it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from time import monotonic

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
from edgellm.services.client.connection import Connection, OnWait, Target
from edgellm.services.client.link import PeerWatch, ServiceLink, Timing
from edgellm.services.handshake import VerifierInfo
from edgellm.services.verification_codec import read_verdict, write_open, write_verify
from edgellm.spec.lost_verifier import VerdictWork
from edgellm.spec.protocols import Capabilities, Verifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Ids, Verdict
from edgellm.spec.verifier import Session, VerifyRequest

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
        self.sent(data)
        return data

    def sent(self, data: bytes) -> None:
        """Count a frame to the verifier."""
        self.bytes_up += len(data)

    def received(self, data: bytes) -> None:
        """Count a frame from the verifier."""
        self.bytes_down += len(data)

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
        self._connection, self._opening, self._vocabulary = connection, opening, vocabulary
        self._link: ServiceLink | None = None
        self._asked: SentRequest | None = None
        self._beats = 0  # since the request
        self._sent = 0.0  # time of the request
        self.over = False  # either side ended the stream; the session's thread reads this, too

    def send(self, asked: SentRequest, data: bytes) -> None:
        """Ask for a verdict."""
        if self.over:
            asked.fail(lost("The verifier has ended the session."))
            return
        if self._link is None:
            if (channel := self._connection.loop_channel()) is None:
                asked.fail(lost("The verifier is not reachable."))
                return
            self._link = ServiceLink(channel, SESSION, PeerWatch(self._connection.timing))
            self._link.send(self._opening)
            asked.sent(self._opening)
            self._connection.loop_task(self._live(self._link, channel))
        self._asked, self._beats, self._sent = asked, 0, monotonic()
        self._link.watch.begin()
        self._link.send(data)

    def end(self) -> None:
        """Cancel the stream: the reply has ended or has given it up."""
        self._end(lost("The reply has ended."))

    def _end(self, error: EdgeError) -> None:
        self.over = True
        if self._link is not None:
            self._link.end()
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.fail(error)

    async def _live(self, link: ServiceLink, channel: grpc.aio.Channel) -> None:
        try:
            await link.run(self._take, self._beat)
            self._end(lost("The verifier has ended the session."))
        except VerifierSlow as error:  # it is asked again later, over the same connection
            self._connection.loop_pause()
            self._connection.patience.record_miss()
            self._end(error)
        except VerifierLost as error:
            self._connection.loop_lost(channel)
            self._end(error)
        except ProtocolError as error:
            self._connection.loop_pause()
            self._end(lost(f"The verifier violates the protocol: {error}"))
        except grpc.aio.AioRpcError as error:
            why = error.details() or error.code().name
            self.over = True
            if error.code() in _REFUSALS:
                self._connection.loop_pause()
                self._end(lost(f"The verifier refuses: {why}"))
            else:
                self._connection.loop_lost(channel)
                self._end(lost(f"The verifier was lost ({why})."))
        finally:
            self._end(lost("The connection to the verifier is closed."))

    def _take(self, data: bytes) -> None:
        """Handle one frame. Raise ProtocolError, and VerifierLost for a verifier that shuts down."""
        frame = parse_message(pb.VerifierFrame, data)
        kind = frame.WhichOneof("frame")
        if kind == "draining":
            raise lost("The verifier is shutting down.")
        asked, link = self._asked, self._link
        if kind is None or asked is None or link is None or getattr(frame, kind).round != asked.request.round:
            raise ProtocolError("The verifier sent an answer without a request.", SAME_VERSION)
        asked.received(data)
        if kind == "verdict":
            verdict = read_verdict(frame.verdict, asked.request, self._vocabulary)
            self._asked = None
            self._connection.loop_answered()
            passed = monotonic() - self._sent
            self._connection.patience.record(VerdictWork(asked.work.unseen, len(verdict.tokens)), passed)
            asked.settle(replace(verdict, seconds=min(verdict.seconds, passed)))
        elif kind == "need_prefix":
            if frame.need_prefix.position >= asked.position:
                raise ProtocolError("The verifier asks for tokens that it already has.", SAME_VERSION)
            link.send(asked.frame(frame.need_prefix.position))
        elif kind == "busy":
            wait = min(frame.busy.retry_ms, MAX_BUSY_MS) / 1e3
            self._connection.loop_pause(wait)
            self._asked = None
            again = f"This device continues alone and tries again in about {wait:g} seconds."
            asked.fail(VerifierBusy("The verifier is busy.", again, wait))
        else:
            asked.request.computed = frame.working.computed
            link.watch.progress(frame.working.step)

    def _beat(self, waited: float) -> None:
        """Check that the verifier that owes an answer is alive and within its limit. Raise VerifierLost otherwise."""
        if (asked := self._asked) is None or self._link is None:
            return
        self._beats += 1
        if trouble := self._link.watch.trouble(waited):
            raise lost(f"The verifier {trouble}.")
        limit = self._connection.patience.limit(asked.work)
        if self._beats * self._link.watch.beat > limit:
            raise VerifierSlow(
                f"The verifier has not answered within {limit:.1f} seconds, many times the expected time.",
                "This device continues alone and tries again by itself; check whether the verifier is overloaded.",
            )


def lost(what: str) -> VerifierLost:
    """Return the error for a verdict that will not come."""
    return VerifierLost(
        what, "This device continues alone and tries again by itself; check that the verifier is running."
    )


class RemoteVerifier(Verifier):
    """A verifier asked over the network. It is reconnected in the background when lost, and sessions are rebuilt."""

    def __init__(
        self,
        address: str | Address | ModelAddress,
        vocabulary: Vocabulary,
        *,
        timing: Timing = Timing(),
        trust: Trust | None = None,
        device: DeviceID | None = None,
        on_wait: OnWait = lambda _doing: None,
    ) -> None:
        """Connect to `HOST:PORT[#MODEL]`, for a draft model with this `vocabulary`; with `trust` by mutual TLS to a
        paired device, or to the given `device` only. Without a model, the verifier must have a single one.

        Raises:
            InvalidOption: not an address.
            EdgeError: as for `Connection`, which also explains `on_wait`.
        """
        where = address if isinstance(address, ModelAddress) else ModelAddress.parse(str(address))
        self._connection = Connection(Target(where, trust, device), vocabulary, timing, on_wait)
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
