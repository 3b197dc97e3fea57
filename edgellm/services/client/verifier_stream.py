"""The stream of one reply to a verifier on another machine: its requests and their verdicts."""

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np

from edgellm import errors
from edgellm.engine import common_prefix
from edgellm.rpc.channel import MAX_BUSY_MS, SESSION
from edgellm.rpc.link import ServiceLink, Timing
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.protos import parse_message
from edgellm.services import verification_codec as codec
from edgellm.spec.protocols import Capabilities, VerifyRequest
from edgellm.spec.types import NO_IDS, Ids, Verdict
from edgellm.spec.verification import RetryDelay, VerdictDeadline, VerdictWork

_DRAINING = "The verifier is shutting down."
_REFUSALS = {
    "INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "INTERNAL", "PERMISSION_DENIED",
}  # fmt: skip


def lost(what: str) -> errors.VerifierLost:
    """Return the error for a verdict that will not come."""
    return errors.VerifierLost(
        what, "This device continues alone and tries again by itself; check that the verifier is running."
    )


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
        return self.sent(codec.write_verify(rest))

    def sent(self, frame: pb.DeviceFrame) -> bytes:
        """Return the bytes of a frame to the verifier, which count."""
        data = frame.SerializeToString()
        self.bytes_up += len(data)
        return data

    def received(self, data: bytes) -> None:
        self.bytes_down += len(data)

    @property
    def work(self) -> VerdictWork:
        request = self.request
        return VerdictWork(len(request.prefix) - self.position + len(request.draft), 1 + request.extra)

    def answer(self, verdict: Verdict, seconds: float) -> None:
        seconds = min(verdict.seconds, seconds)
        self.verdict.set_result(replace(verdict, seconds=seconds, bytes_up=self.bytes_up, bytes_down=self.bytes_down))

    def fail(self, error: errors.EdgeError) -> None:
        """Answer with an error, unless there is an answer."""
        if not self.verdict.done():
            self.verdict.set_exception(error)

    def held(self) -> Ids | None:
        """Return the tokens that the verifier's session holds after this request; None if unknown."""
        if not self.verdict.done():
            return None
        if (error := self.verdict.exception()) is not None:  # a busy verifier has changed nothing
            return self.request.prefix[: self.position] if isinstance(error, errors.VerifierBusy) else None
        verdict = self.verdict.result()
        return np.concatenate((self.request.prefix, self.request.draft.ids[: verdict.accepted], verdict.tokens[:-1]))


class Connection(Protocol):
    """The connection of streams to the verifier. Methods named `loop_*` are for the network loop's thread."""

    info: codec.VerifierInfo
    model: str
    channel: grpc.aio.Channel | None
    timing: Timing
    retry: RetryDelay
    patience: VerdictDeadline

    @property
    def capabilities(self) -> Capabilities: ...

    def post(self, call: Callable[..., None], *arguments: Any) -> bool: ...

    def loop_task(self, work: Coroutine[Any, Any, None]) -> None: ...

    def loop_lost(self, channel: grpc.aio.Channel) -> None: ...

    def loop_wake(self) -> None: ...


