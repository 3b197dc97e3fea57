"""A verifier on another machine, as the decoding loop sees it, and the stream of each reply to it."""

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
from edgellm.rpc.trust.identity import DeviceID
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import parse_message
from edgellm.services.client.connection import Connection, OnWait
from edgellm.services.client.link import PeerWatch, ServiceLink, Timing
from edgellm.services.handshake import VerifierInfo, printable
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
        paired device, or to the given `device` only. Without a model, the verifier must have a single one. Raises
        InvalidOption: not an address; EdgeError: as for `Connection`, which also explains `on_wait`."""
        where = address if isinstance(address, ModelAddress) else ModelAddress.parse(str(address))
        self._connection = Connection(where, vocabulary, timing, trust, device, on_wait)
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
        stream = Stream(self._connection, self._vocabulary.size)
        return Session(
            state, stream.send, ready=self._connection.ready, close=stream.close, reads=self._connection.peer.model
        )

    def close(self) -> None:
        self._connection.close()


@dataclass(slots=True, eq=False)
class SentRequest:
    """A request, which has all tokens in its prefix. The verifier is taken to hold the first `position` tokens. The
    bytes so far, either way, count for the verdict."""

    request: VerifyRequest
    position: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    verdict: Future[Verdict] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.verdict.set_running_or_notify_cancel()  # nobody may cancel the verdict

    def frame(self, position: int) -> bytes:
        """Return the request's frame for a verifier that already holds `position` tokens."""
        self.position = position
        rest = replace(self.request, position=position, prefix=self.request.prefix[position:])
        return self.sent(write_verify(rest).SerializeToString())

    def sent(self, data: bytes) -> bytes:
        """Count a frame to the verifier, and return it."""
        self.bytes_up += len(data)
        return data

    def received(self, data: bytes) -> None:
        """Count a frame from the verifier."""
        self.bytes_down += len(data)

    @property
    def work(self) -> VerdictWork:
        """Return the amount of the verifier's work for this verdict."""
        request = self.request
        return VerdictWork(len(request.prefix) - self.position + len(request.draft), 1 + request.extra)

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
    """The requests of one reply over a gRPC stream, which is begun anew where it has ended, or where the tokens that
    the verifier holds are unknown. All but `send` and `close` runs in the connection's thread."""

    def __init__(self, connection: Connection, vocabulary: int) -> None:
        """Connect with the first request; verdicts bring ids below `vocabulary`."""
        self._connection, self._vocabulary = connection, vocabulary
        self._link: ServiceLink | None = None
        self._asked: SentRequest | None = None  # the latest request, at this time and so many heartbeats ago
        self._sent, self._beats = 0.0, 0

    @property
    def over(self) -> bool:
        """Return whether there is no stream: none is begun yet, or it has ended."""
        return self._link is None

    def send(self, request: VerifyRequest) -> Future[Verdict]:
        """Send the part of a request that the verifier lacks; return its verdict."""
        if why := self._connection.peer.capabilities.refusal(request.sampling):  # it may have changed since it began
            raise lost(f"The verifier is a gateway to another server now, and {why}.")
        asked = SentRequest(request)
        if not self._connection.post(self._ask, asked):
            asked.fail(lost("The connection to the verifier is closed."))
        return asked.verdict

    def close(self) -> None:
        """End the stream: the reply has ended."""
        self._connection.post(self._end, lost("The reply has ended."))

    def _ask(self, asked: SentRequest) -> None:
        held = None if self._asked is None else self._asked.held()
        if self._link is None or held is None:
            self._end(lost("The reply has been given up."))
            if (channel := self._connection.loop_channel()) is None:
                asked.fail(lost("The verifier is not reachable."))
                return
            held, link = NO_IDS, ServiceLink(channel, SESSION, PeerWatch(self._connection.timing))
            # the verifier's own fingerprint: `greet` has compared the vocabularies
            opening = write_open(asked.request.sampling, self._connection.peer.vocabulary, self._connection.model)
            link.send(asked.sent(opening.SerializeToString()))
            self._link = link
            self._connection.loop_task(self._live(link, channel))
        self._asked, self._sent, self._beats = asked, monotonic(), 0
        self._link.watch.begin()
        self._link.send(asked.frame(common_prefix(held, asked.request.prefix)))

    def _end(self, error: EdgeError) -> None:
        """End the stream, and whatever is asked for by it."""
        link, self._link = self._link, None
        if link is not None:
            link.end()
        if self._asked is not None:
            self._asked.fail(error)

    async def _live(self, link: ServiceLink, channel: grpc.aio.Channel) -> None:
        error: EdgeError = lost("The connection to the verifier is closed.")
        connection = self._connection
        try:
            await link.run(lambda data: self._take(link, data), lambda waited: self._beat(link, waited))
            error = lost("The verifier has ended the session.")
        except VerifierSlow as slow:  # it is asked again later, over the same connection
            connection.loop_pause()
            connection.patience.record_miss()
            error = slow
        except VerifierLost as gone:
            connection.loop_lost(channel)
            error = gone
        except ProtocolError as fault:
            connection.loop_pause()
            error = lost(f"The verifier violates the protocol: {fault}")
        except grpc.aio.AioRpcError as status:
            why = printable(status.details() or status.code().name)
            if status.code() in _REFUSALS:
                connection.loop_pause()
                error = lost(f"The verifier refuses: {why}")
            else:
                connection.loop_lost(channel)
                error = lost(f"The verifier was lost ({why}).")
        finally:
            if link is self._link:
                self._end(error)

    def _take(self, link: ServiceLink, data: bytes) -> None:
        """Handle one frame. Raise ProtocolError, and VerifierLost for a verifier that shuts down."""
        frame = parse_message(pb.VerifierFrame, data)
        kind, asked, connection = frame.WhichOneof("frame"), self._asked, self._connection
        if kind == "draining":
            raise lost("The verifier is shutting down.")
        if link is not self._link:  # it has been ended here
            return
        if kind is None or asked is None or asked.verdict.done() or getattr(frame, kind).round != asked.request.round:
            raise ProtocolError("The verifier sent an answer without a request.", SAME_VERSION)
        asked.received(data)
        if kind == "verdict":
            verdict = read_verdict(frame.verdict, asked.request, self._vocabulary)
            connection.loop_answered()
            passed = monotonic() - self._sent
            connection.patience.record(VerdictWork(asked.work.unseen, len(verdict.tokens)), passed)
            asked.verdict.set_result(
                replace(
                    verdict, seconds=min(verdict.seconds, passed), bytes_up=asked.bytes_up, bytes_down=asked.bytes_down
                )
            )
        elif kind == "need_prefix":
            if frame.need_prefix.position >= asked.position:
                raise ProtocolError("The verifier asks for tokens that it already has.", SAME_VERSION)
            link.send(asked.frame(frame.need_prefix.position))
        elif kind == "busy":
            wait = min(frame.busy.retry_ms, MAX_BUSY_MS) / 1e3
            connection.loop_pause(wait)
            again = f"This device continues alone and tries again in about {wait:g} seconds."
            asked.fail(VerifierBusy("The verifier is busy.", again, wait))
        else:
            asked.request.computed = frame.working.computed
            link.watch.progress(frame.working.step)

    def _beat(self, link: ServiceLink, waited: float) -> None:
        """Check that the verifier that owes an answer is alive and within its limit. Raise VerifierLost otherwise."""
        if (asked := self._asked) is None or asked.verdict.done():
            return
        self._beats += 1
        if trouble := link.watch.trouble(waited):
            raise lost(f"The verifier {trouble}.")
        limit = self._connection.patience.limit(asked.work)
        if self._beats * link.watch.beat > limit:
            raise VerifierSlow(
                f"The verifier has not answered within {limit:.1f} seconds, many times the expected time.",
                "This device continues alone and tries again by itself; check whether the verifier is overloaded.",
            )
