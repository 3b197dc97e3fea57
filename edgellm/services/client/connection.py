"""The device's connection to a verifier, in the network loop: it connects, notices loss, and reconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc
import grpc.aio

from edgellm.engine import Vocabulary
from edgellm.errors import EdgeError, NotPermitted, TrustUnusable, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HEARTBEAT_SECONDS, HELLO_SECONDS, network_loop, open_channel, run_in_network_loop
from edgellm.rpc.discovery.interfaces import call_with_retry
from edgellm.rpc.trust.auth_interceptor import RECHECK_SECONDS
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.handshake import connect_authenticated
from edgellm.rpc.trust.trust import Trust
from edgellm.services.handshake import PREPARING, VerifierInfo, greet, model_missing, printable
from edgellm.spec.lost_verifier import RetryDelay, VerdictDeadline


@dataclass(frozen=True, slots=True)
class Timing:
    """A device's timeouts, in seconds except for `silent_beats`.

    A verifier that owes an answer is lost after `silent_beats` heartbeats without a frame (beats are counted here, so
    that a device that was itself suspended does not blame the verifier), or after `stall` during which it computed
    nothing. Whatever it says meanwhile, a verdict has a deadline of `least` or several times its usual time: see
    `VerdictDeadline`. Retries start `retry` after a loss and double up to `retry_most`, shortened at random by up to a
    half.
    """

    hello: float = HELLO_SECONDS
    beat: float = HEARTBEAT_SECONDS
    silent_beats: int = 4
    stall: float = 30.0
    least: float = 2.0
    retry: float = 0.2
    retry_most: float = 8.0


class PeerWatch:
    """A watch over a peer that owes an answer: it must be alive and make progress. Heartbeats of this process count, as
    a suspended process has no evidence of the peer's silence."""

    def __init__(self, beat: float, silent_beats: int, stall: float) -> None:
        """A peer is lost after `silent_beats` heartbeats of `beat` seconds without a message, or after `stall` seconds
        without progress."""
        self.beat, self._most, self._stall = beat, silent_beats, stall
        self._silent, self._mark, self._moved = 0, object(), monotonic()

    def begin(self) -> None:
        """Begin to watch: the peer owes an answer from now on."""
        self._silent, self._mark, self._moved = 0, object(), monotonic()

    def heard(self) -> None:
        """Note a message."""
        self._silent = 0

    def progress(self, mark: object) -> None:
        """Note the peer's progress, which a new `mark` shows."""
        if mark != self._mark:
            self._mark, self._moved = mark, monotonic()

    def trouble(self, waited: float) -> str:
        """Count a heartbeat, for which this process has `waited`; return the trouble as a clause without a subject, ""
        if there is none."""
        self._silent += waited < 2 * self.beat  # a longer wait means that this process was late
        if self._silent >= self._most:
            return "has stopped responding"
        if monotonic() - self._moved > self._stall:
            return f"has made no progress for {self._stall:g} seconds"
        return ""


