"""A verifier on another machine, as the decoding loop sees it: its connection, which is kept up, and the stream of each
reply, with its requests and their verdicts."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any

import grpc
import grpc.aio

from edgellm import errors
from edgellm.engine import Vocabulary, common_prefix
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HEARTBEAT_SECONDS, MAX_BUSY_MS, SESSION, network_loop, run_in_network_loop
from edgellm.rpc.discovery.interfaces import listening, send_magic_packets
from edgellm.rpc.discovery.peer_probe import BROWSE_SECONDS, announced_addresses
from edgellm.rpc.link import Endpoint, ServiceLink, Timing
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.protos import parse_message
from edgellm.rpc.trust.handshake import RECHECK_SECONDS
from edgellm.rpc.trust.trust import Peer
from edgellm.services import verification_codec as codec
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, VerifyRequest, begun
from edgellm.spec.types import NO_IDS, Ids, Verdict
from edgellm.spec.verification import RetryDelay, VerdictDeadline, VerdictWork
from edgellm.verifier.in_process import EXTRA_TOKENS

_log = logging.getLogger(__name__)
_CLOSE_GRACE_SECONDS = 10.0
_RECONNECT_SECONDS = 0.5  # longest pause before another attempt to connect again, while not long away
_PAUSE_SHARE, _LONGEST_PAUSE = 0.005, 15.0  # pause over the time away, two seconds after seven minutes; and at most
OnWait = Callable[[str], None]
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
    verdict: Future[Verdict] = field(default_factory=begun)

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

    def fail(self, error: errors.EdgeError) -> None:
        """Answer with an error, unless there is an answer."""
        if not self.verdict.done():
            self.verdict.set_exception(error)


class RemoteVerifier(Verifier):
    """A verifier asked over the network. It is reconnected in the background when lost, and sessions are rebuilt.
    Methods named `loop_*` are for the thread of the network loop."""

    extra = EXTRA_TOKENS

    def __init__(
        self, where: Endpoint | Address | str, vocabulary: Vocabulary, *, timing: Timing = Timing(),
        on_wait: OnWait = lambda _doing: None, asleep: bool = False,
    ) -> None:  # fmt: skip
        """Connect to an endpoint, or one as `Endpoint.parse` takes it, for a draft model with this `vocabulary`.
        Without a model, the verifier must have a single one. A verifier that is not ready yet is waited for: `on_wait`
        is called, from another thread, with its progress, such as "loading a.gguf". A device that is `asleep` is woken
        up, and is known from its kept greeting until it answers. Raises InvalidOption: not an address; PairingRequired:
        the address leaves this machine, and there is no trust, or no device is paired; NotPaired, NotPermitted,
        IdentityClash: it is not a device that trusts this one, and is trusted; VerifierUnreachable: there is no answer;
        VocabularyMismatch, ProtocolError: the two do not fit; ModelNotFound: there is no such model, or none is named
        and there are several."""
        self.where = where if isinstance(where, Endpoint) else Endpoint.parse(str(where))
        self.timing, self.vocabulary = timing, vocabulary
        self.patience = VerdictDeadline(timing.least)
        self.retry = RetryDelay(timing.retry, timing.retry_most)
        self.channel: grpc.aio.Channel | None = None
        """The channel for new streams; None while the verifier is away."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed, self._woken = False, False  # woken: a device is woken up once in each absence
        self._hurry = asyncio.Event()  # a reply wants the verifier, which is away
        device = self.where.device
        if asleep and device is not None and (kept := codec.KeptGreeting.of(device)) is not None:
            self.info = codec.described(kept.reply, vocabulary, self.where.address)
            self.post(self.loop_wake)
            self.post(lambda: self.loop_task(self._reconnect()))
            return
        connecting = run_in_network_loop(self._connect(on_wait))
        try:
            self.info = connecting.result()
        except BaseException:
            connecting.cancel()
            self.close()
            raise
        if self.info.behind:  # a gateway may get further models: this one is meant from now on
            self.where = replace(self.where, model=self.info.model)

    @property
    def capabilities(self) -> Capabilities:
        return self.info.capabilities

    def up(self) -> bool:
        """Return whether the verifier is connected and takes requests."""
        return self.channel is not None and not self._closed and not self.retry.left

    def open(self, state: GenerationState) -> Session:
        """Open a session, which becomes ready as soon as the verifier is reachable."""
        stream = Stream(self)
        self.post(self.loop_wake)
        return Session(state, stream.send, ready=self.up, close=stream.close, reads=self.info.model)

    def post(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Schedule a call in the loop's thread; return False if the connection is closed."""
        if not self._closed:
            network_loop().call_soon_threadsafe(call, *arguments)
        return not self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            run_in_network_loop(self._end()).result()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_GRACE_SECONDS)
        if self.channel is not None:
            await self.channel.close(None)

    def loop_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, until it ends or the connection is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def loop_lost(self, channel: grpc.aio.Channel) -> None:
        """Reconnect after a loss; close `channel` after a grace in which other sessions may get their verdicts."""
        if channel is self.channel:
            _log.warning("lost the connection to the verifier at %s", self.where.address)
            self.channel = None
            self.loop_task(channel.close(_CLOSE_GRACE_SECONDS))
            self.loop_task(self._reconnect())

    def loop_wake(self) -> None:
        """Look for a verifier that is away, for a reply; wake its device, once in each absence, if it may be woken."""
        self._hurry.set()
        if self.channel is None and not self._woken and (peer := self._peer()) is not None and peer.wakes:
            self._woken = True
            for sent in send_magic_packets(peer.cards):
                _log.info("sent %s, to wake up %s", sent, peer.name)

    async def _connect(self, on_wait: OnWait = lambda _doing: None) -> codec.VerifierInfo:
        channel, found = await self.where.meet(self.timing.hello)
        if found is not None:  # from now on, the same device has to answer
            self.where = replace(self.where, device=found.peer.id)
        where = self.where
        try:
            info = await self._greeted(channel, on_wait)
        except grpc.aio.AioRpcError as error:
            await channel.close(None)
            raise self._unreachable(error) from None
        except BaseException:
            await channel.close(None)
            raise
        if where.device is not None:
            await asyncio.to_thread(codec.KeptGreeting(where.model, info.greeting).keep, where.device)
        self.channel, self._woken = channel, False
        _log.info("connected to the verifier at %s: %s", where.address, info.model)
        self.loop_task(self._watch(channel))
        return info

    async def _greeted(self, channel: grpc.aio.Channel, on_wait: OnWait) -> codec.VerifierInfo:
        """Return the verifier's description, once it can verify."""
        while True:
            try:
                return await codec.greet(channel, self.vocabulary, self.where, self.timing.hello)
            except grpc.aio.AioRpcError as error:
                if error.code() is not codec.PREPARING:
                    raise
                on_wait(codec.printable(error.details() or ""))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Notice the end of a connection, also while no session is open; and end that to a verifier that is no longer
        paired with this device."""
        ended = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        plain = self.where.trust is None
        while not (await asyncio.wait({ended}, timeout=RECHECK_SECONDS))[0] and (plain or self._peer()):
            pass
        if not ended.done():
            ended.cancel()
            await channel.close(None)
        self.loop_lost(channel)

    def _unreachable(self, error: grpc.aio.AioRpcError) -> errors.EdgeError:
        where = self.where.address
        match error.code():
            case grpc.StatusCode.PERMISSION_DENIED:
                why = error.details() or "Ask the device's owner for the right."
                return errors.NotPermitted(f"The verifier at {where} refuses.", why)
            case grpc.StatusCode.NOT_FOUND:
                said = codec.printable(error.details() or "It has no such model.")
                return errors.ModelNotFound(
                    f"The verifier at {where}: {said}", f"Name a model behind the address: {where}#MODEL"
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                what = f"The server at {where} is not a verifier."
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                what = f"No answer from the verifier at {where} within {self.timing.hello:g} seconds."
            case _ if "http1.x" in (error.details() or ""):  # gRPC's word for it
                return errors.VerifierUnreachable(f"The server at {where} speaks HTTP.", f"Name it http://{where}.")
            case _:
                what = f"No answer from {where}."
        return errors.VerifierUnreachable(
            what, f"Start one there with `edgellm serve --role verifier --port {where.port}`."
        )

    async def _reconnect(self) -> None:
        """Connect again as soon as the verifier answers, also at another address: it may have slept, or moved. Where it
        was seen is tried about every two seconds, and less often the longer it is away; what it announces, at once."""
        away = 0.0  # seconds, as counted here: a clock may have run on while this machine slept
        announced: asyncio.Future[list[Address]] | None = None  # one at a time, however many replies are in a hurry
        while self.channel is None:
            await asyncio.sleep(min(self.retry.next(), _RECONNECT_SECONDS))
            peer = self._peer()
            pause = max(BROWSE_SECONDS if peer else _RECONNECT_SECONDS, min(_LONGEST_PAUSE, _PAUSE_SHARE * away))
            known = dict.fromkeys([self.where.address, *(peer.addresses if peer else ())])
            if peer and (announced is None or announced.done()):
                announced = asyncio.ensure_future(self._announced(peer, pause))
            looks: list[Coroutine[Any, Any, list[Address] | None]] = [listening([one]) for one in known]
            tasks = [asyncio.ensure_future(look) for look in (*looks, self._pause(pause))]
            try:
                for look in asyncio.as_completed([*tasks, announced] if announced else tasks):
                    for address in (found := await look) or ():
                        if self.channel is None:
                            await self._try(address)
                    if found is None or self.channel is not None:
                        break
            finally:
                for task in tasks:
                    task.cancel()
            away = 0.0 if self._hurry.is_set() else away + pause
            self._hurry.clear()

    async def _pause(self, seconds: float) -> None:
        """Wait, but only half a second where a reply wants the verifier."""
        await asyncio.sleep(_RECONNECT_SECONDS)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), seconds - _RECONNECT_SECONDS)

    async def _try(self, address: Address) -> None:
        """Connect to the verifier where it is at this address."""
        before, self.where = self.where, replace(self.where, address=address)
        try:
            self.info = await self._connect()
        except errors.EdgeError as error:
            _log.debug("not yet: %s", error.what)
            self.where = before

    async def _announced(self, peer: Peer, seconds: float) -> list[Address]:
        """Return the addresses where a paired verifier announces itself within `seconds`, and where something listens.
        TLS then finds out what it is."""
        with suppress(errors.InvalidOption):  # the interface to listen on is gone
            return await listening(await asyncio.to_thread(announced_addresses, peer, seconds))
        return []

    def _peer(self) -> Peer | None:
        """Return the verifier as a paired device. Without a readable list there is none."""
        with suppress(errors.TrustUnusable):
            trust, device = self.where.trust, self.where.device
            return None if trust is None or device is None else trust.peers.get(device)
        return None


class Stream:
    """The requests of one reply over a link, which is begun anew where it has ended, or where the tokens that the
    verifier holds are unknown. All but `send` and `close` runs in the network loop's thread."""

    def __init__(self, verifier: RemoteVerifier) -> None:
        """Connect with the first request."""
        self._verifier = verifier
        self._link: ServiceLink | None = None  # None where none is begun yet, or it has ended
        self._asked: SentRequest | None = None  # the latest request, at this time and so many heartbeats ago
        self._sent, self._beats = 0.0, 0
        self._held: Ids | None = None  # the tokens that the verifier's session holds; None if unknown
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
        held, self._held = self._held, None
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
            vocabulary = verifier.vocabulary.fingerprint  # the verifier's own, too: `greet` has compared them
            link.send(asked.sent(codec.write_open(asked.request.sampling, vocabulary, verifier.where.model)))
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
            verdict = codec.read_verdict(frame.verdict, asked.request, verifier.vocabulary.size)
            passed = monotonic() - self._sent
            verifier.retry.reset()
            verifier.patience.record(VerdictWork(asked.work.unseen, len(verdict.tokens)), passed)
            self._held = codec.text_after(asked.request, verdict)
            seconds = min(verdict.seconds, passed)
            verdict = replace(verdict, seconds=seconds, bytes_up=asked.bytes_up, bytes_down=asked.bytes_down)
            asked.verdict.set_result(verdict)
        elif kind == "busy":
            wait = min(frame.busy.retry_ms, MAX_BUSY_MS) / 1e3
            verifier.retry.pause(wait)
            again = f"This device continues alone and tries again in about {wait:g} seconds."
            self._held = asked.request.prefix[: asked.position]  # it has changed nothing
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
