"""A verifier on another machine, as the decoding loop sees it, and the stream of one session to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
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
from edgellm.services.client.connection import Connection, Timing
from edgellm.services.verification_codec import read_verdict, write_open, write_verify
from edgellm.spec.guarded_session import wait_for_result
from edgellm.spec.model_sampling import ModelSampling
from edgellm.spec.patience import VerdictWork
from edgellm.spec.protocols import Verifier, VerifierSession
from edgellm.spec.sampling import Choice
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Chunk, Ids, Verdict
from edgellm.verifier.requests import VerifyRequest

_LONG = 512  # new tokens of a prefix whose reading is reported
_Call: TypeAlias = grpc.aio.StreamStreamCall[bytes, bytes]


class RemotePending:
    """A verdict on its way over the link."""

    def __init__(
        self, request: VerifyRequest, alive: Callable[[], bool], should_stop: Callable[[], bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """`request` has all tokens in its prefix. `alive` returns whether the connection can still settle it,
        `should_stop` whether the reply was stopped. `progress` is called while a long prefix is read."""
        self._alive, self._should_stop, self._progress = alive, should_stop, progress
        self._computed = 0
        self.asked = request
        self.position = len(request.prefix)  # number of these tokens that the other end is taken to hold
        self.bytes_up = self.bytes_down = 0
        self._future: Future[Verdict] = Future()

    def count_bytes(self, *, up: int = 0, down: int = 0) -> None:
        """Count bytes that went to the verifier and came from it for this verdict."""
        self.bytes_up += up
        self.bytes_down += down

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Verdict:
        """See `Pending.result`. Raise Stopped if the reply was stopped."""
        return wait_for_result(self._future, self._given_up)

    def computed(self, tokens: int) -> None:
        """Note that the verifier has `tokens` of the prefix in its cache."""
        self._computed = tokens

    def _report(self) -> None:
        total = len(self.asked.prefix) - self.position
        if self._progress is not None and total > _LONG:
            self._progress(min(max(self._computed - self.position, 0), total), total)

    def _given_up(self) -> bool:
        self._report()
        if not self._alive():
            self.fail(lost("The connection to the verifier is closed."))
        return self._should_stop is not None and self._should_stop()

    def request(self, position: int) -> bytes:
        """Return the request's frame for a verifier that already holds `position` tokens.

        Raises:
            InvalidOption: a draft was drawn from something that cannot be sent.
        """
        self.position = position
        rest = replace(self.asked, position=position, prefix=self.asked.prefix[position:])
        data = write_verify(rest).SerializeToString()
        self.count_bytes(up=len(data))
        return data

    @property
    def work(self) -> VerdictWork:
        """The amount of work of the verifier for this verdict."""
        return VerdictWork(len(self.asked.prefix) - self.position + len(self.asked.draft), 1 + self.asked.extra)

    def settle(self, verdict: Verdict) -> None:
        self._future.set_result(replace(verdict, bytes_up=self.bytes_up, bytes_down=self.bytes_down))

    def fail(self, error: EdgeError) -> None:
        if not self._future.done():
            self._future.set_exception(error)

    def held(self) -> Ids | None:
        """Return the tokens that the verifier's session holds after this request; None if unknown."""
        if not self._future.done():
            return None
        if (error := self._future.exception()) is not None:  # who is busy has left everything as it was
            return self.asked.prefix[: self.position] if isinstance(error, VerifierBusy) else None
        verdict = self._future.result()
        return np.concatenate((self.asked.prefix, self.asked.draft.ids[: verdict.accepted], verdict.tokens[:-1]))


