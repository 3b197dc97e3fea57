"""The device's connection to a verifier, in the network loop: it connects, notices loss, and reconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio

from edgellm.engine import Vocabulary
from edgellm.errors import EdgeError, NotPermitted, TrustUnusable, VerifierUnreachable
from edgellm.rpc.address import ModelAddress
from edgellm.rpc.channel import network_loop, open_channel, run_in_network_loop
from edgellm.rpc.discovery.interfaces import call_with_retry
from edgellm.rpc.trust.auth_interceptor import RECHECK_SECONDS
from edgellm.rpc.trust.handshake import connect_authenticated
from edgellm.rpc.trust.identity import DeviceID
from edgellm.rpc.trust.trust import Trust
from edgellm.services.client.link import Timing
from edgellm.services.handshake import PREPARING, VerifierInfo, greet, model_missing, printable
from edgellm.spec.lost_verifier import RetryDelay, VerdictDeadline

_log = logging.getLogger(__name__)
_CLOSE_GRACE_SECONDS = 10.0
_PREPARING_SECONDS = 0.2  # pause between two looks for a ready verifier

OnWait = Callable[[str], None]


class Connection:
    """A connection to one verifier, kept up in the background. Methods named `loop_*` are for the loop's thread."""

    def __init__(
        self, where: ModelAddress, vocabulary: Vocabulary, timing: Timing, trust: Trust | None = None,
        device: DeviceID | None = None, on_wait: OnWait = lambda _doing: None,
    ) -> None:  # fmt: skip
        """Connect to a model at `where`, "" being the verifier's only one; with `trust` by mutual TLS to a paired
        device, or to the given `device` only. A verifier that is not ready yet is waited for: `on_wait` is called, from
        another thread, with its progress, such as "loading a.gguf". Raises PairingRequired: the address leaves this
        machine, and there is no trust, or no device is paired; NotPaired, NotPermitted, IdentityClash: it is not a
        device that trusts this one, and is trusted; VerifierUnreachable: there is no answer; VocabularyMismatch,
        ProtocolError: the two do not fit; ModelNotFound: there is no such model, or none is named and there are
        several."""
        self._address = where.address if trust is not None else where.address.require_loopback()
        self.model, self.timing = where.model, timing
        self._trust, self._device, self._vocabulary = trust, device, vocabulary
        self.patience = VerdictDeadline(timing.least)
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

    def post(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Schedule a call in the loop's thread; return False if the connection is closed."""
        if self._task.done():
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

    def loop_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background, until it ends or the connection is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def loop_lost(self, channel: grpc.aio.Channel) -> None:
        """Reconnect after a loss; close `channel` after a grace in which other sessions may get their verdicts."""
        if channel is self._channel:
            _log.warning("lost the connection to the verifier at %s", self._address)
            self._channel = None
            self.loop_task(channel.close(_CLOSE_GRACE_SECONDS))
            self.loop_task(self._reconnect())

    def loop_pause(self, seconds: float | None = None) -> None:
        """Pause requests after a refusal for `seconds`, or by default for longer with each refusal."""
        self._retry.pause(seconds)

    def loop_answered(self) -> None:
        """Reset the backoff, as the verifier has answered."""
        self._retry.reset()

    async def _live(self, first: Future[VerifierInfo], on_wait: OnWait) -> None:
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

    async def _connect(self, on_wait: OnWait = lambda _doing: None) -> VerifierInfo:
        if self._trust is None:
            channel = open_channel(self._address)
        else:
            channel, found = await connect_authenticated(self._address, self._trust, self._device, self.timing.hello)
            self._device = found.peer.id  # from now on, the same device has to answer
        try:
            peer = await self._greeted(channel, on_wait)
        except grpc.aio.AioRpcError as error:
            await channel.close(None)
            raise self._unreachable(error) from None
        except BaseException:
            await channel.close(None)
            raise
        self._channel = channel
        _log.info("connected to the verifier at %s: %s", self._address, peer.model)
        self.loop_task(self._watch(channel))
        if self._trust is not None:
            self.loop_task(self._watch_trust(channel, self._trust))
        return peer

    async def _greeted(self, channel: grpc.aio.Channel, on_wait: OnWait) -> VerifierInfo:
        """Return the verifier's description, once it can verify."""
        where = self._address
        greeted = partial(greet, channel, self._vocabulary, where=str(where), model=self.model)
        while not self._closing.is_set():
            try:
                return await call_with_retry(greeted, where, self.timing.hello)
            except grpc.aio.AioRpcError as error:
                if error.code() is not PREPARING:
                    raise
                on_wait(printable(error.details() or ""))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _PREPARING_SECONDS)
        raise VerifierUnreachable(f"The verifier at {where} was not waited for.", "Connect again.")

    async def _watch_trust(self, channel: grpc.aio.Channel, trust: Trust) -> None:
        """Disconnect from a verifier that is no longer paired with this device."""
        paired = True
        while paired and channel is self._channel:
            await asyncio.sleep(RECHECK_SECONDS)
            try:
                paired = self._device is None or trust.peers.get(self._device) is not None
            except TrustUnusable:
                paired = False
        if channel is self._channel:
            await channel.close(None)
            self.loop_lost(channel)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Notice the end of a connection, also while no session is open."""
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        self.loop_lost(channel)

    def _unreachable(self, error: grpc.aio.AioRpcError) -> EdgeError:
        where = self._address
        match error.code():
            case grpc.StatusCode.PERMISSION_DENIED:
                return NotPermitted(
                    f"The verifier at {where} refuses.", error.details() or "Ask the device's owner for the right."
                )
            case grpc.StatusCode.NOT_FOUND:
                return model_missing(str(where), error.details() or "It has no such model.")
            case grpc.StatusCode.UNIMPLEMENTED:
                what = f"The server at {where} is not a verifier."
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                what = f"No answer from the verifier at {where} within {self.timing.hello:g} seconds."
            case _:
                what = f"No answer from {where}."
        return VerifierUnreachable(what, f"Start one there with `edgellm serve --role verifier --port {where.port}`.")

    async def _reconnect(self) -> None:
        while self._channel is None:
            await asyncio.sleep(self._retry.next())
            try:
                self.peer = await self._connect()
            except EdgeError as error:
                _log.debug("not yet: %s", error.what)
