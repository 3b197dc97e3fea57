"""A server of gRPC services, which is started and stopped from any thread, and its events."""

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from edgellm.errors import DeviceStuck, EdgeError
from edgellm.rpc import DEFAULT_PORT
from edgellm.rpc.address import Address
from edgellm.rpc.channel import (
    HEARTBEAT_SECONDS,
    READ_TIMEOUT_SECONDS,
    bind,
    check_bindable,
    network_loop,
    new_server,
    run_in_network_loop,
)
from edgellm.rpc.protos import parse_message
from edgellm.rpc.protos.trust_pb2 import Offer
from edgellm.rpc.trust.handshake import AuthInterceptor, Context, Method, caller_id, welcome_handlers
from edgellm.rpc.trust.trust import Right, Trust

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Stream: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]

GRACE_SECONDS = 10.0  # limit for calls in flight when the server is stopped
BEAT_SECONDS = 1.0  # pause between two looks at what is unused, and limit for a write that is given up


Notify: TypeAlias = Callable[[str], None]
"""Called with a sentence for people on what has happened, from the loop's thread; must not block. No prompt and no
token is ever in it."""


def tell_nobody(_what: str) -> None:
    """Do nothing, as a `Notify`."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The address to listen at, and the callers to answer: off loopback, and with `paired_only` everywhere, only paired
    devices are answered, by mutual TLS."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    paired_only: bool = False
    on_event: Notify = tell_nobody

    def checked(self) -> tuple[Address, Trust | None]:
        """Return the address, and the trust to answer paired devices with. Raises PairingRequired, TrustUnusable,
        PortTaken, InvalidOption: it is impossible to listen there."""
        address = Address.of(self.host, self.port)
        trust = None if address.loopback and not self.paired_only else Trust.load()
        if trust is not None:
            trust.require_peers()
        check_bindable(address)
        return address, trust


class Listener:
    """A server of gRPC `services`: `start`, then `stop`; both may come from any thread."""

    kind = "server"
    """The server's name in events."""

    def __init__(self, address: Address, trust: Trust | None, on_event: Notify) -> None:
        """With `trust`, answer only paired devices, by mutual TLS; without it, every caller on this machine. Raises
        PairingRequired: the address is not loopback, and there is no `trust`."""
        self.address = address if trust is not None else address.require_loopback()
        self.trust = trust
        self._notify = on_event
        self.guard = None if trust is None else AuthInterceptor(trust, on_event)
        self.services: list[Service] = []
        self._offers: list[Offer] = []  # the models that paired devices are told of
        self._task: Future[None] | None = None
        self._started = threading.Event()  # set once the server listens or has failed
        self._stop_requests: asyncio.Queue[float] = asyncio.Queue()

    def start(self) -> Address:
        """Start to listen; return the address, with the real port if port 0 was asked for. Raises PairingRequired: with
        `trust`, no device is paired; PortTaken: something else listens there; InvalidOption: this machine does not have
        the address, or does not give away the port."""
        self._task = run_in_network_loop(self._serve())
        self._task.add_done_callback(lambda _ended: self._started.set())
        self._started.wait()
        if self._task.done():
            self._task.result()
        return self.address

    def request_stop(self, grace: float = GRACE_SECONDS) -> None:
        """Begin to stop, and return at once; may be called in a signal handler, and again with less grace. New calls
        are refused; calls in flight may finish within `grace` seconds."""
        if self._task is not None and not self._task.done():
            network_loop().call_soon_threadsafe(self._stop_requests.put_nowait, grace)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has ended; return whether it has."""
        return self._task is None or bool(wait_for([self._task], timeout).done)

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Stop, and return when everything is closed."""
        self.request_stop(grace)
        self.wait()

    def close(self) -> None:
        """Release the server's resources, after it has ended."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    def _listening(self) -> None:
        """Begin the work that needs a listening server."""

    def _stopping(self, grace: float) -> float:
        """Return the seconds for calls in flight, of the `grace` that is given."""
        return grace

    async def _release(self) -> None:
        """Release what answering needed, once the server has ended."""

    async def _serve(self) -> None:
        server = new_server()
        handlers = [service.handler() for service in self.services]
        if self.trust is not None and self.guard is not None:
            handlers.append(welcome_handlers(self.trust, self.guard, self._offers))
        server.add_generic_rpc_handlers(handlers)
        try:
            self.address = bind(server, self.address, self.trust)
            await server.start()
            self._listening()
            self._started.set()
            grace = self._stopping(await self._stop_requests.get())
            closing = asyncio.create_task(server.stop(grace))
            while grace > 0 and not closing.done():  # a further request may leave less
                shorten = asyncio.create_task(self._stop_requests.get())
                await asyncio.wait({closing, shorten}, return_when=asyncio.FIRST_COMPLETED)
                if not shorten.cancel() and (grace := shorten.result()) <= 0:
                    await server.stop(None)
            await closing
            self._notify(f"The {self.kind} has stopped.")
        finally:
            await server.stop(None)
            await self._release()


class Service:
    """The calls of a contract, for devices with a `right`, or for every caller on this machine. Each is answered by the
    method of its name. Lives in one event loop."""

    contract: ClassVar[ServiceDescriptor]
    right: ClassVar[Right]
    here: ClassVar[str] = ""
    """The owner of what callers on this machine have."""
    over: ClassVar[str] = ""
    """The report that an error has ended a stream, such as "A stage has ended"; without it there is none."""

    def __init__(self, notify: Notify, guard: AuthInterceptor | None) -> None:
        """With a `guard`, answer only paired devices that have the right."""
        self._notify, self._guard = notify, guard

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """Return the handler of all calls. They take bytes, to parse only after the guard."""
        made = {}
        for call in self.contract.methods:
            name, streams = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", call.name).lower(), call.client_streaming
            kind = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
            made[call.name] = kind(self._answering(getattr(self, name), streams))
        return grpc.method_handlers_generic_handler(self.contract.full_name, made)

    def right_for(self, call: Method) -> Right:  # noqa: ARG002
        return self.right

    def owner(self, stream: Stream) -> str:
        """Return the device that a caller's things belong to; `here` for all callers on this machine."""
        return self.here if self._guard is None else str(caller_id(stream))

    async def released(self, what: str, close: Callable[[], object]) -> None:
        """Close what a stream held, in a thread, whatever happens to the stream meanwhile; and say so."""
        closing = asyncio.ensure_future(asyncio.to_thread(close))
        closing.add_done_callback(lambda _: self._notify(f"Released {what}."))
        await asyncio.shield(closing)

    def _answering(self, call: Method, streams: bool) -> Any:
        """Return a `call` for gRPC: only for callers with the right, and ended by an error's status."""

        async def answered(request: Any, context: Context) -> Any:
            try:
                answer = await call(request, context)
                return answer.SerializeToString() if isinstance(answer, Message) else answer
            except EdgeError as error:
                if streams and self.over:
                    self._notify(f"{self.over}: {error.what}")
                await context.abort(grpc.StatusCode[error.rpc_status], f"{error.what}\n{error.next_step}")

        return answered if self._guard is None else self._guard.wrap(answered, self.right_for(call))