class Stream:
    """One gRPC stream. Made in any thread; what is called later is called in the connection's."""

    def __init__(self, connection: Connection, opening: bytes, vocabulary: int) -> None:
        """`opening` is the first frame; verdicts bring ids below `vocabulary`. Connects with the first request."""
        self._connection = connection
        self._opening = opening
        self._vocabulary = vocabulary
        self._channel: grpc.aio.Channel | None = None
        self._call: _Call | None = None
        self._writing = asyncio.Lock()
        self._pending: RemotePending | None = None
        self._silent = 0  # heartbeats since the last frame
        self._waited = 0  # heartbeats since the request
        self._asked = 0.0  # when that was
        self._step, self._moved = -1, 0.0  # of the verifier's worker, and when it last changed
        self._watched = False
        self._due = 0.0  # by the loop's clock, when the next heartbeat is looked for
        self.over = False  # ended by either side; read by the session's thread too

    def send(self, pending: RemotePending, data: bytes) -> None:
        """Ask for a verdict."""
        frames = [data]
        if self._call is None:
            self._channel = self._connection.loop_channel()
            if self._channel is None:
                pending.fail(lost("The verifier is not reachable."))
                return
            self._call = self._channel.stream_stream(SESSION, bytes, bytes)()  # type: ignore[call-arg]  # written to
            self._connection.loop_task(self._read(self._call))
            frames.insert(0, self._opening)
            pending.count_bytes(up=len(self._opening))
        elif self.over:
            pending.fail(lost("The verifier has ended the session."))
            return
        self._pending = pending
        self._silent = self._waited = 0
        self._step, self._moved = -1, monotonic()
        self._asked = self._moved
        self._watch()
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
        pending = self._pending
        if kind is None or pending is None or getattr(frame, kind).round != pending.asked.round:
            raise ProtocolError("The verifier sent an answer without a request.", SAME_VERSION)
        self._silent = 0
        pending.count_bytes(down=len(data))
        if kind == "verdict":
            verdict = read_verdict(frame.verdict, pending.asked, self._vocabulary)
            self._pending = None
            self._connection.loop_answered()
            work, passed = VerdictWork(pending.work.unseen, len(verdict.tokens)), monotonic() - self._asked
            self._connection.patience.record(work, passed)
            pending.settle(replace(verdict, seconds=min(verdict.seconds, passed)))
        elif kind == "need_prefix":
            if frame.need_prefix.position >= pending.position:
                raise ProtocolError("The verifier asks for tokens that it already has.", SAME_VERSION)
            self._connection.loop_task(self._write(call, [pending.request(frame.need_prefix.position)]))
        elif kind == "busy":
            wait = min(frame.busy.retry_ms, MAX_BUSY_MS) / 1e3
            self._connection.loop_pause(wait)
            again = f"This device continues alone and tries again in about {wait:g} seconds."
            self._fail(VerifierBusy("The verifier is busy.", again, wait))
        else:
            pending.computed(frame.working.computed)
            if frame.working.step != self._step:
                self._step, self._moved = frame.working.step, monotonic()

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
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.fail(error)

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            loop = asyncio.get_running_loop()
            self._due = loop.time() + self._connection.timing.beat
            loop.call_at(self._due, self._beat)

    def _beat(self) -> None:
        """Check that the verifier that owes an answer is alive and within its limit."""
        self._watched = False
        pending = self._pending
        if pending is None:
            return
        timing = self._connection.timing
        # a process that did not get the processor itself has no evidence that the other side is silent
        if asyncio.get_running_loop().time() - self._due < timing.beat:
            self._silent += 1
        self._waited += 1
        limit = self._connection.patience.limit(pending.work)
        if self._silent >= timing.silent_beats:
            self._hangs("has stopped responding")
        elif monotonic() - self._moved > timing.stall:
            self._hangs(f"has made no progress for {timing.stall:g} seconds")
        elif self._waited * timing.beat > limit:
            self._gives_up(limit)
        else:
            self._watch()

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
            ModelNotFound: it has no such model, or several and none is named; names those that it has.
        """
        where = address if isinstance(address, ModelAddress) else ModelAddress.parse(str(address))
        self._connection = Connection(
            where.address, vocabulary, timing or Timing(), trust, device, where.model, on_wait
        )  # fmt: skip
        self._vocabulary = vocabulary

    @property
    def name(self) -> str:
        return self._connection.peer.model

    @property
    def context_length(self) -> int:
        return self._connection.peer.context_length

    @property
    def model_hash(self) -> str:
        """The SHA-256 of the verifier's model file in hex; empty if the verifier does not report it."""
        return self._connection.peer.model_hash

    @property
    def chat_template(self) -> str:
        """The chat template of the verifier's model; empty if the verifier does not report it."""
        return self._connection.peer.chat_template

    @property
    def behind(self) -> str:
        """What verifies behind a gateway, and how; empty if this is none."""
        return self._connection.peer.behind

    @property
    def shared_tokens(self) -> int:
        """Return the id below which drafted tokens exist in both vocabularies."""
        return self._connection.peer.shared_tokens

    def up(self) -> bool:
        """Return whether the verifier is connected and takes requests."""
        return self._connection.ready()

    @property
    def reports_logprobs(self) -> bool:
        """See `Verifier.reports_logprobs`: a gateway to some stock servers does not."""
        return self._connection.peer.reports_logprobs

    @property
    def applies_penalties(self) -> bool:
        """See `Verifier.applies_penalties`: a gateway to some stock servers does not."""
        return self._connection.peer.applies_penalties

    @property
    def applies_grammars(self) -> bool:
        """See `Verifier.applies_grammars`: a gateway to some stock servers does not."""
        return self._connection.peer.applies_grammars

    @property
    def choice(self) -> Choice:
        """See `Verifier.choice`."""
        return self._connection.peer.choice

    @property
    def sampling(self) -> ModelSampling:
        """What the verifier's model wants."""
        return self._connection.peer.sampling

    @property
    def drafts_extra(self) -> bool:
        """See `Verifier.drafts_extra`."""
        return self._connection.peer.drafts_extra

    def open(self, state: GenerationState) -> RemoteSession:
        """See `Verifier.open`. If the verifier is not reachable now, the session becomes ready when it is."""
        return RemoteSession(self._connection, self._vocabulary, state)

    def close(self) -> None:
        self._connection.close()


