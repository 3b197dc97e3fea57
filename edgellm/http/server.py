"""The HTTP server: TLS, limits of connections and of the time for which one may owe a request, and its end.

uvicorn waits for ever for the end of a request's head, and for a client that does not read. A stranger needs no key for
that, so both are limited here; and where all places are taken, a new connection replaces the one silent for longest.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import struct
import threading
from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgellm.errors import InvalidOption, PortTaken
from edgellm.http.app import make_app
from edgellm.http.handlers import RequestHandler, ServedModel
from edgellm.http.mesh_status import PlanOut
from edgellm.http.middleware import SecurityMiddleware
from edgellm.rpc.address import Address
from edgellm.rpc.versions import program

HEAD_SECONDS = 10.0  # for a TLS handshake, and then for the head of the first request
NEXT_SECONDS = 40.0  # for the head of the next one
TAKE_SECONDS = 30.0  # how long a client may leave data unread
MOST = 512
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for 0 seconds
_BREATH = 0.5  # seconds until the next try, when the system has no descriptor left


class TimedConnection(H11Protocol):
    """A connection, from the moment that it is accepted."""

    def __init__(
        self, came: socket.socket, *, left: Callable[[TimedConnection], None],
        silent: Callable[[TimedConnection, bool], None],
        **uvicorns: object,
    ) -> None:  # fmt: skip
        """`left` is called when the connection is over; `silent` whenever it begins, or ceases, to owe a request."""
        super().__init__(**uvicorns)  # type: ignore[arg-type]  # as uvicorn calls it
        self._came, self._left, self._silent = came, left, silent
        self._owed: TimerHandle | None = None
        self._untaken: TimerHandle | None = None

    def end(self) -> None:
        """Close the connection at once, whatever is under way."""
        if self.transport is not None:
            if self.transport.get_write_buffer_size():  # or the system goes on offering unread data
                self._came.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self.transport.abort()
            return
        with suppress(OSError):  # during a handshake the client then seems to have left
            self._came.shutdown(socket.SHUT_RDWR)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._owe(HEAD_SECONDS)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._owed)
            self._silent(self, False)

    def on_response_complete(self) -> None:
        self._owe(NEXT_SECONDS)  # whatever comes meanwhile, even the rest of a refused request
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._untaken = self.loop.call_later(TAKE_SECONDS, self.end)
        super().pause_writing()

    def resume_writing(self) -> None:
        _cancel(self._untaken)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._owed)
        _cancel(self._untaken)
        self._left(self)
        super().connection_lost(exc)

    def _owe(self, seconds: float) -> None:
        _cancel(self._owed)
        self._owed = self.loop.call_later(seconds, self.end)
        self._silent(self, True)


def _cancel(timer: TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class ConnectionLimiter:
    """An acceptor of connections, for use in one event loop."""

    def __init__(
        self, listening: socket.socket, tls: ssl.SSLContext | None, visit: Callable[..., TimedConnection]
    ) -> None:
        """`visit` makes a connection from a socket, `left` and `silent`."""
        self._listening, self._tls, self._visit = listening, tls, visit
        self._here: set[TimedConnection] = set()
        self._silent: dict[TimedConnection, None] = {}  # in the order in which they fell silent
        self._greeted: dict[asyncio.Task[None], TimedConnection] = {}
        listening.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """Accept no more connections, and give up handshakes; open connections stay."""
        self._accepting.cancel()
        for visit in self._greeted.values():
            visit.end()
        await asyncio.gather(self._accepting, *self._greeted, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                came, _ = await loop.sock_accept(self._listening)
            except OSError:
                await asyncio.sleep(_BREATH)
                continue
            while len(self._here) >= MOST and self._silent:
                self._hang_up(next(iter(self._silent)))
            if len(self._here) >= MOST:  # all of them are being served
                came.close()
                continue
            visit = self._visit(came, left=self._gone, silent=self._fell_silent)
            self._here.add(visit)
            self._fell_silent(visit, True)
            greeting = loop.create_task(self._greet(visit, came))
            self._greeted[greeting] = visit
            greeting.add_done_callback(self._greeted.pop)

    async def _greet(self, visit: TimedConnection, came: socket.socket) -> None:
        within = {} if self._tls is None else {"ssl_handshake_timeout": HEAD_SECONDS}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: visit, came, ssl=self._tls, **within)
        except OSError:  # the client has left, or speaks no TLS
            self._gone(visit)

    def _hang_up(self, visit: TimedConnection) -> None:
        self._gone(visit)
        visit.end()

    def _gone(self, visit: TimedConnection) -> None:
        self._here.discard(visit)
        self._silent.pop(visit, None)

    def _fell_silent(self, visit: TimedConnection, silent: bool) -> None:
        self._silent.pop(visit, None)
        if silent and visit in self._here:
            self._silent[visit] = None


GRACE_SECONDS = 10.0  # for replies under way, when the server stops
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a server: the API key, and the files of a certificate and its key for TLS."""

    key: str
    certificate: Path
    private_key: Path


