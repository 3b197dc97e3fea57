"""The HTTP server: uvicorn with TLS, limits on connections and on their time, and a graceful shutdown.

uvicorn waits forever for the end of a request's head, and for a client that does not read. Neither needs an API key, so
both have a limit of time here. When the table of connections is full, a new one replaces the one idle for longest.
"""

import asyncio
import errno
import socket
import ssl
import struct
import threading
from asyncio import TimerHandle
from functools import partial
from pathlib import Path
from typing import Self

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from edgellm.errors import InvalidOption, PortTaken
from edgellm.http.app import make_app
from edgellm.http.dialects import error_body
from edgellm.http.middleware import CLIENT_SECONDS, HttpConfig, SecurityMiddleware
from edgellm.http.model_host import ModelCatalog, Opener, ServedModel
from edgellm.http.replies import RequestHandler
from edgellm.rpc.address import Address
from edgellm.rpc.protos import program_version

MAX_CONNECTIONS = 512
GRACE_SECONDS = 10.0  # limit for replies being written when the server stops
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for 0 seconds
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class TimedConnection(H11Protocol):
    """uvicorn's connection, with limits of time from the moment that it is made."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config, state, app_state={})
        self._untimed_app, self.app = self.app, self._serve
        self._requests = 0  # requests being served; the next can start just before the last ends
        self.idle_since: float | None = None  # None while a request is served, or the connection is closed
        self._idle_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None

    def abort(self) -> None:
        """Close the connection at once, whatever is under way."""
        self.idle_since = None
        if self.transport.get_write_buffer_size():  # otherwise the system goes on offering unread data
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request: the connection is not idle, and its client owes nothing."""
        self._requests += 1
        _cancel(self._idle_timer)
        self.idle_since = None
        try:
            await self._untimed_app(scope, receive, send)
        finally:
            self._requests -= 1
            if not self._requests and self in self.connections:
                self._wait_for_request()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_request()
        if len(self.connections) > MAX_CONNECTIONS:
            others = (one for one in self.connections if isinstance(one, TimedConnection) and one is not self)
            idle = {one: one.idle_since for one in others if one.idle_since is not None}
            min(idle, key=idle.__getitem__, default=self).abort()  # all others may be being served

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._write_timer)
        self._write_timer = asyncio.get_running_loop().call_later(CLIENT_SECONDS, self.abort)

    def resume_writing(self) -> None:
        _cancel(self._write_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._idle_timer)
        _cancel(self._write_timer)
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        _cancel(self._idle_timer)
        loop = asyncio.get_running_loop()
        self.idle_since, self._idle_timer = loop.time(), loop.call_later(CLIENT_SECONDS, self.abort)