class RemoteSession(VerifierSession):
    """One reply at the verifier: a stream, and the knowledge of which tokens are held at its other end."""

    def __init__(self, connection: Connection, vocabulary: Vocabulary, state: GenerationState) -> None:
        self._connection, self._state, self._vocabulary = connection, state, vocabulary
        self._stream: Stream | None = None
        self._last: RemotePending | None = None
        self._round = 0

    def ready(self) -> bool:
        return self._connection.ready()

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> RemotePending:
        """See `VerifierSession.submit`. A verdict that was not waited for is given up."""
        stream, held = self._stream, self._last.held() if self._last is not None else None
        if stream is None or stream.over or held is None:  # the other end's tokens are unknown: begin again
            self._end_stream()
            # the verifier's own fingerprint: `greet` has compared the vocabularies
            connection = self._connection
            opening = write_open(self._state.sampling, connection.peer.vocabulary, connection.model)
            stream, held = Stream(connection, opening.SerializeToString(), self._vocabulary.size), NO_IDS
        self._round += 1
        state = self._state
        if (
            state.sampling.penalties is not None and not self._connection.peer.applies_penalties
        ):  # another one since the reply began
            raise lost("The verifier is a gateway to a stock server now, which applies no penalties.")
        if state.sampling.constraint is not None and not self._connection.peer.applies_grammars:
            raise lost("The verifier is a gateway to a stock server now, which follows no JSON schemas.")
        if why := self._connection.peer.choice.refusal(state.sampling):
            raise lost(f"The verifier is a gateway to another server now, and {why}.")
        request = VerifyRequest(0, state.sampling, len(prefix), prefix, chunk, extra, state.logprobs, self._round)
        progress = state.prompt_progress(self._connection.peer.model)
        pending = RemotePending(request, self._connection.alive, state.should_stop, progress)
        data = pending.request(common_prefix(held, prefix))
        self._stream, self._last = stream, pending
        if not self._connection.post(stream.send, pending, data):
            pending.fail(lost("The connection to the verifier is closed."))
        return pending

    def close(self) -> None:
        self._end_stream()
        self._last = None

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._connection.post(self._stream.end)
            self._stream = None
