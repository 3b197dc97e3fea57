"""A link to a service of another device: how to connect, and a stream that notices when the device is lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from edgellm.errors import DeviceLost, EdgeError, EngineFailed, ProtocolError
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HEARTBEAT_SECONDS, HELLO_SECONDS, first_of, network_loop, open_channel
from edgellm.rpc.trust.handshake import PeerInfo, connect_authenticated
from edgellm.rpc.trust.identity import DeviceID
from edgellm.rpc.trust.trust import Trust, trust_for

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """A device's timeouts, in seconds except for `silent_beats`.

    A device that owes an answer is lost after `silent_beats` heartbeats without a message, or after `stall` in which it
    computed nothing; beats are counted here, so that a process that was itself suspended blames no other. Whatever
    a verifier says meanwhile, a verdict has a deadline of `least` or several times its usual time: see
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


WORKER_TIMING = Timing(silent_beats=12, stall=60.0)
"""The timeouts of stages: a device loads and computes for others meanwhile."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A device's address, and how to connect: with `trust` by mutual TLS, only to `device` if that is known. `model` is
    the one that is wanted of a verifier; "": its only one."""

    name: str
    address: Address
    trust: Trust | None = None
    device: DeviceID | None = None
    model: str = ""

    def __str__(self) -> str:
        return f"{self.address}#{self.model}" if self.model else str(self.address)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the endpoint at [NAME=]HOST:PORT[#MODEL], which is named by its address if no name is given. Raises
        InvalidOption: there is no valid address; TrustUnusable: as `trust_for`."""
        where, _, model = text.partition("#")
        name, _, place = where.rpartition("=")
        address = Address.parse(place)
        return cls(name.strip() or str(address), address, trust_for(address), model=model.strip())

    async def connect(self) -> grpc.aio.Channel:
        """Return an open channel; the caller closes it."""
        return (await self.meet())[0]

    async def meet(self, seconds: float = HELLO_SECONDS) -> tuple[grpc.aio.Channel, PeerInfo | None]:
        """Return an open channel, which the caller closes, and the paired device that has answered within `seconds`;
        None in plain text."""
        if self.trust is None:
            return open_channel(self.address), None
        return await connect_authenticated(self.address, self.trust, self.device, seconds)

    async def ask(self, method: str, request: Message) -> bytes:
        """Return a worker's answer to one request. Raise DeviceLost without an answer."""
        try:
            async with asyncio.timeout(HELLO_SECONDS), await self.connect() as channel:
                answer: bytes = await channel.unary_unary(method, None, bytes)(request.SerializeToString())
                return answer
        except TimeoutError:
            raise lost(f"{self.name} at {self.address} does not answer.") from None
        except grpc.aio.AioRpcError as error:
            raise lost(f"{self.name} at {self.address}: {explained(error)}") from None

    async def hold(self, held: Callable[[grpc.aio.Channel], Awaitable[None]]) -> tuple[EdgeError, bool]:
        """Connect, and await `held` over the channel; return why that has ended, and whether the device is at fault."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                channel = await self.connect()
            async with channel:
                await held(channel)
        except TimeoutError:
            return lost(f"{self.name} at {self.address} does not answer."), True
        except grpc.aio.AioRpcError as error:
            return lost(f"{self.name}: {explained(error)}"), error.code() is not grpc.StatusCode.ABORTED
        except ProtocolError as error:
            return lost(f"{self.name} violates the protocol: {error}"), True
        except EdgeError as error:
            return error, True
        except Exception as error:  # noqa: BLE001 - it would go unreported otherwise
            _log.exception("the stream to %s", self.address)
            return EngineFailed(f"The reports of {self.name} could not be handled: {error!r}.", "Report this."), True
        return lost(f"{self.name} has ended the session."), True


def lost(what: str) -> DeviceLost:
    """Return the error for a device that is gone, with its part of a model."""
    return DeviceLost(what, "The other devices continue if they hold its layers.")


def explained(error: grpc.aio.AioRpcError) -> str:
    """Return a worker's gRPC error as a text for people."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "the server there is not a worker (start one with edgellm serve --role worker)."
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return "it does not answer, or no longer does."
    return (error.details() or error.code().name).replace("\n", " ")


class ServiceLink:
    """A stream to another device, in the network loop: frames go out in order, and messages come in. Any loss ends it.

    A device that owes an answer is watched: it must be alive and make progress."""

    def __init__(self, method: str, timing: Timing, *, accepted: bool = False) -> None:
        """Set up a call, whose frames wait for `run`. `accepted`: frames after the first wait for the other side's
        first message, because gRPC hides the reason of a refusal where a frame fails to be sent meanwhile."""
        self._method, self._timing = method, timing
        self._frames: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue()
        self.unsent = 0  # counted frames that are not taken yet
        self._ended, self._accepted = asyncio.Event(), asyncio.Event()
        if not accepted:
            self._accepted.set()

    def owe(self) -> None:
        """Begin to watch: the device owes an answer from now on."""
        self._silent, self._mark, self._still = -1, object(), 0.0  # the first beat may come at once

    def progress(self, mark: object) -> None:
        """Note the device's progress, which a new `mark` shows."""
        if mark != self._mark:
            self._mark, self._still = mark, 0.0

    def trouble(self, waited: float) -> str:
        """Count a heartbeat, for which this process has `waited`; return the trouble as a clause without a subject, ""
        if there is none."""
        late = 2 * self._timing.beat  # a longer wait means that this process was late, or the machine asleep
        self._silent += waited < late
        self._still += min(waited, late)
        if self._silent >= self._timing.silent_beats:
            return "has stopped responding"
        if self._still > self._timing.stall:
            return f"has made no progress for {self._timing.stall:g} seconds"
        return ""

    def post(self, frame: Message) -> None:
        """Send a frame, from another thread."""
        network_loop().call_soon_threadsafe(self.send, frame.SerializeToString())

    def close(self) -> None:
        """End the stream, from another thread."""
        network_loop().call_soon_threadsafe(self.end)

    def send(self, frame: bytes, count: int = 1) -> None:
        self.unsent += count
        self._frames.put_nowait((frame, count))

    def end(self) -> None:
        """End the stream, whatever waits, and also before it begins: `run` returns."""
        self._ended.set()

    async def run(
        self, channel: grpc.aio.Channel, take: Callable[[bytes], None], beat: Callable[[float], object]
    ) -> None:
        """Begin the call. Call `take` with every message, and `beat` with the length of every heartbeat, until this
        side or the other ends the stream. Raises grpc.aio.AioRpcError: the stream has failed, or is refused; EdgeError:
        of `take` and `beat`."""
        if self._ended.is_set():
            return
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(self._method, bytes, bytes)()  # type: ignore[call-arg]  # written to
        self.owe()
        try:
            await first_of(self._write(call), self._read(call, take), self._beats(beat), self._ended.wait())
        finally:
            call.cancel()

    async def _write(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader finds the stream ended, and why
            while True:
                frame, count = await self._frames.get()
                await call.write(frame)
                self.unsent -= count
                await self._accepted.wait()
        await self._ended.wait()

    async def _read(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", take: Callable[[bytes], None]) -> None:
        while isinstance(data := await call.read(), bytes):
            self._silent = 0
            self._accepted.set()
            take(data)

    async def _beats(self, beat: Callable[[float], object]) -> None:
        while True:
            began = monotonic()
            await asyncio.sleep(self._timing.beat)
            beat(monotonic() - began)