async def next_message(stream: Stream, kind: type[M]) -> M | None:
    """Return the next message of a stream; None at its end. Raises ProtocolError."""
    data = await stream.read()
    return parse_message(kind, data) if isinstance(data, bytes) else None


async def write_in_time(stream: Stream, message: Message) -> None:
    """Send a message, and wait until the device takes it, so that messages never queue up. Raises DeviceStuck: it does
    not. A cancelled write may go on for a while: gRPC ends no stream during its first message."""
    writing = asyncio.ensure_future(stream.write(message.SerializeToString()))
    writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # It may fail after this call.
    try:
        for _ in range(ceil(READ_TIMEOUT_SECONDS / HEARTBEAT_SECONDS)):  # a suspended process blames no other
            if (await asyncio.wait({writing}, timeout=HEARTBEAT_SECONDS))[0]:
                return writing.result()
        raise DeviceStuck(
            f"The device has not read its stream for {READ_TIMEOUT_SECONDS:g} seconds.", "Begin another session."
        )
    finally:
        await asyncio.wait({writing}, timeout=BEAT_SECONDS)
        writing.cancel()


async def in_thread(work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Run slow work in a thread. If the call is cancelled, wait for the work all the same, so that nothing is closed
    under it, and `undo` its result."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    finally:
        if not task.done():
            if undo is not None:
                task.add_done_callback(lambda done: done.exception() or undo(done.result()))
            await asyncio.wait({task})