class Stream:
    """The requests of one reply over a link, which is begun anew where it has ended, or where the tokens that the
    verifier holds are unknown. All but `send` and `close` runs in the network loop's thread."""

    def __init__(self, verifier: Connection, vocabulary: int) -> None:
        """Connect with the first request; verdicts bring ids below `vocabulary`."""
        self._verifier, self._vocabulary = verifier, vocabulary
        self._link: ServiceLink | None = None  # None where none is begun yet, or it has ended
        self._asked: SentRequest | None = None  # the latest request, at this time and so many heartbeats ago
        self._sent, self._beats = 0.0, 0
        self._model = ""  # the hash of the model that verifies this reply

    def send(self, request: VerifyRequest) -> Future[Verdict]:
        """Send the part of a request that the verifier lacks; return its verdict."""
        if why := self._verifier.capabilities.refusal(request.sampling):  # it may have changed since it began
            raise lost(f"The verifier is a gateway to another server now, and {why}.")
        asked = SentRequest(request)
        if not self._verifier.post(self._ask, asked):
            asked.fail(lost("The connection to the verifier is closed."))
        return asked.verdict

    def close(self) -> None:
        self._verifier.post(self._end, lost("The reply has ended."))

    def _ask(self, asked: SentRequest) -> None:
        held = None if self._asked is None else self._asked.held()
        if self._link is None or held is None:
            self._end(lost("The reply has been given up."))
            verifier = self._verifier
            if (channel := verifier.channel) is None:
                asked.fail(lost("The verifier is not reachable."))
                return
            if self._model not in ("", verifier.info.model_hash):
                asked.fail(lost("The verifier has another model now, which does not go on with this reply."))
                return
            self._model = verifier.info.model_hash
            held, link = NO_IDS, ServiceLink(SESSION, verifier.timing)
            # the verifier's own fingerprint: `greet` has compared the vocabularies
            link.send(asked.sent(codec.write_open(asked.request.sampling, verifier.info.vocabulary, verifier.model)))
            self._link = link
            verifier.loop_task(self._live(link, channel))
        self._asked, self._sent, self._beats = asked, monotonic(), 0
        self._link.owe()
        self._link.send(asked.frame(common_prefix(held, asked.request.prefix)))

    def _end(self, error: errors.EdgeError) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.end()
        if self._asked is not None:
            self._asked.fail(error)

    async def _live(self, link: ServiceLink, channel: grpc.aio.Channel) -> None:
        error: errors.EdgeError = lost("The connection to the verifier is closed.")
        verifier = self._verifier
        try:
            await link.run(channel, partial(self._take, link), partial(self._beat, link))
            error = lost("The verifier has ended the session.")
        except errors.VerifierSlow as slow:  # it is asked again later, over the same connection
            verifier.retry.pause()
            verifier.patience.record_miss()
            error = slow
        except errors.VerifierLost as gone:
            verifier.loop_lost(channel)
            if gone.what != _DRAINING:
                verifier.loop_wake()
            error = gone
        except errors.ProtocolError as fault:
            verifier.retry.pause()
            error = lost(f"The verifier violates the protocol: {fault}")
        except grpc.aio.AioRpcError as status:
            why = codec.printable(status.details() or status.code().name)
            if status.code().name in _REFUSALS:
                verifier.retry.pause()
                error = lost(f"The verifier refuses: {why}")
            else:
                verifier.loop_lost(channel)
                verifier.loop_wake()
                error = lost(f"The verifier was lost ({why}).")
        finally:
            if link is self._link:
                self._end(error)

    def _take(self, link: ServiceLink, data: bytes) -> None:
        """Handle one frame. Raise ProtocolError, and VerifierLost for a verifier that shuts down."""
        frame = parse_message(pb.VerifierFrame, data)
        kind, asked, verifier = frame.WhichOneof("frame"), self._asked, self._verifier
        if kind == "draining":
            raise lost(_DRAINING)
        if link is not self._link:  # it has been ended here
            return
        if kind is None or asked is None or asked.verdict.done() or getattr(frame, kind).round != asked.request.round:
            raise errors.ProtocolError("The verifier sent an answer without a request.", errors.SAME_VERSION)
        asked.received(data)
        if kind == "verdict":
            verdict = codec.read_verdict(frame.verdict, asked.request, self._vocabulary)
            passed = monotonic() - self._sent
            verifier.retry.reset()
            verifier.patience.record(VerdictWork(asked.work.unseen, len(verdict.tokens)), passed)
            asked.answer(verdict, passed)
        elif kind == "need_prefix":
            if frame.need_prefix.position >= asked.position:
                raise errors.ProtocolError("The verifier asks for tokens that it already has.", errors.SAME_VERSION)
            link.send(asked.frame(frame.need_prefix.position))
        elif kind == "busy":
            wait = min(frame.busy.retry_ms, MAX_BUSY_MS) / 1e3
            verifier.retry.pause(wait)
            again = f"This device continues alone and tries again in about {wait:g} seconds."
            asked.fail(errors.VerifierBusy("The verifier is busy.", again, wait))
        else:
            asked.request.computed, asked.request.cached = frame.working.computed, frame.working.cached
            link.progress(frame.working.step)

    def _beat(self, link: ServiceLink, waited: float) -> None:
        """Check that the verifier that owes an answer is alive and within its limit. Raise VerifierLost otherwise."""
        if (asked := self._asked) is None or asked.verdict.done():
            return
        self._beats += 1
        if trouble := link.trouble(waited):
            raise lost(f"The verifier {trouble}.")
        limit = self._verifier.patience.limit(asked.work)
        if self._beats * self._verifier.timing.beat > limit:
            raise errors.VerifierSlow(
                f"The verifier has not answered within {limit:.1f} seconds, many times the expected time.",
                "This device continues alone and tries again by itself; check whether the verifier is overloaded.",
            )