def _cancel(timer: TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _UvicornServer(uvicorn.Server):
    """A uvicorn server of timed connections."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self.started_or_failed = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        await super().startup([])
        self.loop, tls = asyncio.get_running_loop(), self.config.ssl
        listening = await self.loop.create_server(
            partial(TimedConnection, self.config, self.server_state), sock=self._listener, ssl=tls,
            ssl_handshake_timeout=None if tls is None else CLIENT_SECONDS,
        )  # fmt: skip
        self.servers.append(listening)
        self.started_or_failed.set()

    async def end(self, handler: RequestHandler, grace: float) -> None:
        """Stop once `handler` has ended its replies, for which it has `grace` seconds."""
        await handler.shut_down(grace)
        self.should_exit = True


class HttpServer:
    """An HTTP server for one pair. Call `start`, `open` when the pair is loaded, then `stop`, from any threads."""

    def __init__(self, address: Address, config: HttpConfig | None = None) -> None:
        """Raise InvalidOption where other machines can reach the address and there is no key or no TLS, a number is out
        of range, or an origin is invalid."""
        self.config = config = config or HttpConfig()
        if not (address.loopback or (config.tls and config.key)):
            raise InvalidOption(
                f"{address} can be reached from other machines, but there is no key or no certificate.",
                "Give a key and a certificate, or listen on 127.0.0.1.",
            )
        for name, value, least in (("replies", config.replies, 1), ("waiting", config.waiting, 0)):
            if not least <= value <= 1000:
                raise InvalidOption(f"{name} is {value}.", f"Give a whole number from {least} to 1000.")
        self.address, self.scheme = address, "http" if config.tls is None else "https"
        self._handler = handler = RequestHandler(config)
        self.models, self.metrics = handler.models, handler.metrics
        hosts = {address.host, *config.names, *(_LOOPBACK_NAMES if address.loopback else ())}
        app, self.keys = make_app(handler, program_version()), handler.keys
        self._app = SecurityMiddleware(app, hosts, self.keys, error_body, config.origins)
        self._server: _UvicornServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{Address(self.reached_at, self.address.port)}"

    @property
    def reached_at(self) -> str:
        """Return a host at which this machine reaches the server, and which its Host header may name."""
        names = self.config.names if self.address.unspecified else ()
        return next((name for name in names if name != self.address.host), self.address.host)

    @property
    def certificate(self) -> Path | None:
        """Return the file of the certificate; None without TLS."""
        return None if self.config.tls is None else self.config.tls[0]

    @property
    def page_url(self) -> str:
        """Return the page's address, with its key in the fragment, which a browser keeps to itself."""
        key = self.config.page_key
        return f"{self.url}/" if key is None else f"{self.url}/#key={key}"

    def start(self) -> Address:
        """Listen, and return the address with its port. Raises PortTaken; InvalidOption for address or certificate."""
        listener = _listen(self.address)
        self.address = Address(self.address.host, listener.getsockname()[1])
        config = uvicorn.Config(
            self._app, http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=30, timeout_graceful_shutdown=3,
        )  # fmt: skip
        if (tls := self.config.tls) is not None:
            config.ssl_certfile, config.ssl_keyfile = map(str, tls)
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            listener.close()
            raise InvalidOption(
                f"The certificate {self.certificate} cannot be used: {error}.",
                "Give the PEM files of a certificate and of its key.",
            ) from error
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        server = self._server = _UvicornServer(config, listener)
        self._thread = threading.Thread(target=self._run, args=(server, listener), name="edgellm-http", daemon=True)
        self._thread.start()
        server.started_or_failed.wait()
        return self.address

    def open(self, served: ServedModel, *, opener: Opener | None = None, catalog: ModelCatalog | None = None) -> None:
        """Answer requests from now on, as `ModelHost.open` says. An alias of a missing model is an event."""
        if served.pair.verifier_up is not None:
            self.metrics.watch_verifier(served.pair.verifier_up)
        self.models.open(served, opener=opener, catalog=catalog)
        for text in self.models.unmet_aliases():
            self.config.on_event(text)

    def request_stop(self, grace: float = GRACE_SECONDS) -> None:
        """Begin to stop, and return at once. May be called in a signal handler, and again with less grace."""
        if self._server is not None and self._server.loop is not None and not self.wait(0):
            asyncio.run_coroutine_threadsafe(self._server.end(self._handler, grace), self._server.loop)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped, for at most `timeout` seconds; return whether it has."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Stop, and return when everything of the server is closed. A pair without an `Opener` stays open."""
        self.request_stop(grace)
        self.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    def _run(self, server: _UvicornServer, listener: socket.socket) -> None:
        try:
            asyncio.run(server.serve())
        finally:
            server.started_or_failed.set()
            listener.close()
            self._handler.close()


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"Port {address.port} is in use by another program.",
                "Stop that program, or choose another port with --http-port.",
            ) from error
        why = str(error.strerror).partition(" (while")[0]  # Python repeats the address
        raise InvalidOption(f"Cannot listen at {address}: {why}.", "Choose another address.") from error