class Connection:
    """A connection to one verifier, kept up in the background. Methods named `loop_*` are for the loop's thread."""

    def __init__(
        self,
        address: Address,
        vocabulary: Vocabulary,
        timing: Timing,
        trust: Trust | None = None,
        device: DeviceID | None = None,
        model: str = "",
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """Connect; with `trust`, by mutual TLS to a paired device, or to the given `device` only. `model` is the model
        that is wanted there; "" is its only one. A verifier that is not ready yet is waited for: `on_wait` is called,
        from another thread, with its progress, such as "loading a.gguf".

        Raises:
            PairingRequired: the address leaves this machine, and there is no `trust`, or no device is paired.
            NotPaired, NotPermitted, IdentityClash: it is not a device that trusts this one, and is trusted.
            VerifierUnreachable: there is no answer.
            VocabularyMismatch, ProtocolError: the two do not fit.
            ModelNotFound: there is no such model, or none is named and there are several.
        """
        self.address = address if trust is not None else address.require_loopback()
        self._trust = trust
        self._device = device
        self.model = model
        self.timing = timing
        self.patience = VerdictDeadline(timing.least)
        self._vocabulary = vocabulary
        self._retry = RetryDelay(timing.retry, timing.retry_most)
        self._channel: grpc.aio.Channel | None = None  # None while the verifier is away
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        first: Future[VerifierInfo] = Future()
        self._task = run_in_network_loop(self._live(first, on_wait))
        try:
            self.peer = first.result()
        except BaseException:
            self.close()
            raise
        if self.peer.behind:  # a gateway may get further models: this one is meant from now on
            self.model = self.peer.model

    def ready(self) -> bool:
        """Return whether the verifier is connected and not paused."""
        return self._channel is not None and not self._closing.is_set() and not self._retry.left

    def alive(self) -> bool:
        """Return whether the connection is not closed yet."""
        return not self._task.done()

    def post(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Schedule a call in the loop's thread; return False if the connection is closed."""
        if not self.alive():
            return False
        network_loop().call_soon_threadsafe(call, *arguments)
        return True

    def close(self) -> None:
        """End every stream, and return when all have ended."""
        if self.post(self._closing.set):
            self._task.result()

    def loop_channel(self) -> grpc.aio.Channel | None:
        """Return the channel for new streams; None while the verifier is away."""
        return None if self._closing.is_set() else self._channel

    def loop_task(self, work: Any) -> None:
        """Run a coroutine in the background, until it ends or the connection is closed."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def loop_lost(self, channel: grpc.aio.Channel) -> None:
        """Reconnect after a loss; close `channel` after a grace in which other sessions may get their verdicts."""
        if channel is self._channel:
            _log.warning("lost the connection to the verifier at %s", self.address)
            self._channel = None
            self.loop_task(channel.close(_CLOSE_GRACE_SECONDS))
            self.loop_task(self._reconnect())

    def loop_pause(self, seconds: float | None = None) -> None:
        """Pause requests after a refusal for `seconds`, or by default for longer with each refusal."""
        self._retry.pause(seconds)

    def loop_answered(self) -> None:
        """Reset the backoff, as the verifier has answered."""
        self._retry.reset()

    async def _live(self, first: Future[VerifierInfo], on_wait: Callable[[str], None] | None) -> None:
        try:
            first.set_result(await self._connect(on_wait))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller waits for it and raises it
            first.set_exception(error)
        await self._closing.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)

    async def _connect(self, on_wait: Callable[[str], None] | None = None) -> VerifierInfo:
        if self._trust is None:
            channel = open_channel(self.address)
        else:
            channel, welcomed = await connect_authenticated(self.address, self._trust, self._device, self.timing.hello)
            self._device = welcomed.peer.id  # the same device must come back

        def greeted(deadline: float) -> Coroutine[Any, Any, VerifierInfo]:
            return greet(channel, self._vocabulary, deadline, str(self.address), self.model)

        async def prepared() -> VerifierInfo:
            while not self._closing.is_set():
                try:
                    return await call_with_retry(greeted, self.address, self.timing.hello)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not PREPARING:
                        raise
                    if on_wait is not None:
                        on_wait(printable(error.details() or ""))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _PREPARING_SECONDS)
            raise VerifierUnreachable(f"The verifier at {self.address} was not waited for.", "Connect again.")

        try:
            peer = await prepared()
        except BaseException as error:
            await channel.close(None)
            if isinstance(error, grpc.aio.AioRpcError):
                raise self._unreachable(error) from None
            raise
        self._channel = channel
        positions = peer.capabilities.context_length
        _log.info("connected to the verifier at %s: %s, %d positions", self.address, peer.model, positions)
        self.loop_task(self._watch(channel))
        if self._trust is not None and self._device is not None:
            self.loop_task(self._watch_trust(channel, self._trust, self._device))
        return peer

    async def _watch_trust(self, channel: grpc.aio.Channel, trust: Trust, device: DeviceID) -> None:
        """Disconnect from a verifier that is no longer paired with this device."""
        while channel is self._channel:
            await asyncio.sleep(RECHECK_SECONDS)
            try:
                trusted = trust.peers.get(device) is not None
            except TrustUnusable:
                trusted = False
            if not trusted and channel is self._channel:
                await channel.close(None)
                self.loop_lost(channel)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Notice the end of a connection, also while no session is open."""
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        self.loop_lost(channel)

    def _unreachable(self, error: grpc.aio.AioRpcError) -> EdgeError:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return NotPermitted(
                f"The verifier at {self.address} refuses.", error.details() or "Ask the device's owner for the right."
            )
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return model_missing(str(self.address), error.details() or "It has no such model.")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            what = f"The server at {self.address} is not a verifier."
        elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            what = f"No answer from the verifier at {self.address} within {self.timing.hello:g} seconds."
        else:
            what = f"No answer from {self.address}."
        return VerifierUnreachable(
            what, f"Start one there with `edgellm serve --role verifier --port {self.address.port}`."
        )

    async def _reconnect(self) -> None:
        while self._channel is None:
            await asyncio.sleep(self._retry.next())
            try:
                self.peer = await self._connect()
            except EdgeError as error:
                _log.debug("not yet: %s", error.what)


_log = logging.getLogger(__name__)
_CLOSE_GRACE_SECONDS = 10.0  # seconds
_PREPARING_SECONDS = 0.2  # pause between two looks for a ready verifier