class HttpServer:
    """An HTTP server for one pair. Call `start`, `open` when the pair is loaded, then `stop`, all from any thread."""

    def __init__(
        self,
        address: Address,
        *,
        lock: Credentials | None = None,
        key: str | None = None,
        names: Sequence[str] = (),
        replies: int = 2,
        waiting: int = 16,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        """`names`: hosts by which the server may be called, besides its address. `replies` are written at once, and up
        to `waiting` requests wait. `key` is asked for without TLS, on loopback; clients of a server that asks for none
        are not told of other devices.

        Raises:
            InvalidOption: the address leaves this machine, and there is no lock; or a number is out of range.
        """
        if lock is None and not address.loopback:
            raise InvalidOption(
                f"{address} can be reached from other machines, and there is no key.", "Give one, or use 127.0.0.1."
            )
        for name, value, least in (("replies", replies, 1), ("waiting", waiting, 0)):
            if not least <= value <= 1000:
                raise InvalidOption(f"{name} is {value}.", f"Give a whole number from {least} to 1000.")
        self.address, self.scheme = address, "http" if lock is None else "https"
        self._lock = lock
        shown = key if lock is None else lock.key
        self._reception = RequestHandler(replies, waiting, on_event or (lambda _text: None), anonymous=shown is None)
        known = {address.host, *names, *(_LOOPBACK if address.loopback else ())}
        self._app = SecurityMiddleware(make_app(self._reception, program()), known, shown)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}"

    def start(self) -> Address:
        """Listen, and return the address, with the real port where port 0 was asked for.

        Raises:
            PortTaken: something else listens there.
            InvalidOption: this machine does not have the address, or the certificate cannot be used.
        """
        listening = _listen(self.address)
        self.address = Address(self.address.host, listening.getsockname()[1])
        config = uvicorn.Config(
            self._app, http=TimedConnection, ws="none", loop="asyncio", lifespan="off", log_config=None,
            access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=30, timeout_graceful_shutdown=3,
        )  # fmt: skip
        if self._lock is not None:
            config.ssl_certfile, config.ssl_keyfile = str(self._lock.certificate), str(self._lock.private_key)
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            listening.close()
            raise InvalidOption(
                f"The certificate {self._lock and self._lock.certificate} cannot be used: {error}.",
                "Give the PEM files of a certificate and of its key.",
            ) from error
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        server = self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, args=(server, listening), name="edgellm-door", daemon=True)
        self._thread.start()
        server.up.wait()
        return self.address

    def open(self, writer: ServedModel, plan: PlanOut | None = None) -> None:
        """Let `writer` answer from now on; until then /health and everything else say that the model is being loaded.
        The page shows `plan`."""
        self._reception.open(writer, plan)

    def rest(self, why: str) -> None:
        """Serve without a pair: requests for a reply are answered with `why`, all others as usual."""
        self._reception.rest(why)

    def request_stop(self, grace: float = GRACE_SECONDS) -> None:
        """Begin to stop, and return at once; may be called in a signal handler, and again with less grace."""
        if self._server is not None and self._server.loop is not None and not self.wait(0):
            self._server.loop.call_soon_threadsafe(self._begin_stop, grace)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server is closed, for `timeout` seconds at most; return whether it is."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Stop, and return when everything is closed. The pair stays the caller's."""
        self.request_stop(grace)
        self.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    def _run(self, server: _Server, listening: socket.socket) -> None:
        try:
            asyncio.run(server.serve(sockets=[listening]))
        finally:
            server.up.set()
            listening.close()
            self._reception.close()

    def _begin_stop(self, grace: float) -> None:
        if self._server is not None:
            self._server.finish(self._reception, grace)


class _Server(uvicorn.Server):
    """A uvicorn server that tells when it listens, and lets replies end before it closes."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._porches: list[ConnectionLimiter] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections in a `ConnectionLimiter`: uvicorn has no limits for those that bring no request."""
        self.loop = asyncio.get_running_loop()
        await super().startup([])
        visit = partial(
            TimedConnection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        self._porches = [ConnectionLimiter(one, self.config.ssl, visit) for one in sockets or ()]
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for porch in self._porches:
            await porch.close()
        await super().shutdown(sockets)

    def finish(self, reception: RequestHandler, grace: float) -> None:
        task = asyncio.get_running_loop().create_task(self._finish(reception, grace))
        self._finishing.add(task)

    async def _finish(self, reception: RequestHandler, grace: float) -> None:
        await reception.finish(grace)
        self.should_exit = True


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"Something else already listens on port {address.port}.",
                "Stop it, or choose another port with --http-port.",
            ) from error
        raise InvalidOption(f"Nothing can listen at {address}: {error.strerror}.", "Choose another address.") from error
