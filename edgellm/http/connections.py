"""Connections: a limit of how many there are at a time, and of the time for which one may owe a request.

uvicorn waits for ever for the end of a request's head, and for a client that does not read. A stranger needs no key for
that, so both are limited here; and where all places are taken, a new connection replaces the one silent for longest.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from asyncio import TimerHandle
from collections.abc import Callable
from contextlib import suppress

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # for a TLS handshake, and then for the head of the first request
NEXT_SECONDS = 40.0  # for the head of the next one
TAKE_SECONDS = 30.0  # how long a client may leave data unread
MOST = 512
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for 0 seconds
_BREATH = 0.5  # seconds until the next try, when the system has no descriptor left


class Visit(H11Protocol):
    """A connection, from the moment that it is accepted."""

    def __init__(
        self, came: socket.socket, *, left: Callable[[Visit], None], silent: Callable[[Visit, bool], None],
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


class Porch:
    """An acceptor of connections, for use in one event loop."""

    def __init__(self, listening: socket.socket, tls: ssl.SSLContext | None, visit: Callable[..., Visit]) -> None:
        """`visit` makes a connection from a socket, `left` and `silent`."""
        self._listening, self._tls, self._visit = listening, tls, visit
        self._here: set[Visit] = set()
        self._silent: dict[Visit, None] = {}  # in the order in which they fell silent
        self._greeted: dict[asyncio.Task[None], Visit] = {}
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

    async def _greet(self, visit: Visit, came: socket.socket) -> None:
        within = {} if self._tls is None else {"ssl_handshake_timeout": HEAD_SECONDS}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: visit, came, ssl=self._tls, **within)
        except OSError:  # the client has left, or speaks no TLS
            self._gone(visit)

    def _hang_up(self, visit: Visit) -> None:
        self._gone(visit)
        visit.end()

    def _gone(self, visit: Visit) -> None:
        self._here.discard(visit)
        self._silent.pop(visit, None)

    def _fell_silent(self, visit: Visit, silent: bool) -> None:
        self._silent.pop(visit, None)
        if silent and visit in self._here:
            self._silent[visit] = None
